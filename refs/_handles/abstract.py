"""A stand-in for a ref, to trace and compile a function without one."""

from __future__ import annotations

from typing import Any

import jax

from refs import _jax
from refs._handles.ref import Ref
from refs._handles.ref_type import RefType
from refs._indexing.sharded import mesh_sharding
from refs._origin import Origin, user_site
from refs._types import RefLike, Value
from refs.errors import RefTypeError


class AbstractHandle(Ref):
    """A handle without a value, of the type given by a `ShapeDtypeStruct` with `is_ref`."""

    __slots__ = ("_instead", "_shape_given")

    def __init__(self, shape: jax.ShapeDtypeStruct):
        sharding = shape.sharding
        self._aval = RefType.of(_jax.shaped_abstractify(shape), Origin(None, user_site()))
        self._shape, self._dtype = shape.shape, shape.dtype
        self._sharding = mesh_sharding(sharding)
        instead = jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
        self._shape_given = shape
        is_key = _jax.is_key(shape.dtype)
        self._instead = jax.eval_shape(_jax.unwrap_keys, instead) if is_key else instead
        self._is_placed = sharding is not None
        self._end = self._lost = self._cell = self._part = None  # type: ignore[assignment]

    def _check(self) -> None:
        pass

    @property
    def _buf(self) -> Any:
        return self._shape_given

    def _buffer(self) -> Any:
        return self._instead


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
    return AbstractHandle(leaf)
