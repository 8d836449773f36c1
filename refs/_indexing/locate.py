"""Where an index points: a hashable key, for which kernels are compiled, and its operands.

The commonest indices, integers and slices or one int32 array, aren't parsed to an `Index`: the
kinds of their entries are the key. Of any other index it is the static part, an `Index` itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from refs import _jax
from refs._indexing.index import Index
from refs._indexing.numbers import on_device
from refs._indexing.places import is_static
from refs._types import Indexer, Value

Shape = tuple[int, ...]
Operands = Sequence[Value] | np.ndarray


def locate(shape: Shape, idx: Indexer, is_read: bool, is_simple: bool) -> tuple[Any, Operands]:
    """The key of an index into an array of this shape, and its operands.

    Of the commonest indices, if they are in bounds, the key has the kind of each entry: None for an
    integer, 0 for a whole axis, `(size, step)` for a slice and `("at", shape)` for an int32 array;
    none at all for the whole array. Operands are a tuple of at most one number or array, or an
    int32 array of several numbers, of shape `[n]`.

    Args:
      shape: the shape.
      idx: the index.
      is_read: whether what is there is read.
      is_simple: whether the array is on one device, and its places are int32.

    Raises:
      RefIndexError, RefTypeError, RefValueError: if there is no such index.
    """
    entry: Any = idx[0] if type(idx) is tuple and len(idx) == 1 else idx
    if entry is ...:
        return EVERYTHING, ()
    if not is_simple:
        return _parsed(shape, idx, is_read)
    kind = type(entry)
    if kind is int and shape and -shape[0] <= entry < shape[0]:
        return _INTEGER, (on_device(entry if entry >= 0 else entry + shape[0]),)
    if kind is _jax.ArrayImpl and entry.dtype == _INT32 and shape and shape[0]:
        return (("at", entry.shape),), (entry,)
    entries = entry if kind is tuple else (entry,)
    if len(entries) > len(shape):
        return _parsed(shape, idx, is_read)
    numbers: list[int] = []
    kinds: list[Any] = []
    for entry, n in zip(entries, shape, strict=False):
        if type(entry) in _INTEGERS:
            number = int(entry)
            if not -n <= number < n:
                return _parsed(shape, idx, is_read)
            numbers.append(number if number >= 0 else number + n)
            kinds.append(None)
        elif type(entry) is slice:
            if (span := _span(entry, n)) is None:
                return _parsed(shape, idx, is_read)
            start, size = span
            if size:
                numbers.append(start)
            kinds.append(size)
        else:
            return _parsed(shape, idx, is_read)
    if len(numbers) == 1:
        return tuple(kinds), (on_device(numbers[0]),)
    # Several numbers go to a kernel faster in one array.
    return tuple(kinds), np.array(numbers, np.int32) if numbers else ()


def is_simple(shape: Shape) -> bool:
    """Whether the places in an array of this shape are int32. Sizes may be symbols."""
    return all(is_static(n) and n <= _INT32_MAX for n in shape)


def _parsed(shape: Shape, idx: Indexer, is_read: bool) -> tuple[Index, Operands]:
    index = Index.parse(idx, shape)
    if is_read:
        index.check_read()
    return index.split()


def index_of(key: Any, shape: Shape) -> Index:
    """The static part of the indices with this key."""
    return key if isinstance(key, Index) else _index_of(key, shape)


def is_inside(key: Any) -> bool:
    """Whether all indices with this key are known to be in bounds."""
    return not isinstance(key, Index) and not any(type(k) is tuple and k[0] == "at" for k in key)


def _span(entry: slice, n: int) -> tuple[int, tuple[int, int] | int] | None:
    """Where a slice of an axis of size `n` starts, and its kind."""
    try:
        start, stop, step = entry.indices(n)
    except (TypeError, ValueError):
        return None
    if step <= 0 or stop <= start:
        return None
    size = (stop - start + step - 1) // step
    return start, 0 if size == n else (size, step)


@functools.lru_cache(maxsize=4096)
def _index_of(kinds: tuple[Any, ...], shape: Shape) -> Index:
    def like(kind: Any) -> Indexer:
        match kind:
            case None:
                return 0
            case 0:
                return slice(None)
            case ("at", shape):
                return np.zeros(shape, np.int32)
            case _:
                size, step = kind
                return slice(0, size * step, step)

    return Index.parse(tuple(map(like, kinds)), shape).split()[0]


EVERYTHING: Any = ()  # the key of the index `...`
_INTEGER = (None,)
_INT32, _INT32_MAX = np.dtype(np.int32), np.iinfo(np.int32).max
_INTEGERS = frozenset([int, *(np.dtype(code).type for code in "bhilqBHILQ")])
