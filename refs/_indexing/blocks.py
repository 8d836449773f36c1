"""Reads and writes in two steps: a contiguous block of the array, then an index within it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from refs._indexing import accesses
from refs._indexing.access import Access, Place
from refs._indexing.lowering import read_in_lax
from refs._indexing.places import is_static, narrow
from refs._indexing.syntax import InBounds, Span, is_array
from refs._types import Indexer, Value


class Block(NamedTuple):
    """A contiguous block, and `rest`, the index within it (None when it is the block itself).

    A start that isn't static is moved so that the block fits, and an integer beyond an edge is left
    out where it is written, where lax would hit another element.
    """

    shape: tuple[int, ...]
    access: Access
    places: list[Value]
    rest: tuple[Indexer, ...] | None

    @property
    def is_whole(self) -> bool:
        return self.access.sizes == self.shape and not self.places

    def read(self, x: Value) -> Value:
        if not self.places:
            return read_in_lax(x, access=self.access)
        return accesses.read(x, self.places, self.access.clipped)

    def update(self, x: Value, value: Value, method: str, mask: Value | None = None) -> Value:
        """`x` with the block, if `mask` is true, overwritten, or with `value` added to it."""
        if method == "add" and (x.dtype != value.dtype or x.dtype == np.bool_):
            method, value = "set", jnp.add(self.read(x), value)
        return accesses.update(x, value, self.places, self.access, method, mask)


def block_of(dims: tuple[Any, ...], shape: tuple[int, ...]) -> Block:
    """The block that contains what an index's `dims` name in an array of shape `shape`."""
    starts: list[int | Place] = []
    sizes: list[int] = []
    places: list[Value] = []
    rest: list[Indexer] = []
    with_arrays = any(map(is_array, dims))
    for dim, n in zip(dims, shape, strict=True):
        how = Place(drops=True)
        if isinstance(dim, InBounds):
            dim, how = dim.value, Place(wraps=False)
        if isinstance(dim, Span):
            size = (dim.size - 1) * dim.step + 1 if dim.size else 0
            start, how, within = dim.start, Place(), slice(None, None, dim.step)
        elif with_arrays:
            size, start, within = n, 0, dim if is_static(dim) else narrow(dim, n)
        else:
            size, start, within = 1, dim, 0
        sizes.append(size)
        rest.append(within)
        if is_static(start):
            starts.append(int(start))
        else:
            starts.append(how)
            places.append(start)
    spans = [d for d in dims if isinstance(d, Span) and d.step > 1]
    stepped = any(not is_static(d.size) or d.size > 1 for d in spans)
    access = Access(tuple(starts), tuple(sizes))
    return Block(shape, access, places, tuple(rest) if with_arrays or stepped else None)
