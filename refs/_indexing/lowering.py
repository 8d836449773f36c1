"""Accesses to blocks as operations of JAX: slices, gathers and scatters.

XLA gives each of several devices the rows of an array that lie on it. But for a slice whose start
it doesn't know it brings the whole array to every device first. So on several devices a few rows
are gathered and scattered. Nor does it clamp along a sharded axis as it does elsewhere: places are
clamped here.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from refs import _jax
from refs._indexing.access import Access, Along, Place
from refs._indexing.places import is_static, located, longest, narrow, place_dtype, within
from refs._types import Value


def read_in_lax(
    x: Value, *operands: Value, access: Access, on_cpu: bool = True, on_several: bool = False
) -> Value:
    """`read_p` by JAX's operations, for several devices by a gather of rows."""
    x = _apart(x, on_several)
    starts, kept = _located(x, operands, access)
    if access.batch:
        value = _gather(x, starts, access)
    elif on_several and _are_few(x, access) and not all(map(is_static, starts)):
        rows, starts, axes = _in_rows(x, starts, access)
        value = _gather(x, starts, rows)
        value = lax.reshape(value, [access.sizes[a] for a in axes])
        value = lax.transpose(value, [axes.index(a) for a in range(x.ndim)])
    else:
        value = _slice(x, starts, access.sizes)
    return value if kept is None else _chosen(kept, value, lax.full_like(value, 0), access)


def update_in_lax(
    x: Value,
    value: Value,
    *operands: Value,
    access: Access,
    method: str,
    on_cpu: bool = True,
    on_several: bool = False,
) -> Value:
    """`update_p` by JAX's operations, for several devices by a scatter of rows."""
    x = _apart(x, on_several)
    starts, kept = _located(x, operands, access)
    if access.batch:
        # A scatter that leaves out rows is in place on one CPU, but copies on a GPU.
        if kept is not None and access.is_unique and (on_several or not on_cpu):
            old = _gather(x, starts, access) if method == "set" else lax.full_like(value, 0)
            value, kept = _chosen(kept, value, old, access), None
        return _scatter(x, value, starts, kept, access, method, access.is_unique)
    if on_several and _are_few(x, access):
        rows, starts, axes = _in_rows(x, starts, access)
        value = lax.reshape(lax.transpose(value, axes), rows.shape)
        kept = kept if kept is None else jnp.broadcast_to(kept, rows.batch)
        return _scatter(x, value, starts, kept, rows, method, is_unique=True)
    if method == "add" or kept is not None:
        old = _slice(x, starts, access.sizes)
        value = jnp.add(old, value) if method == "add" else value
        # With one flag, and not one for each element, a gradient stores no more than that.
        value = value if kept is None else lax.select(kept, value, old)
    return lax.dynamic_update_slice(x, value, starts, allow_negative_indices=False)


def _apart(x: Value, on_several: bool) -> Value:
    """`x`, of which XLA doesn't see how it was made, where it would go wrong."""
    return lax.optimization_barrier(x) if on_several and _jax.xla_merges_slices else x


def _chosen(flags: Value, new: Value, old: Value, access: Access) -> Value:
    """New blocks where the flags are true, and old ones elsewhere."""
    flags = lax.broadcast_in_dim(flags, new.shape, range(len(access.batch)))
    return lax.select(flags, new, old)


def _slice(x: Value, starts: Sequence[Value], sizes: Sequence[int]) -> Value:
    if not all(map(is_static, starts)):
        return lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)
    first = [*map(int, starts)]
    return lax.slice(x, first, [s + n for s, n in zip(first, sizes, strict=True)])


def _are_few(x: Value, access: Access) -> bool:
    return are_few(math.prod(access.sizes), x.size)


def _located(
    x: Value, operands: Sequence[Value], access: Access
) -> tuple[list[Value], Value | None]:
    """Where the blocks begin on each axis, and which of them count; None for all."""
    rest = list(operands)
    flags = [rest.pop()] if access.is_masked else []
    widest = longest(x.shape)
    dtype = place_dtype(widest)
    starts: list[Value] = []
    for n, size, place in zip(x.shape, access.sizes, access.starts, strict=True):
        if not isinstance(place, Place):
            starts.append(_of_type(dtype, 0 if isinstance(place, Along) else place))
            continue
        start = narrow(rest.pop(0), widest)
        if place.wraps:
            start = located(start, n)
        if place.drops:
            flags += [start >= 0, start <= jnp.asarray(n - size, start.dtype)]
        starts.append(within(start, n - size) if place.wraps else start)
    return starts, functools.reduce(operator.and_, flags) if flags else None


