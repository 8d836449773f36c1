"""Primitives that exist between tracing a lane of `vmap` and batching it.

`lane_update` updates a ref that the lanes share, by a method whose order doesn't matter: add,
multiply, min or max. Batched by `jax.vmap`, it becomes one update with all lanes' contributions, at
all their indices: the cost of an addition is that of the contributions, however large the ref is. A
value that is the same in every lane still contributes once for each. The method "set" overwrites
the whole ref, once, by a value that is the same in every lane.

`lane_any` is true if a flag is true in any lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from refs import _jax
from refs._handles import access
from refs._indexing.accesses import to_front
from refs._indexing.index import Index, indexed_shape
from refs._indexing.places import located, within
from refs._indexing.syntax import Span
from refs._indexing.values import neutral
from refs._types import Aval, PyTreeDef, RefLike, Value

lane_update_p = Primitive("lane_update")
lane_update_p.multiple_results = True
lane_any_p = Primitive("lane_any")


def lane_update(ref: RefLike, lane: Value, index: Index, method: str, value: Value) -> None:
    """Updates the shared `ref` by `value`, of shape `index.taken_shape`.

    `lane` is any scalar that is batched: the primitive is batched, then, even if all its other
    operands are the same in every lane.
    """
    leaves, tree = jax.tree.flatten(() if index.is_whole else (index.indexer(),))
    lane_update_p.bind(ref, lane, value, *leaves, tree=tree, method=method)


def lane_set(ref: RefLike, lane: Value, value: Value) -> None:
    """Overwrites the shared `ref` by `value`, which is the same in every lane. `lane`: as above."""
    lane_update_p.bind(ref, lane, value, tree=jax.tree.structure(()), method="set")


def lane_any(flag: Value) -> Value:
    """Whether `flag`, a bool scalar, is true in any lane: a bool scalar."""
    return lane_any_p.bind(flag)


@_jax.def_effectful_abstract_eval(lane_update_p)
def _lane_update_type(
    ref: Aval, lane: Aval, value: Aval, *leaves: Aval, tree: PyTreeDef, method: str
) -> tuple[list[Any], set[Any]]:
    return [], {_jax.AccumEffect(0)} if method == "add" else {
        _jax.ReadEffect(0),
        _jax.WriteEffect(0),
    }


def _batch_lane_update(
    size: int, args: Sequence[Value], axes: Sequence[int | None], *, tree: PyTreeDef, method: str
) -> tuple[list[Any], list[Any]]:
    ref, _, value, *leaves = args
    _, _, value_axis, *leaf_axes = axes
    transforms = [
        x if axis is None else _Leaf(x, axis) for x, axis in zip(leaves, leaf_axes, strict=True)
    ]
    indexers = jax.tree.unflatten(tree, transforms)
    if all(axis is None for axis in leaf_axes):
        value = _together(method, value, value_axis, size)
        index: Any = Index.of_dims(_dims(indexers[0]), ref.shape) if indexers else ...
    else:
        value = to_front(value, value_axis, size)
        index, value = _of_all_lanes(indexers[0], value, size)
    if method == "set":
        if size:
            access.set(ref, index, value)
    else:
        access.accumulate(ref, index, method, value)
    return [], []


_jax.register_batching(lane_update_p, _batch_lane_update)

_REDUCTIONS: dict[str, Callable[..., jax.Array]] = {
    "add": jnp.sum,
    "multiply": jnp.prod,
    "min": jnp.min,
    "max": jnp.max,
}


def _together(method: str, value: Value, axis: int | None, size: int) -> Value:
    """The contributions of all `size` lanes as one, without the batch axis of `value`."""
    if method == "set":
        return value if axis is None or not size else lax.index_in_dim(value, 0, axis, False)
    if not size:
        shape = value.shape if axis is None else (*value.shape[:axis], *value.shape[axis + 1 :])
        return jnp.full(shape, neutral(value.dtype, method), value.dtype)
    if axis is not None:
        return _REDUCTIONS[method](value, axis).astype(value.dtype)
    if method == "add":
        # In a small integer type the number of lanes wraps around, as their sum does.
        return value * jnp.asarray(size).astype(value.dtype)
    return lax.integer_pow(value, size) if method == "multiply" else value


def _dims(indexer: _jax.NDIndexer) -> list[Any]:
    return [
        Span(d.start, int(d.size), d.stride) if isinstance(d, _jax.Slice) else d
        for d in indexer.indices
    ]


class _Leaf(NamedTuple):
    """An array in an index, and its batch axis."""

    value: Value
    axis: int | None


def _of_all_lanes(indexer: Any, value: Value, size: int) -> tuple[Index, Value]:
    """The index of all lanes' elements, and the values with axes in the order of that index.

    `value`: `[size, *taken_shape]`, of one lane's index.

    The integer arrays of the new index broadcast to `[size, *int_shape, *tail]`. A slice whose
    start differs from lane to lane becomes such an array, its elements along one axis of `tail`.
    """
    int_shape = tuple(indexer.int_indexer_shape)
    moving = [k for k, d in enumerate(indexer.indices) if _moves(d)]
    tail = tuple(int(indexer.indices[k].size) for k in moving)

    def elements(k: int) -> Value:
        """The places in slice `k`, which starts elsewhere in each lane: along an axis of `tail`."""
        span, n = indexer.indices[k], indexer.shape[k]
        start = to_front(span.start.value, span.start.axis, size)
        extent = (span.size - 1) * span.stride + 1 if span.size else 0
        start = within(located(start, n), n - extent)  # as lax.dynamic_slice does
        steps = np.arange(span.size, dtype=np.int32) * np.int32(span.stride)
        place = [s if k == m else 1 for m, s in zip(moving, tail, strict=True)]
        return _reshape(start, size, int_shape, tail) + steps.reshape(place)

    def integers(x: Value) -> Value:
        """The integers of all lanes at one place of the index."""
        value, axis = x if isinstance(x, _Leaf) else (x, None)
        if axis is None:
            value = jnp.broadcast_to(value, int_shape)[None]
        else:
            value = jnp.moveaxis(value, axis, 0)
        return _reshape(value, value.shape[0], int_shape, tail)

    before: list[Any] = []
    after: list[Any] = []
    for k, d in enumerate(indexer.indices):
        if isinstance(d, _jax.Slice):
            start = d.start.value if isinstance(d.start, _Leaf) else d.start
            before.append(Span(start, int(d.size), d.stride))
            after.append(elements(k) if k in moving else before[-1])
        else:
            before.append(np.zeros(int_shape, np.int32))
            after.append(integers(d))

    # From the order of axes that `before` gives, through lanes, integers, slices that move, other
    # slices, to the order that `after` gives.
    _, int_axes = indexed_shape(before, int_shape)
    spans = [k for k, d in enumerate(before) if isinstance(d, Span)]
    value = jnp.moveaxis(value, [1 + a for a in int_axes], range(1, 1 + len(int_axes)))
    first = 1 + len(int_axes)
    moved = [first + spans.index(k) for k in moving]
    value = jnp.moveaxis(value, moved, range(first, first + len(moved)))
    _, int_axes = indexed_shape(after, (size, *int_shape, *tail))
    value = jnp.moveaxis(value, range(len(int_axes)), int_axes)
    return Index.of_dims(after, indexer.shape), value


def _moves(d: Any) -> bool:
    """Whether an entry of an index is a slice whose start differs from lane to lane."""
    start = d.start if isinstance(d, _jax.Slice) else None
    return isinstance(start, _Leaf) and start.axis is not None


def _reshape(x: Value, size: int, int_shape: tuple[int, ...], tail: tuple[int, ...]) -> Value:
    """Integers `[size, *inner]` with axes of size 1 for a broadcast to the shape of the index."""
    inner = x.shape[1:]
    return x.reshape(size, *(1,) * (len(int_shape) - len(inner)), *inner, *(1,) * len(tail))


@lane_any_p.def_abstract_eval
def _lane_any_type(flag: Aval) -> Aval:
    return flag


def _batch_lane_any(
    size: int, args: Sequence[Value], axes: Sequence[int | None]
) -> tuple[Value, None]:
    [flag], [axis] = args, axes
    return (flag if axis is None else jnp.any(flag, axis)), None


_jax.register_batching(lane_any_p, _batch_lane_any)
# A flag that is the same in every lane is not batched at all.
_jax.register_lowering(lane_any_p, lambda flag: flag)
