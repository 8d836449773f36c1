"""A stand-in for a ref, to trace and compile a function without one."""

from __future__ import annotations

import jax

from refs import _jax
from refs._buffers.stores import Store
from refs._handles.ref import Ref
from refs._handles.ref_type import RefType
from refs._origin import Origin, user_site
from refs._types import RefLike, Value
from refs.errors import RefTypeError


def handle_or_abstract(leaf: Value | RefLike) -> Value | RefLike:
    """A leaf of a trace's arguments: a handle for a `ShapeDtypeStruct` that stands for a ref.

    Raises:
      RefTypeError: if it is one in the host's memory.
    """
    if type(leaf) is not jax.ShapeDtypeStruct or not leaf.is_ref:
        return leaf
    if _jax.is_of_host(leaf.sharding):
        raise RefTypeError(
            f"{leaf} stands for a ref in the host's memory, which JAX's types of arguments don't "
            "tell from the device's: pass the ref itself, `refs.empty_ref(...)`"
        )
    aval = RefType.of(_jax.shaped_abstractify(leaf), Origin(None, user_site()))
    value = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return Ref._of(aval, Store.of(value, is_placed=leaf.sharding is not None))
