"""The static part of an access to blocks of an array: see `accesses`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias


class Place(NamedTuple):
    """How an access takes an operand that says where its block begins on an axis.

    Attributes:
      wraps: whether negative numbers count from the axis' end, and XLA isn't relied upon to clamp.
      drops: whether a block beyond an edge is left out; otherwise it is moved to where it fits.
    """

    wraps: bool = True
    drops: bool = False


class Along(NamedTuple):
    """Each block lies in a row of its own on an axis: in the row of its index on a batch axis."""

    batch_axis: int


Start: TypeAlias = int | Place | Along


class Access(NamedTuple):
    """The static part of an access.

    Attributes:
      starts: for each axis of an array, where the block begins: a number, or a `Place` for the next
        operand, or `Along`.
      sizes: for each axis of an array, the size of the block; 1 for a row that it lies in.
      batch: how many blocks there are, along each axis of a batch.
      is_masked: whether the last operand is a mask.
    """

    starts: tuple[Start, ...]
    sizes: tuple[int, ...]
    batch: tuple[int, ...] = ()
    is_masked: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the blocks, without the axes on which they lie in rows of their own."""
        return (*self.batch, *(n for n, s in self.axes if type(s) is not Along))

    @property
    def own(self) -> dict[int, int]:
        """The axes of the array on which each block has a row of its own, and their batch axes."""
        return {k: s.batch_axis for k, s in enumerate(self.starts) if type(s) is Along}

    @property
    def clipped(self) -> Access:
        """The same blocks, moved to where they fit."""
        starts = [p._replace(drops=False) if type(p) is Place else p for p in self.starts]
        return self._replace(starts=tuple(starts))

    @property
    def is_unique(self) -> bool:
        """Whether no two blocks have an element in common."""
        own = {*self.own.values()}
        return all(n == 1 or k in own for k, n in enumerate(self.batch))

    @property
    def axes(self) -> Iterator[tuple[int, Start]]:
        return zip(self.sizes, self.starts, strict=True)

    def __repr__(self) -> str:
        return f"[{', '.join(f'{_shown(start)}:+{n}' for n, start in self.axes)}]"


def _shown(start: Start) -> str:
    if isinstance(start, Along):
        return f"along {start.batch_axis}"
    return ("drop" if start.drops else "clip") if isinstance(start, Place) else str(start)
