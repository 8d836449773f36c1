"""JAX's primitives, under the names that the rest of the library has for them."""

from __future__ import annotations

from jax._src import ad_util, compute_on, core, custom_batching, custom_derivatives, debugging
from jax._src import pjit as _pjit
from jax._src import xla_metadata as _xla_metadata
from jax._src.ad_checkpoint import name_p as _name_p
from jax._src.ad_checkpoint import remat_p as remat_p
from jax._src.lax import lax as _lax
from jax._src.lax import parallel as _parallel
from jax._src.lax.control_flow.conditionals import cond_p as cond_p
from jax._src.lax.control_flow.loops import scan_p as scan_p
from jax._src.lax.control_flow.loops import while_p as while_p
from jax._src.pjit import jit_p as jit_p
from jax._src.shard_map import shard_map_p as shard_map_p
from jax._src.state import primitives as _state
from jax._src.state.discharge import run_state_p as run_state_p

__all__ = [
    "accum_grad_in_ref_p", "add_any_p", "addupdate_p", "cast_primitives", "cond_p",
    "custom_jvp_call_p", "custom_vjp_call_p", "custom_vmap_p", "debug_primitives", "empty_ref_p",
    "free_ref_p", "freeze_p", "get_p", "inlined_call_primitives", "jit_p", "loop_primitives",
    "metadata_call_primitives", "new_ref_p", "passing_primitives", "reduce_scatter_p", "remat_p",
    "run_state_p", "scan_p", "shard_map_p", "stop_gradient_p", "swap_p", "while_p",
]  # fmt: skip

get_p = _state.get_p
swap_p = _state.swap_p
addupdate_p = _state.addupdate_p
new_ref_p = core.ref_p
empty_ref_p = core.empty_ref_p
freeze_p = core.freeze_p
free_ref_p = core.free_ref_p
accum_grad_in_ref_p = core.accum_grad_in_ref_p
loop_primitives = (scan_p, while_p)
custom_jvp_call_p = custom_derivatives.custom_jvp_call_p
custom_vjp_call_p = custom_derivatives.custom_vjp_call_p
custom_vmap_p = custom_batching.custom_vmap_p
add_any_p = ad_util.add_any_p
# They pass their operands to Python; of a ref, the contents.
debug_primitives = (debugging.debug_callback_p, debugging.debug_print_p)
# They return their operand, which may be a ref.
stop_gradient_p = ad_util.stop_gradient_p
passing_primitives = (stop_gradient_p, _name_p)
# They change only the type: its sharding, or the axes of a `shard_map` that it varies over.
cast_primitives = (_pjit.reshard_p, core.pvary_p)
reduce_scatter_p = _parallel.reduce_scatter_p
# Calls whose jaxpr is run as it stands. On the newest JAX these are one primitive.
inlined_call_primitives = (core.call_p, core.closed_call_p)
# Calls that carry one jaxpr and some metadata; the oldest JAX doesn't have them all.
metadata_call_primitives = tuple(
    getattr(module, name)
    for module, name in (
        (_lax, "composite_p"),
        (compute_on, "compute_on_p"),
        (_xla_metadata, "xla_metadata_call_p"),
    )
    if hasattr(module, name)
)
