"""Whether JAX's private functions take what they are given here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from refs._jax.callbacks import register_discharge_rule
from refs._jax.calls import batch_jaxpr_axes
from refs._jax.equations import _convert_element_type, one_vjp, user_frame
from refs._jax.forms import get_referent
from refs._jax.hijax import is_vmappable
from refs._jax.linear import apply_primitive
from refs._jax.names import bitcast, fun_name, shard_args
from refs._jax.old_forms import wrap_init
from refs._jax.parameters import check_vmap_rule_trees
from refs._jax.traces import add_explicit_mesh_axis_names, add_spmd_axis_names
from refs._jax.trees import broadcast_flattened_prefix_with_treedef
from refs._jax.words import api_boundary

__all__ = ["check_signatures"]

# The number of arguments, and the names of others. What JAX caches in C++ tells no signature.
_CALLS: dict[Callable[..., Any], tuple[int, tuple[str, ...]]] = {
    _convert_element_type: (3, ()),
    add_explicit_mesh_axis_names: (1, ()),
    add_spmd_axis_names: (1, ()),
    api_boundary: (1, ()),
    apply_primitive: (2, ()),
    batch_jaxpr_axes: (4, ()),
    bitcast: (2, ()),
    broadcast_flattened_prefix_with_treedef: (3, ()),
    check_vmap_rule_trees: (4, ()),
    fun_name: (1, ()),
    get_referent: (1, ()),
    is_vmappable: (1, ()),
    one_vjp: (1, ()),
    register_discharge_rule: (1, ()),
    shard_args: (4, ()),
    user_frame: (1, ()),
    wrap_init: (1, ("debug_info",)),
}


def check_signatures() -> None:
    """Raises a TypeError if a function of JAX's doesn't take the arguments that it is given."""
    for function, (n, names) in _CALLS.items():
        try:
            inspect.signature(function).bind(*[None] * n, **dict.fromkeys(names))
        except TypeError as error:
            raise TypeError(f"`{function.__name__}`: {error}") from None
