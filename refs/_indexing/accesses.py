"""Accesses: reads and updates of blocks of an array, as one operation each.

An access stays what it is from the discharge of a ref to the lowering of the program: derivatives,
`vmap` and the in-place pass need not find out again what is read or written where, and under which
mask. `read_p` gives a block of an array, `update_p` an array with a block overwritten or added to:

    read_p(x, *places, [mask]; access)          update_p(x, value, *places, [mask]; access, method)

There is one block, or one for each element of a batch: `value` and what is read are of shape
`access.shape`, and the places and the mask, integers and bools, of shape `access.batch`. A block
that a mask or a bound leaves out isn't written, and reads as zeros.

(Equinox's `maybe_set` and PyTorch's `generalized_scatter` are such operations.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad

from refs import _jax
from refs._indexing.access import Access, Along, Place, Start
from refs._indexing.lowering import read_in_lax, update_in_lax
from refs._indexing.values import zeros_of
from refs._types import Aval, Value

read_p = Primitive("read_block")
update_p = Primitive("update_block")


def read(x: Value, places: Sequence[Value], access: Access) -> Value:
    """The blocks of `x` at these places."""
    if _is_plain(x):
        return read_in_lax(x, *places, access=access)
    operands, access = _opened(places, access)
    return read_p.bind(*_varying_alike(x, *operands), access=access)


def update(
    x: Value,
    value: Value,
    places: Sequence[Value],
    access: Access,
    method: str = "set",
    mask: Value | None = None,
) -> Value:
    """`x` with its blocks at these places, where the mask is true, overwritten or added to."""
    if mask is not None:
        places, access = [*places, mask], access._replace(is_masked=True)
    if _is_plain(x):
        return update_in_lax(x, value, *places, access=access, method=method)
    operands, access = _opened(places, access)
    operands = _varying_alike(x, value, *operands)
    return update_p.bind(*operands, access=access, method=method)


def _opened(places: Sequence[Value], access: Access) -> tuple[Sequence[Value], Access]:
    """Places and an access with operands for static starts: so it is lowered, and compiled, once.

    The start of an axis needs none, nor do starts of more than 31 bits, for which there may be no
    dtype.
    """
    if not any(type(start) is int and 0 < start <= _INT32_MAX for start in access.starts):
        return places, access
    rest = iter(places)
    operands: list[Value] = []
    starts: list[Start] = []
    for start in access.starts:
        if isinstance(start, Place):
            operands.append(next(rest))
        elif isinstance(start, int) and 0 < start <= _INT32_MAX:
            operands.append(np.int32(start))
            start = Place(wraps=False)
        starts.append(start)
    return [*operands, *rest], access._replace(starts=tuple(starts))


_INT32_MAX = np.iinfo(np.int32).max


@contextmanager
def in_lax() -> Iterator[None]:
    """Within, programs consist of JAX's own operations, which anyone can transform."""
    token = _in_lax.set(True)
    try:
        yield
    finally:
        _in_lax.reset(token)


_in_lax: ContextVar[bool] = ContextVar("_in_lax", default=False)


def _is_plain(x: Value) -> bool:
    """Whether an array is accessed by JAX's operations, which know about shardings and keys."""
    return _in_lax.get() or _jax.is_on_explicit_mesh(x) or _jax.is_key(x.dtype)


def _varying_alike(*operands: Value) -> Sequence[Value]:
    """Operands that vary over the same axes of a `shard_map`."""
    axes = frozenset().union(*map(_jax.varying_axes, operands))
    return [_jax.vary_over(x, axes) for x in operands] if axes else operands


# -- rules of the primitives ---------------------------------------------------------------------


@read_p.def_abstract_eval
def _type_of_read(x: Aval, *_: Aval, access: Access) -> Aval:
    return _jax.of_shape(x, access.shape)


@update_p.def_abstract_eval
def _type_of_update(x: Aval, value: Aval, *_: Aval, access: Access, method: str) -> Aval:
    return _jax.of_shape(x, x.shape)


def _read_jvp(primals: Sequence[Value], tangents: Sequence[Any], *, access: Access) -> Any:
    out = read_p.bind(*primals, access=access)
    return out, read_p.bind(tangents[0], *primals[1:], access=access)


