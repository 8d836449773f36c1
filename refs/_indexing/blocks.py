"""Reads and writes in two steps: a contiguous block of the array, then an index within it."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from refs._indexing.places import is_static, located, narrow, within
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

    @property
    def is_whole(self) -> bool:
        return self.sizes == self.shape and not self.unchecked

    def read(self, x: Value) -> Value:
        if all(is_static(s) for s in self.starts):
            stops = tuple(s + n for s, n in zip(self.starts, self.sizes, strict=True))
            return lax.slice(x, self.starts, stops)
        return lax.dynamic_slice(x, self._starts, self.sizes, allow_negative_indices=False)

    def write(self, x: Value, value: Value) -> Value:
        if self.unchecked:
            inside = functools.reduce(
                lax.bitwise_and,
                [
                    lax.bitwise_and(lax.ge(i, i.dtype.type(0)), lax.lt(i, jnp.asarray(n, i.dtype)))
                    for i, n in self.unchecked
                ],
            )
            # lax would clamp the index and hit another element; jax.numpy drops the write.
            # With one flag, and not one for each element, a gradient stores no more than that.
            value = lax.select(inside, value, self.read(x))
        return lax.dynamic_update_slice(x, value, self._starts, allow_negative_indices=False)

    @property
    def _starts(self) -> list[Value]:
        """The starts in one dtype, also where JAX makes wider arrays of Python integers."""
        n = _widest(self.shape)
        return [narrow(np.asarray(s), n) if is_static(s) else s for s in self.starts]


def block_of(dims: tuple[Any, ...], shape: tuple[int, ...]) -> Block:
    """The block that contains what an index's `dims` name in an array of shape `shape`."""
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
    stepped = any(isinstance(d, Span) and d.step > 1 and d.size > 1 for d in dims)
    return Block(
        tuple(starts),
        tuple(sizes),
        shape,
        tuple(unchecked),
        tuple(rest) if with_arrays or stepped else None,
    )


def _widest(shape: tuple[int, ...]) -> int:
    """The greatest size; sizes that are symbols don't count."""
    return max(filter(is_static, shape), default=0)


def _located(i: Value, n: int, widest: int) -> Value:
    return int(i) if is_static(i) else located(narrow(i, widest), n)
