"""The path of a view, one index after the other: taken apart to a hashable form, and shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from refs import _jax
from refs._types import Value

Path = tuple[tuple[Any, ...], ...]
Frozen = tuple[tuple[Any, ...], ...]


class _Array:
    """A placeholder in a view's structure for an array in its index."""


class _Slice(NamedTuple):
    """A slice, hashable on every Python."""

    start: Any
    stop: Any
    step: Any


class _DynamicSlice(NamedTuple):
    """A `jax.ds` without its start, which is an array."""

    size: int
    stride: int


class _Mask(NamedTuple):
    """A boolean mask: not a leaf, as it must stay concrete wherever the view is passed."""

    shape: tuple[int, ...]
    content: bytes


# The types of entries of an index that nobody can change.
CONSTANT = frozenset([int, slice, type(...), type(None), _jax.ArrayImpl])


def freeze(path: Path) -> tuple[Frozen, list[Value]]:
    """(a hashable form of a path, the arrays in it)."""
    arrays: list[Value] = []
    return tuple(tuple(_freeze(e, arrays) for e in idx) for idx in path), arrays


def _freeze(entry: Any, arrays: list[Value]) -> Any:
    """A hashable form of an index entry. Arrays in it are appended to `arrays`."""
    if isinstance(entry, slice):
        return _Slice(entry.start, entry.stop, entry.step)
    if isinstance(entry, _jax.Slice):
        arrays.append(entry.start)
        return _DynamicSlice(int(entry.size), entry.stride)
    if isinstance(entry, list):
        entry = np.asarray(entry, dtype=None if entry else np.int32)
    if isinstance(entry, np.ndarray | _jax.ArrayImpl) and entry.dtype == bool:
        return _Mask(entry.shape, np.asarray(entry).tobytes())
    if hasattr(entry, "dtype"):
        arrays.append(entry)
        return _Array
    return entry


def thaw(frozen: Frozen, arrays: Iterable[Value]) -> Path:
    """The path that `freeze` has taken apart."""
    rest = iter(arrays)
    return tuple(tuple(_thaw(entry, rest) for entry in idx) for idx in frozen)


def _thaw(entry: Any, arrays: Iterator[Value]) -> Any:
    """The inverse of `_freeze`."""
    if isinstance(entry, _Slice):
        return slice(*entry)
    if isinstance(entry, _DynamicSlice):
        return _jax.Slice(next(arrays), *entry)
    if isinstance(entry, _Mask):
        return np.frombuffer(entry.content, bool).reshape(entry.shape)
    return next(arrays) if entry is _Array else entry


def show(path: Path) -> str:
    """The indices, as they were written."""
    return "".join(f"[{', '.join(map(_show, idx))}]" for idx in path)


def _show(entry: Any) -> str:
    if isinstance(entry, slice):
        parts = ["" if p is None else str(p) for p in (entry.start, entry.stop)]
        return ":".join(parts + ([] if entry.step is None else [str(entry.step)]))
    return "..." if entry is ... else str(entry)
