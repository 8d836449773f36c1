"""Reads and writes in two steps: a contiguous block of the array, then an index within it."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from refs._indexing.places import is_static, located, narrow, place_dtype, within
from refs._indexing.rows import add_rows, are_few, read_rows, write_rows
from refs._indexing.syntax import InBounds, Span, is_array
from refs._types import Indexer, Value


class Block(NamedTuple):
    """A contiguous block, and `rest`, the index within it (None when it is the block itself).

    A start that isn't static is clamped so that the block fits. XLA clamps likewise, but not along
    a sharded axis, where it does something else.
    """

    starts: tuple[Value, ...]  # a scalar for each axis
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    unchecked: tuple[tuple[Value, int], ...]  # (scalar, size of its axis): may be out of bounds
    rest: tuple[Indexer, ...] | None
    in_rows: bool  # whether it is read and written row by row, for arrays on several devices

    @property
    def is_whole(self) -> bool:
        return self.sizes == self.shape and not self.unchecked

    def read(self, x: Value) -> Value:
        if all(is_static(s) for s in self.starts):
            stops = tuple(s + n for s, n in zip(self.starts, self.sizes, strict=True))
            return lax.slice(x, self.starts, stops)
        if self.in_rows:
            return read_rows(x, *self._starts, sizes=self.sizes)
        return lax.dynamic_slice(x, self._starts, self.sizes, allow_negative_indices=False)

    def write(self, x: Value, value: Value) -> Value:
        if self.in_rows:
            return write_rows(x, value, *self._starts, flag=self._inside)
        if self._inside is not None:
            # lax would clamp the index and hit another element; jax.numpy drops the write.
            # With one flag, and not one for each element, a gradient stores no more than that.
            value = lax.select(self._inside, value, self.read(x))
        return lax.dynamic_update_slice(x, value, self._starts, allow_negative_indices=False)

    def add(self, x: Value, value: Value) -> Value:
        if self.in_rows and x.dtype == value.dtype != np.bool_:
            return add_rows(x, value, *self._starts, flag=self._inside)
        return self.write(x, jnp.add(self.read(x), value))

    @property
    def _inside(self) -> Value | None:
        """A flag that says whether the block is in bounds, None if that is known."""
        flags = [
            lax.bitwise_and(lax.ge(i, i.dtype.type(0)), lax.lt(i, jnp.asarray(n, i.dtype)))
            for i, n in self.unchecked
        ]
        return functools.reduce(lax.bitwise_and, flags) if flags else None

    @property
    def _starts(self) -> list[Value]:
        """The starts in one dtype, also where JAX makes wider arrays of Python integers."""
        n = _widest(self.shape)
        return [place_dtype(n).type(s) if is_static(s) else s for s in self.starts]


def block_of(dims: tuple[Any, ...], shape: tuple[int, ...], in_rows: bool = False) -> Block:
    """The block that contains what an index's `dims` name in an array of shape `shape`.

    `in_rows`: whether the array may lie on several devices, and few rows are read one by one.
    """
    starts: list[Value] = []
    sizes: list[int] = []
    rest: list[Indexer] = []
    unchecked: list[tuple[Value, int]] = []
    with_arrays = any(is_array(d) for d in dims)
    widest = _widest(shape)

    def start(i: Value, n: int, size: int) -> Value:
        return i if is_static(i) else within(i, n - size)

    for dim, n in zip(dims, shape, strict=True):
        in_bounds = isinstance(dim, InBounds)
        dim = dim.value if in_bounds else dim
        if isinstance(dim, Span):
            span = (dim.size - 1) * dim.step + 1 if dim.size else 0
            starts.append(start(_located(dim.start, n, widest), n, span))
            sizes.append(span)
            rest.append(slice(None, None, dim.step))
        elif with_arrays:
            starts.append(0)
            sizes.append(n)
            rest.append(dim if is_static(dim) else narrow(dim, n))
        else:
            place = _located(dim, n, widest)
            starts.append(place if in_bounds else start(place, n, 1))
            sizes.append(1)
            rest.append(0)
            if not in_bounds and not is_static(dim):
                unchecked.append((place, n))
    spans = [d for d in dims if isinstance(d, Span) and d.step > 1]
    stepped = any(not is_static(d.size) or d.size > 1 for d in spans)
    return Block(
        tuple(starts),
        tuple(sizes),
        shape,
        tuple(unchecked),
        tuple(rest) if with_arrays or stepped else None,
        in_rows and are_few(math.prod(sizes), math.prod(shape)),
    )


def _widest(shape: tuple[int, ...]) -> int:
    """The greatest size; sizes that are symbols don't count."""
    return max(filter(is_static, shape), default=0)


def _located(i: Value, n: int, widest: int) -> Value:
    return int(i) if is_static(i) else located(narrow(i, widest), n)
