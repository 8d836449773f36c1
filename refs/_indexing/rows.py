"""Blocks of arrays that lie on several devices: gathers and scatters of rows instead of slices.

XLA gives each device the rows that lie on it. For a slice whose start it doesn't know it brings the
whole array to every device first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax import lax
from jax.lax import GatherScatterMode

from refs._indexing.places import longest, narrow
from refs._types import Value

# A block of more than this part of its array stays a slice: the axis may well be one that isn't
# sharded, and each row costs time.
_PART = 16


def are_few(block: int, whole: int) -> bool:
    """Whether a block of so many elements of an array is to be read and written row by row."""
    return 0 < _PART * block <= whole


def read_rows(x: Value, *starts: Value, sizes: tuple[int, ...]) -> Value:
    """`lax.dynamic_slice(x, starts, sizes)`."""
    axes, kept = _axes(x, sizes)
    rows = lax.gather(
        x,
        _places(x, starts, sizes, axes),
        lax.GatherDimensionNumbers(
            offset_dims=tuple(range(1, 1 + len(kept))),
            collapsed_slice_dims=tuple(axes),
            start_index_map=tuple(axes),
        ),
        [1 if a in axes else n for a, n in enumerate(x.shape)],
        mode=GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    order = [*axes, *kept]
    return lax.transpose(
        lax.reshape(rows, [sizes[a] for a in order]), [order.index(a) for a in range(x.ndim)]
    )


def write_rows(x: Value, value: Value, *starts: Value, flag: Value | None = None) -> Value:
    """`lax.dynamic_update_slice(x, value, starts)`, or `x` if there is a `flag` that is false."""
    return _scatter(lax.scatter, x, value, starts, flag)


def add_rows(x: Value, value: Value, *starts: Value, flag: Value | None = None) -> Value:
    """`x` with `value` added to the block that `write_rows` would overwrite."""
    return _scatter(lax.scatter_add, x, value, starts, flag)


def _scatter(
    method: Callable[..., Value],
    x: Value,
    value: Value,
    starts: Sequence[Value],
    flag: Value | None,
) -> Value:
    axes, kept = _axes(x, value.shape)
    rows = lax.transpose(value, [*axes, *kept])
    places = _places(x, starts, value.shape, axes, flag)
    return method(
        x,
        places,
        lax.reshape(rows, [len(places), *(x.shape[a] for a in kept)]),
        lax.ScatterDimensionNumbers(
            update_window_dims=tuple(range(1, 1 + len(kept))),
            inserted_window_dims=tuple(axes),
            scatter_dims_to_operand_dims=tuple(axes),
        ),
        indices_are_sorted=True,
        unique_indices=True,
        mode=GatherScatterMode.FILL_OR_DROP,
    )


def _axes(x: Value, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """The axes of which a block of these sizes has a part, and those that it has whole."""
    parts = [a for a in range(x.ndim) if sizes[a] < x.shape[a]]
    return parts, [a for a in range(x.ndim) if a not in parts]


def _places(
    x: Value,
    starts: Sequence[Value],
    sizes: Sequence[int],
    axes: Sequence[int],
    flag: Value | None = None,
) -> Value:
    """`[n_rows, len(axes)]`: where each row lies. A block begins where it fits, as slices do.

    If the scalar `flag` is false, all rows are out of bounds.
    """
    shape = [sizes[a] for a in axes]
    columns = []
    for k, a in enumerate(axes):
        start = narrow(starts[a], longest(x.shape))
        of = start.dtype.type
        start = lax.clamp(of(0), start, of(x.shape[a] - sizes[a]))
        if flag is not None:
            start = lax.select(flag, start, of(x.shape[a]))
        places = lax.broadcasted_iota(start.dtype, shape, k) + start
        columns.append(lax.reshape(places, [places.size, 1]))
    return lax.concatenate(columns, 1)
