"""Reading and updating an array value through a chain of JAX's ref transforms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from refs import _jax
from refs._indexing.index import Index
from refs._indexing.nesting import nest
from refs._indexing.places import is_static, known
from refs._indexing.sharded import sharded_as
from refs._indexing.syntax import Span
from refs._types import Value
from refs.errors import MissingRuleError


def read(x: Value, transforms: Sequence[Any]) -> Value:
    """The part of `x` that the chain selects."""
    for transform in transforms:
        x = _read(x, transform)
    return x


def update(
    x: Value,
    transforms: Sequence[Any],
    method: str,
    value: Value,
    mask: Value | None = None,
) -> Value:
    """`x` with the part that the chain selects overwritten by `value`, or `value` added to it.

    `value` is of the part's shape; `method` is "set" or "add". It is `x` where there is a `mask`, a
    bool scalar, and that is false.
    """
    if not transforms:
        value = sharded_as(value if method == "set" else jnp.add(x, value), jax.typeof(x))
        return value if mask is None else jnp.where(mask, value, x)
    if isinstance(transforms[0], _jax.NDIndexer):
        # Successive indexers become one index, because the outer one may name an element twice.
        index, rest = _index(transforms[0]), list(transforms[1:])
        while rest and isinstance(rest[0], _jax.NDIndexer):
            index = nest(index, _index(rest.pop(0)), writing=True)
        if not rest:
            return index.update(x, method, value, mask)
        return index.write(x, update(index.read(x), rest, method, value, mask))
    first, *rest = transforms
    return _undo(x, first, update(_read(x, first), rest, method, value, mask))


def _read(x: Value, transform: Any) -> Value:
    if isinstance(transform, _jax.NDIndexer):
        return _index(transform).read(x)
    if isinstance(transform, _jax.ReshapeTransform):
        return lax.reshape(x, transform.shape)
    if isinstance(transform, _jax.TransposeTransform):
        return lax.transpose(x, transform.permutation)
    if isinstance(transform, _jax.BitcastTransform):
        return _jax.bitcast(x, transform.dtype)
    raise MissingRuleError(
        f"a ref is seen through a {type(transform).__name__}, which can't be discharged: read the "
        "ref, `ref[...]`, and transform the value"
    )


def _undo(x: Value, transform: Any, part: Value) -> Value:
    """The array, of the shape and dtype of `x`, of which `_read(..., transform)` gives `part`."""
    if isinstance(transform, _jax.ReshapeTransform):
        return lax.reshape(part, x.shape)
    if isinstance(transform, _jax.BitcastTransform):
        return _jax.bitcast(part, x.dtype)
    return lax.transpose(part, tuple(int(k) for k in np.argsort(transform.permutation)))


def dims_of(transforms: Sequence[Any], shape: tuple[int, ...]) -> list[Any]:
    """A `Span`, an integer or an integer array for each dimension, from a chain of one indexer."""
    if len(transforms) != 1 or not isinstance(transforms[0], _jax.NDIndexer):
        raise MissingRuleError(
            "lanes accumulate into a shared ref through several indices, or a reshaped or "
            "transposed view of it: index the ref once"
        )
    return _dims(transforms[0])


def _index(indexer: _jax.NDIndexer) -> Index:
    return Index.of_dims(_dims(indexer), indexer.shape)


def _dims(indexer: _jax.NDIndexer) -> list[Any]:
    return [_dim(d, n) for d, n in zip(indexer.indices, indexer.shape, strict=True)]


def _dim(d: Any, n: Any) -> Any:
    return _span(d, n) if isinstance(d, _jax.Slice) else _known(d, n)


def _span(d: Any, n: Any) -> Span:
    start = _known(d.start, n)
    if all(map(is_static, (start, n, d.size))) and start + (d.size - 1) * d.stride >= n:
        start = np.asarray(d.start, np.int32)  # moved so that the block fits, as a traced one is
    return Span(start, d.size, d.stride)


def _known(i: Any, n: Any) -> Any:
    """A Python integer if the index is static and in bounds, otherwise an array or tracer."""
    if isinstance(i, jax.Array) or not is_static(n):
        return i
    return known(np.asarray(i), n)
