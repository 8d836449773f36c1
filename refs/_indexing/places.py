"""Integers in an index: their dtype, bounds, and places on an axis, counted from the front."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from refs import _jax
from refs._types import Value


def is_static(x: Value) -> bool:
    return isinstance(x, int | np.integer)


def is_constant(entry: Any) -> bool:
    """True for an array whose contents this process can read now."""
    return isinstance(entry, np.ndarray) or (
        isinstance(entry, _jax.ArrayImpl) and entry.is_fully_addressable
    )


def are_distinct(constants: list[tuple[np.ndarray, int]]) -> bool:
    """True if index arrays of one shape, each with the size of its axis, name no element twice."""
    if not constants:
        return False
    arrays, sizes = zip(*constants, strict=True)
    if 0 in sizes:
        return True
    # Integers out of bounds wrap into bounds, where they may coincide with other ones.
    places = np.ravel_multi_index(arrays, sizes, mode="wrap")
    return len(np.unique(places)) == places.size


def shared(entry: Value) -> Value:
    """The same array object for all constants of equal contents: traces compare identities.

    `r[[2, 1]] += x` makes an array of the list twice, when it reads and when it writes.
    """
    if not isinstance(entry, np.ndarray):
        return entry
    return _shared.setdefault((entry.shape, entry.dtype.str, entry.tobytes()), entry)


_shared: WeakValueDictionary[tuple[tuple[int, ...], str, bytes], np.ndarray] = WeakValueDictionary()


def numpy_of(*operands: Value) -> Any:
    """NumPy if all operands are constants, so that the result is one, too; or else `jax.numpy`."""
    return np if all(is_static(x) or isinstance(x, np.ndarray) for x in operands) else jnp


def place_dtype(n: Any) -> np.dtype:
    """The dtype that places on an axis of size `n` are computed in."""
    is_long = is_static(n) and n > _INT32_MAX and jax.config.read("jax_enable_x64")
    return _INT64 if is_long else _INT32


_INT32, _INT64, _INT32_MAX = np.dtype(np.int32), np.dtype(np.int64), np.iinfo(np.int32).max


def longest(shape: Sequence[Any]) -> int:
    """The size of the longest axis, of those whose size is known."""
    return max(filter(is_static, shape), default=0)


def narrow(i: Value, n: int) -> Value:
    """An index array or scalar for an axis of size `n` in the dtype that places are computed in.

    Integers that the dtype can't hold are out of bounds, and stay so.
    """
    dtype = place_dtype(n)
    if i.dtype == dtype:
        return i
    limits, own = np.iinfo(dtype), jnp.iinfo(i.dtype)
    of = np if isinstance(i, np.ndarray) else jnp
    if limits.max < own.max:
        i = of.minimum(i, i.dtype.type(limits.max))
    if own.min < limits.min:
        i = of.maximum(i, i.dtype.type(limits.min))
    # NumPy makes scalars of 0-d arrays, and `is_static` takes a scalar for an index in bounds.
    return np.asarray(i, dtype) if of is np else i.astype(dtype)


def located(i: Value, n: int) -> Value:
    """An index on an axis of size `n`, counted from the front; it may be out of bounds."""
    i = narrow(i, n)
    if isinstance(i, np.ndarray) and is_static(n):
        return np.where(i < 0, i + i.dtype.type(n), i)
    zero, size = (_number(k, i) if not i.ndim else lax.full_like(i, k) for k in (0, n))
    return lax.select(lax.lt(i, zero), lax.add(i, size), i)


def clipped(i: Value, n: int) -> Value:
    """An index on an axis of size `n`, counted from the front and clamped into bounds."""
    return within(located(i, n), n - 1)


def within(i: Value, last: int) -> Value:
    """`i`, clamped between 0 and `last`."""
    if isinstance(i, np.ndarray) and is_static(last):
        return np.asarray(np.clip(i, 0, last))
    return lax.clamp(i.dtype.type(0), i, _number(last, i))


def _number(k: Value, like: Value) -> Value:
    """A scalar of the dtype of an index. A size that is a symbol gives an array."""
    return like.dtype.type(k) if is_static(k) else jnp.asarray(k, like.dtype)


def is_inside(i: Value, n: int) -> Value:
    """Whether an index on an axis of size `n` is in bounds, elementwise."""
    i = located(i, n)
    return (i >= 0) & (i < (n if is_static(n) else jnp.asarray(n)))


def unwrapped(i: Value, n: int) -> Value:
    """An index whose negative integers stay out of bounds when they are counted from the end."""
    i = narrow(i, n)
    return numpy_of(i).where(i < 0, i - i.dtype.type(n), i)


def known(i: Value, n: int) -> Value:
    """`i`; a constant scalar in bounds becomes a Python integer, counted from the front."""
    if (is_static(i) or isinstance(i, np.ndarray)) and not np.ndim(i):
        return int(i) % n if -n <= i < n else np.asarray(i, np.int32)
    return i
