"""Discharge inside `refs.vmap`: lanes that may part ways, and refs that they share.

Where lanes part, all of them go every way, and a mask says for which of them it counts: each write
is masked at the index that it touches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from refs import _jax
from refs._discharge import ref_transforms
from refs._discharge.cells import Cell
from refs._indexing.index import Index
from refs._indexing.syntax import Span
from refs._indexing.values import neutral_of
from refs._lanes.lane_analysis import LaneAnalysis
from refs._lanes.primitives import lane_update
from refs._types import RefLike, Value


class Lanes(NamedTuple):
    """What an interpretation knows of the lanes that it runs in.

    Attributes:
      analysis: where they may part.
      lane: a scalar that is batched.
      mask: whether this lane takes part, or None where all do.
    """

    analysis: LaneAnalysis
    lane: Value
    mask: Value = None

    @property
    def operands(self) -> list[Any]:
        """What a body needs to know of it."""
        return [self.lane] if self.mask is None else [self.lane, self.mask]

    def inside(self, operands: Sequence[Value]) -> Lanes:
        """The same, in a body that was given `operands`."""
        return Lanes(self.analysis, *operands)

    def where(self, flag: Value) -> Lanes:
        """The same, for the lanes of these for which `flag` is true."""
        mask = flag if self.mask is None else lax.bitwise_and(self.mask, flag)
        return self._replace(mask=mask)

    def select(self, new: Any, old: Any) -> Any:
        """`new` where the lane takes part."""
        return new if self.mask is None else jnp.where(self.mask, new, old)


class Accumulator(Cell):
    """A ref that the lanes share and only accumulate into, by `method`. It is never read.

    Its cell holds no value. Each contribution goes to the ref itself, in the trace in which the
    lanes are batched. What a `get` that belongs to an accumulation reads is neutral, zero where
    that is addition, so that what the `swap` writes is the contribution. To a silent one, in what
    is evaluated once more, nothing is added.
    """

    __slots__ = ("is_silent", "prefix", "ref")

    def __init__(
        self,
        ref: RefLike,
        origin: Any,
        method: str,
        prefix: tuple[Any, ...] = (),
        is_silent: bool = False,
    ):
        super().__init__(None, origin)
        self.ref, self.prefix, self.is_silent = ref, prefix, is_silent
        self.method: str = method

    def row(self, index: Any) -> Accumulator:
        prefix = (*self.prefix, index)
        row = Accumulator(self.ref, self.origin, self.method, prefix, self.is_silent)
        row.target = self.target
        return row

    def of(self, ref: RefLike, is_silent: bool) -> Accumulator:
        """The same place in what the ref is called inside a function that it is passed to."""
        same = Accumulator(ref, self.origin, self.method, self.prefix, self.is_silent or is_silent)
        same.target = self.target
        return same

    def update(self, lanes: Any, transforms: Sequence[Any], value: Value) -> None:
        if self.is_silent:
            return
        value = lanes.select(value, neutral_of(_jax.typeof(value), self.method))
        inner = self.ref.shape[len(self.prefix) :]
        dims = (
            ref_transforms.dims_of(transforms, inner) if transforms else [Span(0, n) for n in inner]
        )
        index = Index.of_dims([*self.prefix, *dims], self.ref.shape)
        lane_update(self.ref, lanes.lane, index, self.method, value)