def _update_jvp(
    primals: Sequence[Value], tangents: Sequence[Any], *, access: Access, method: str
) -> Any:
    _, _, *places = primals
    dx, dvalue, *_ = tangents
    out = update_p.bind(*primals, access=access, method=method)
    if _jax.is_symbolic_zero(dvalue) and method == "add":
        return out, dx
    dx, dvalue = map(_jax.instantiate, (dx, dvalue))
    return out, update_p.bind(dx, dvalue, *places, access=access, method=method)


def _read_transpose(ct: Any, x: Any, *places: Value, access: Access) -> list[Any]:
    nothing = [None] * len(places)
    if _jax.is_symbolic_zero(ct):
        return [_jax.symbolic_zero(x.aval), *nothing]
    zeros = zeros_of(x.aval)
    return [update_p.bind(zeros, ct, *places, access=access, method="add"), *nothing]


def _update_transpose(
    ct: Any, x: Any, value: Any, *places: Value, access: Access, method: str
) -> list[Any]:
    of_x = of_value = None
    is_zero = _jax.is_symbolic_zero(ct)
    if ad.is_undefined_primal(x):
        of_x = _jax.symbolic_zero(x.aval) if is_zero else ct
        if method == "set" and not is_zero:
            zeros = zeros_of(_jax.of_shape(x.aval, access.shape))
            of_x = update_p.bind(ct, zeros, *places, access=access, method="set")
    if ad.is_undefined_primal(value):
        of_value = (
            _jax.symbolic_zero(value.aval) if is_zero else read_p.bind(ct, *places, access=access)
        )
    return [of_x, of_value, *[None] * len(places)]


def _batched(access: Access, size: int, is_own: bool, rest_is_batched: bool) -> Access:
    """An access to a batch of arrays, or with a batch of places."""
    if not (rest_is_batched or access.batch):
        return access._replace(starts=(0, *access.starts), sizes=(size, *access.sizes))
    starts = [Along(s.batch_axis + 1) if isinstance(s, Along) else s for s in access.starts]
    access = access._replace(starts=tuple(starts), batch=(size, *access.batch))
    if is_own:
        access = access._replace(starts=(Along(0), *access.starts), sizes=(1, *access.sizes))
    return access


def to_front(x: Value, axis: int | None, size: int) -> Value:
    """`x` as `[size, *shape]`."""
    return jnp.broadcast_to(x, (size, *jnp.shape(x))) if axis is None else jnp.moveaxis(x, axis, 0)


def _batch_places(
    size: int, places: Sequence[Value], axes: Sequence[Any], access: Access
) -> tuple[Sequence[Value], bool]:
    is_batched = any(axis is not None for axis in axes)
    if not is_batched and not access.batch:
        return places, False
    return [to_front(x, axis, size) for x, axis in zip(places, axes, strict=True)], is_batched


def _batch_read(
    size: int, operands: Sequence[Value], axes: Sequence[Any], *, access: Access
) -> tuple[Value, int | None]:
    (x, *places), (axis, *place_axes) = operands, axes
    if all(a is None for a in axes):
        return read_p.bind(*operands, access=access), None
    places, is_batched = _batch_places(size, places, place_axes, access)
    if axis is not None:
        x = jnp.moveaxis(x, axis, 0)
    new = _batched(access, size, axis is not None, is_batched)
    return read_p.bind(x, *places, access=new), 0


def _batch_update(
    size: int, operands: Sequence[Value], axes: Sequence[Any], *, access: Access, method: str
) -> tuple[Value, int | None]:
    (x, value, *places), (axis, value_axis, *place_axes) = operands, axes
    if all(a is None for a in axes):
        return update_p.bind(*operands, access=access, method=method), None
    places, is_batched = _batch_places(size, places, place_axes, access)
    x, value = to_front(x, axis, size), to_front(value, value_axis, size)
    new = _batched(access, size, True, is_batched)
    return update_p.bind(x, value, *places, access=new, method=method), 0


ad.primitive_jvps[read_p], ad.primitive_jvps[update_p] = _read_jvp, _update_jvp
ad.primitive_transposes[read_p] = _read_transpose
ad.primitive_transposes[update_p] = _update_transpose
_jax.register_batching(read_p, _batch_read)
_jax.register_batching(update_p, _batch_update)
_jax.register_by_devices(read_p, read_in_lax)
_jax.register_by_devices(update_p, update_in_lax)