def _of_type(dtype: np.dtype, place: int) -> Value:
    # Static ones of more than 31 bits stay what they are, for there may be no dtype.
    return dtype.type(place) if place <= np.iinfo(dtype).max else place


def _gather(x: Value, starts: Sequence[Value], access: Access) -> Value:
    axes, indices = _indices(x, starts, access)
    n_batch, own = len(access.batch), access.own
    dims = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(n_batch, len(access.shape))),
        collapsed_slice_dims=(),
        start_index_map=tuple(axes),
        operand_batching_dims=tuple(own),
        start_indices_batching_dims=tuple(own.values()),
    )
    return lax.gather(x, indices, dims, access.sizes, mode=GatherScatterMode.CLIP)


def _scatter(
    x: Value,
    value: Value,
    starts: Sequence[Value],
    kept: Value | None,
    access: Access,
    method: str,
    is_unique: bool,
) -> Value:
    axes, indices = _indices(x, starts, access)
    n_batch, own = len(access.batch), access.own
    if kept is not None:  # A scatter leaves out what is out of bounds.
        last = np.array([x.shape[k] - access.sizes[k] for k in axes], indices.dtype)
        lowest, last = (jnp.broadcast_to(i, indices.shape) for i in (np.zeros_like(last), last))
        indices = lax.clamp(lowest, indices, last)
        indices = jnp.where(kept[..., None], indices, indices.dtype.type(-1))
    dims = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(n_batch, len(access.shape))),
        inserted_window_dims=(),
        scatter_dims_to_operand_dims=tuple(axes),
        operand_batching_dims=tuple(own),
        scatter_indices_batching_dims=tuple(own.values()),
    )
    scatter = lax.scatter_add if method == "add" else lax.scatter
    return scatter(
        x,
        indices,
        value,
        dims,
        indices_are_sorted=is_unique and kept is None,
        unique_indices=is_unique,
        mode=GatherScatterMode.CLIP if kept is None else GatherScatterMode.FILL_OR_DROP,
    )


def _indices(x: Value, starts: Sequence[Value], access: Access) -> tuple[list[int], Value]:
    """The axes of which blocks have a part; `[*batch, len(axes)]`, where the blocks begin there."""
    axes = [
        k
        for k, (size, start) in enumerate(access.axes)
        if type(start) is not Along and (start != 0 or size != x.shape[k])
    ]
    columns = [jnp.broadcast_to(starts[k], access.batch)[..., None] for k in axes]
    return axes, lax.concatenate(columns, len(access.batch))


# -- rows on several devices -------------------------------------------------------------------

# A block of more than this part of its array stays a slice: the axis may well be one that isn't
# sharded, and each row costs time.
_PART = 16


def are_few(block: int, whole: int) -> bool:
    """Whether a block of so many elements of an array is to be read and written row by row."""
    return 0 < _PART * block <= whole


def _in_rows(
    x: Value, starts: Sequence[Value], access: Access
) -> tuple[Access, list[Value], list[int]]:
    """A block as a batch of rows: an access, and where they begin.

    The batch has the axes of which the block has a part. They are the first ones of the third
    result, the axes of the block in the order in which they are in the rows.
    """
    parts = [a for a, n in enumerate(x.shape) if access.sizes[a] < n]
    batch = tuple(access.sizes[a] for a in parts)
    sizes, begin = [*x.shape], [*starts]
    for k, a in enumerate(parts):
        start = within(starts[a], x.shape[a] - access.sizes[a])
        sizes[a], begin[a] = 1, start + lax.broadcasted_iota(start.dtype, batch, k)
    rows = Access(tuple(Place() if a in parts else 0 for a in range(x.ndim)), tuple(sizes), batch)
    return rows, begin, [*parts, *(a for a in range(x.ndim) if a not in parts)]
