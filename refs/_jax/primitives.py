"""JAX's primitives, under the names that the rest of the library has for them."""

from __future__ import annotations

import importlib.util

from jax._src import compute_on as _compute_on
from jax._src import core as _core
from jax._src import xla_metadata as _xla_metadata
from jax._src.core import (
    accum_grad_in_ref_p,
    empty_ref_p,
    free_ref_p,
    freeze_p,
    pvary_p,
)
from jax._src.core import ref_p as new_ref_p
from jax._src.custom_batching import custom_vmap_p as custom_vmap_p
from jax._src.debugging import debug_callback_p, debug_print_p
from jax._src.lax import lax as _lax
from jax._src.lax.parallel import reduce_scatter_p as reduce_scatter_p
from jax._src.pjit import reshard_p
from jax._src.shard_map import shard_map_p as shard_map_p
from jax._src.state.discharge import run_state_p as run_state_p
from jax._src.state.primitives import addupdate_p as addupdate_p
from jax.extend.core.primitives import add_jaxvals_p as add_any_p
from jax.extend.core.primitives import cond_p as cond_p
from jax.extend.core.primitives import custom_jvp_call_p as custom_jvp_call_p
from jax.extend.core.primitives import custom_vjp_call_p as custom_vjp_call_p
from jax.extend.core.primitives import get_p as get_p
from jax.extend.core.primitives import jit_p as jit_p
from jax.extend.core.primitives import linear_solve_p as linear_solve_p
from jax.extend.core.primitives import name_p
from jax.extend.core.primitives import remat_p as remat_p
from jax.extend.core.primitives import scan_p as scan_p
from jax.extend.core.primitives import stop_gradient_p as stop_gradient_p
from jax.extend.core.primitives import swap_p as swap_p
from jax.extend.core.primitives import while_p as while_p

__all__ = [
    "accum_grad_in_ref_p", "add_any_p", "addupdate_p", "cast_primitives", "cond_p",
    "custom_jvp_call_p", "custom_vjp_call_p", "custom_vmap_p", "debug_primitives",
    "empty_ref_p", "free_ref_p", "freeze_p", "get_p", "inlined_call_primitives", "jit_p",
    "linear_solve_p", "loop_primitives", "metadata_call_primitives", "new_ref_p",
    "passing_primitives", "reduce_scatter_p", "remat_p", "run_state_p", "scan_p", "shard_map_p",
    "stop_gradient_p", "swap_p", "while_p",
]  # fmt: skip

_program_order = (
    importlib.import_module("jax._src.program_order")
    if importlib.util.find_spec("jax._src.program_order")
    else None
)

loop_primitives = (scan_p, while_p)
# They pass their operands to Python; of a ref, the contents.
debug_primitives = (debug_callback_p, debug_print_p)
# They return their operand, which may be a ref.
passing_primitives = (stop_gradient_p, name_p)
# They change only the type: its sharding, or the axes of a `shard_map` that it varies over.
cast_primitives = (reshard_p, pvary_p)
# Calls whose jaxpr is run as it stands. On the newest JAX these are one primitive.
inlined_call_primitives = tuple(
    getattr(_core, name)
    for name in ("eval_jaxpr_p", "call_p", "closed_call_p")
    if hasattr(_core, name)
)
# Calls that carry one jaxpr and some metadata; the oldest JAX doesn't have them all.
metadata_call_primitives = tuple(
    getattr(module, name)
    for module, name in (
        (_lax, "composite_p"),
        (_compute_on, "compute_on_p"),
        (_xla_metadata, "xla_metadata_call_p"),
        (_program_order, "program_order_p"),
    )
    if hasattr(module, name)
)
