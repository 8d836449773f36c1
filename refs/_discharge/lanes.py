"""Discharge inside `refs.vmap`: lanes that may diverge, and refs that they share.

Where lanes diverge, all of them run every branch, and a mask says in which of them it counts: each
write is masked at the index that it touches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from refs._discharge.cells import Cell
from refs._indexing import ref_transforms
from refs._indexing.index import Index
from refs._indexing.syntax import Span
from refs._indexing.values import neutral_of
from refs._lanes.lane_analysis import LaneAnalysis
from refs._lanes.primitives import lane_update
from refs._origin import Origin
from refs._types import RefLike, Value


class Lanes(NamedTuple):
    """The lanes that an interpretation runs in.

    Attributes:
      analysis: where they may diverge.
      lane: a scalar that is batched: True in every lane.
      mask: a bool scalar, whether this lane takes part; None where all do.
    """

    analysis: LaneAnalysis
    lane: Value
    mask: Value = None

    @property
    def operands(self) -> list[Value]:
        """The scalars to give a body, for `inside`."""
        return [self.lane] if self.mask is None else [self.lane, self.mask]

    def inside(self, operands: Sequence[Value]) -> Lanes:
        """These lanes in a body that was given `operands`."""
        return Lanes(self.analysis, *operands)

    def where(self, flag: Value) -> Lanes:
        """Those of these lanes for which `flag`, a bool scalar, is true."""
        mask = flag if self.mask is None else lax.bitwise_and(self.mask, flag)
        return self._replace(mask=mask)

    def select(self, new: Value, old: Value) -> Value:
        """`new` where the lane takes part, `old` elsewhere."""
        return new if self.mask is None else jnp.where(self.mask, new, old)


class Accumulator(Cell):
    """A ref that the lanes share and only accumulate into, by `method`. It is never read.

    The cell holds no value. Each contribution goes to the ref itself, in the trace in which the
    lanes are batched. A `get` that belongs to an accumulation gives the neutral element, zero for
    additions, so that the `swap` writes the contribution. Nothing is accumulated into a silent one,
    which belongs to a second evaluation of a function.

    Attributes:
      ref: the whole ref.
      prefix: the indices of the row of `ref` that this stands for, outermost first.
    """

    __slots__ = ("is_silent", "prefix", "ref")

    def __init__(
        self,
        ref: RefLike,
        origin: Origin,
        method: str,
        prefix: tuple[Value, ...] = (),
        is_silent: bool = False,
    ):
        super().__init__(None, origin)
        self.ref, self.prefix, self.is_silent = ref, prefix, is_silent
        self.method: str = method

    def row(self, index: Value) -> Accumulator:
        prefix = (*self.prefix, index)
        row = Accumulator(self.ref, self.origin, self.method, prefix, self.is_silent)
        row.target = self.target
        return row

    def of(self, ref: RefLike, prefix: tuple[Value, ...], is_silent: bool) -> Accumulator:
        """The same place under other names of the ref and of the indices, in another function."""
        same = Accumulator(ref, self.origin, self.method, prefix, self.is_silent or is_silent)
        same.target = self.target
        return same

    def update(self, lanes: Any, transforms: Sequence[Any], value: Value) -> None:
        """Accumulates `value`, of the shape of the part that `transforms` select."""
        if self.is_silent:
            return
        value = lanes.select(value, neutral_of(jax.typeof(value), self.method))
        inner = self.ref.shape[len(self.prefix) :]
        dims = (
            ref_transforms.dims_of(transforms, inner) if transforms else [Span(0, n) for n in inner]
        )
        index = Index.of_dims([*self.prefix, *dims], self.ref.shape)
        lane_update(self.ref, lanes.lane, index, self.method, value)
