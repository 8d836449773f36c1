"""The part of a ref that an access touches, and what is known of it before anything runs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from refs import _jax
from refs._indexing.places import is_static, known
from refs._indexing.syntax import Span
from refs._reversible.parts import read_at, update_at
from refs._types import Atom, Aval, PyTreeDef, Value

# What is larger isn't looked at element by element.
LARGEST = 2**24


class Literal:
    """A constant operand."""

    __slots__ = ("aval", "value")

    def __init__(self, value: Value, aval: Aval):
        self.value, self.aval = value, aval


def is_index_type(aval: Aval) -> bool:
    """Whether an array of this type may be an index, a mask, or what one is computed from."""
    is_integer = aval.dtype == bool or jnp.issubdtype(aval.dtype, jnp.integer)
    return is_integer or _jax.is_key(aval.dtype)


class Place(NamedTuple):
    """A part of a ref: the index of an access, as it is in `parts`.

    Attributes:
      tree: the structure of JAX's ref transforms; None for a row of a scanned ref.
      leaves: their traced parts, operands.
      spans: a `Span` for each dimension; None where it isn't known before the program runs.
      is_distinct: whether it names no element twice.
      is_safe: whether it is certainly in bounds, too: what is written there can be read back.
      is_whole: whether it is the whole ref, as it is.
      is_all: whether it names each element of the ref once, in some order.
    """

    tree: PyTreeDef | None
    leaves: tuple[Atom, ...]
    spans: tuple[Span, ...] | None
    is_distinct: bool
    is_safe: bool
    is_whole: bool
    is_all: bool

    @staticmethod
    def of(tree: PyTreeDef | None, leaves: Sequence[Atom], shape: tuple[int, ...]) -> Place:
        if tree is None:
            return Place(None, tuple(leaves), None, True, True, False, False)
        transforms = jax.tree.unflatten(tree, list(leaves))
        spans = _spans(transforms, shape)
        is_whole = not transforms or (
            len(transforms) == 1
            and spans is not None
            and len(spans) == len(shape)
            and all(s.covers(n) for s, n in zip(spans, shape, strict=True))
            and all(isinstance(d, _jax.Slice) for d in transforms[0].indices)
        )
        # Constant arrays of integers.
        are_known = (
            len(transforms) == 1
            and isinstance(transforms[0], _jax.NDIndexer)
            and all(map(_is_inside, transforms[0].indices, transforms[0].shape))
        )
        is_distinct = (
            spans is not None
            or all(map(_is_distinct, transforms))
            or (are_known and _names_none_twice(tree, leaves, shape))
        )
        are_known &= is_distinct
        is_all = is_whole or (
            are_known and math.prod(transforms[0].get_indexer_shape()) == math.prod(shape)
        )
        is_safe = is_whole or spans is not None or are_known
        return Place(tree, tuple(leaves), spans, is_distinct, is_safe, is_whole, is_all)

    @property
    def key(self) -> Hashable:
        """What is equal for places of a ref that are certainly the same."""
        return None if self.is_whole else (self.tree, *map(_key, self.leaves))

    def is_disjoint(self, other: Place) -> bool:
        """Whether the two certainly have no element in common."""
        if self.spans is None or other.spans is None or len(self.spans) != len(other.spans):
            return False
        return any(map(_apart, self.spans, other.spans))

    def read(self, x: Value, leaves: Sequence[Value]) -> Value:
        """The part of an array."""
        return read_at(x, self.tree, leaves)

    def write(self, x: Value, leaves: Sequence[Value], value: Value) -> Value:
        """The array with this part overwritten."""
        return update_at(x, self.tree, leaves, "set", value)

    def add(self, x: Value, leaves: Sequence[Value], value: Value) -> Value:
        """The array with `value` added to this part."""
        return update_at(x, self.tree, leaves, "add", value)


def _spans(transforms: Sequence[Any], shape: tuple[int, ...]) -> tuple[Span, ...] | None:
    """A `Span` for each dimension, if that is known and in bounds."""
    if not transforms:
        return tuple(Span(0, n) for n in shape)
    found: list[Span | None] = [None]
    if len(transforms) == 1 and isinstance(transforms[0], _jax.NDIndexer):
        [indexer] = transforms
        found = [_span(d, n) for d, n in zip(indexer.indices, indexer.shape, strict=True)]
    spans = [s for s in found if s is not None]
    return tuple(spans) if len(spans) == len(found) else None


def _span(d: Any, n: int) -> Span | None:
    is_slice = isinstance(d, _jax.Slice)
    start = d.start if is_slice else d
    start = start.value if isinstance(start, Literal) else start
    size, step = (d.size, d.stride) if is_slice else (1, 1)
    is_number = isinstance(start, int | np.integer | np.ndarray | jax.Array)
    is_known = is_number and not isinstance(start, _jax.Tracer) and np.ndim(start) == 0
    first: Any = known(np.asarray(start), n) if is_known and is_static(n) else None
    if not (is_static(first) and is_static(size)) or first + (size - 1) * step >= n:
        return None
    return Span(int(first), int(size), step)


def _is_inside(d: Any, n: int) -> bool:
    """Whether all that an index names along an axis is known, and in bounds."""
    if not isinstance(d, Literal) or not d.aval.shape:
        return _span(d, n) is not None
    if isinstance(d.value, _jax.Tracer):
        return False
    value = np.asarray(d.value)
    return bool(((value >= -n) & (value < n)).all())


def _key(leaf: Atom) -> Hashable:
    """What is equal for one operand, and for equal constants, of whatever type of integers."""
    if not isinstance(leaf, Literal) or isinstance(leaf.value, _jax.Tracer):
        return leaf
    value = np.asarray(leaf.value)
    return value.shape, value.astype(np.int64).tobytes()


def _apart(a: Span, b: Span) -> bool:
    """Whether two spans have no element in common: apart, or interleaved with equal steps."""
    if a.start + (a.size - 1) * a.step < b.start or b.start + (b.size - 1) * b.step < a.start:
        return True
    return a.step == b.step and (a.start - b.start) % a.step != 0


def _names_none_twice(tree: PyTreeDef, leaves: Sequence[Atom], shape: tuple[int, ...]) -> bool:
    """Whether a constant index names no element twice."""
    size = math.prod(shape)
    if size > LARGEST:
        return False
    with jax.ensure_compile_time_eval():
        numbers = jnp.arange(size, dtype=jnp.int32).reshape(shape)
        found = np.asarray(read_at(numbers, tree, [x.value for x in leaves]))
    return len(np.unique(found)) == found.size


def _is_distinct(transform: Any) -> bool:
    """Whether a transform names no element twice."""
    return isinstance(transform, _jax.DistinctIndexer) or all(
        isinstance(d, _jax.Slice) or not getattr(getattr(d, "aval", d), "shape", ())
        for d in getattr(transform, "indices", ())
    )
