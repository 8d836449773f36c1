"""Integers in an index: in which type places are computed, and where they lie in an axis."""

from __future__ import annotations

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
    """True for an array whose contents are known, here and now."""
    return isinstance(entry, np.ndarray) or (
        isinstance(entry, _jax.ArrayImpl) and entry.is_fully_addressable
    )


def are_distinct(constants: list[tuple[np.ndarray, int]]) -> bool:
    """True if index arrays, each for an axis of a size, name no element twice together."""
    if not constants:
        return False
    arrays, sizes = zip(*constants, strict=True)
    if 0 in sizes:
        return True
    # What is out of bounds is moved into them, where it may be taken for another one.
    places = np.ravel_multi_index(arrays, sizes, mode="wrap")
    return len(np.unique(places)) == places.size


def shared(entry: Any) -> Any:
    """The one array for a constant's contents: a trace knows it again by its identity.

    `r[[2, 1]] += x` makes an array of the list twice, when it reads and when it writes.
    """
    if not isinstance(entry, np.ndarray):
        return entry
    return _shared.setdefault((entry.shape, entry.dtype.str, entry.tobytes()), entry)


_shared: WeakValueDictionary[Any, np.ndarray] = WeakValueDictionary()


def numpy_of(*operands: Value) -> Any:
    """The module to compute with: NumPy where all is known, so that it stays known."""
    return np if all(is_static(x) or isinstance(x, np.ndarray) for x in operands) else jnp


def narrow(i: Any, n: int) -> Any:
    """An index array or scalar for an axis of size `n` in the type that places are computed in.

    What that can't hold is out of bounds, and stays so.
    """
    dtype = np.dtype(np.int32)
    if is_static(n) and n > np.iinfo(dtype).max and jax.config.read("jax_enable_x64"):
        dtype = np.dtype(np.int64)
    if i.dtype == dtype:
        return i
    limits, own = np.iinfo(dtype), jnp.iinfo(i.dtype)
    of = np if isinstance(i, np.ndarray) else jnp
    if limits.max < own.max:
        i = of.minimum(i, i.dtype.type(limits.max))
    if own.min < limits.min:
        i = of.maximum(i, i.dtype.type(limits.min))
    # NumPy makes scalars of arrays without axes, and a scalar is an index that was checked.
    return np.asarray(i, dtype) if of is np else i.astype(dtype)


def located(i: Any, n: int) -> Any:
    """An index on an axis of size `n`, counted from the front; it may be out of bounds."""
    if is_static(i):
        return int(i)
    i = narrow(i, n)
    if isinstance(i, np.ndarray) and is_static(n):
        return np.where(i < 0, i + i.dtype.type(n), i)
    zero, size = (_number(k, i) if not i.ndim else lax.full_like(i, k) for k in (0, n))
    return lax.select(lax.lt(i, zero), lax.add(i, size), i)


def clipped(i: Any, n: int) -> Any:
    """The place nearest to an index on an axis of size `n`, counted from the front."""
    return within(located(i, n), n - 1)


def within(i: Any, last: int) -> Any:
    """The number nearest to `i` from 0 to `last`."""
    if isinstance(i, np.ndarray) and is_static(last):
        return np.asarray(np.clip(i, 0, last))
    return lax.clamp(i.dtype.type(0), i, _number(last, i))


def _number(k: Any, like: Any) -> Any:
    """A number of the type of an index; a size that is a symbol is one that isn't known."""
    return like.dtype.type(k) if is_static(k) else jnp.asarray(k, like.dtype)


def is_inside(i: Any, n: int) -> Any:
    """Whether an index on an axis of size `n` is in bounds."""
    i = located(i, n)
    return (i >= 0) & (i < (n if is_static(n) else jnp.asarray(n)))


def unwrapped(i: Any, n: int) -> Any:
    """An index that, counted from the end where it is negative, is out of bounds there."""
    i = narrow(i, n)
    return numpy_of(i).where(i < 0, i - i.dtype.type(n), i)


def known(i: Any, n: int) -> Any:
    """An integer that is known and in bounds as Python's, counted from the front."""
    if (is_static(i) or isinstance(i, np.ndarray)) and not np.ndim(i):
        return int(i) % n if -n <= i < n else np.asarray(i, np.int32)
    return i
