"""Cells: the refs of a program while it is interpreted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from refs import _jax
from refs._origin import UNKNOWN, Origin
from refs._reversible import parts
from refs._types import RefLike, Value
from refs.errors import RefEscapeError, RefStateError


class Cell:
    """The current value of a ref during an interpretation: an array of its shape and dtype.

    Attributes:
      origin: the ref's, for messages.
      ended: how the ref has ended, "was freed at ...", or None.
      sealed: why the ref can't be written here, or None.
      target: the ref itself, for backward rules that touch it, or None.
      made_here: whether the function under way has made the ref.
      method: how the lanes that share the ref accumulate the value, "add" for instance, or None.
      changes: whether the body under way, or a loop around it, writes the ref.
      number: the number by which a callback that fails reports its value, or None.
    """

    __slots__ = (
        "_value",
        "changes",
        "ended",
        "made_here",
        "method",
        "number",
        "origin",
        "sealed",
        "target",
    )

    def __init__(
        self,
        value: Value,
        origin: Origin = UNKNOWN,
        sealed: str | None = None,
        target: RefLike = None,
    ):
        self._value = value
        self.origin = origin
        self.ended: str | None = None
        self.sealed = sealed
        self.target = target
        self.made_here = False
        self.method: str | None = None
        self.changes = False
        self.number: int | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing needs the ref's value, which isn't known then."""
        return self._value is None

    def describe(self) -> str:
        return self.origin.describe()

    def end(self, doing: str, how: str) -> None:
        """Ends the ref. Only the function that has made it may: others may run many times."""
        if not self.made_here:
            raise RefStateError(
                f"{doing} of {self.describe()} inside a traced function that did not make it: do "
                "it where the ref was made, or read `ref[...]`"
            )
        if self.ended is not None:
            raise RefStateError(f"{doing} of {self.describe()}, which {self.ended}")
        self.ended = how

    def read(self) -> Value:
        """The current value."""
        if self.ended is not None:
            raise RefStateError(f"use of {self.describe()}, which {self.ended}")
        return self._value

    def write(self, value: Value) -> None:
        """Replaces the value."""
        if self.ended is not None or self.sealed is not None:
            why = self.sealed if self.ended is None else f"which {self.ended}"
            raise RefStateError(f"write to {self.describe()}, {why}")
        # A ref's type is never weak, and loops carry it.
        self._value = _jax.strong(value)

    def row(self, index: Value) -> Cell:
        """A cell for the row at `index`, an int32 scalar."""
        return Row(self, index)


class Row(Cell):
    """A row of another cell: the operand that a step of a `scan` over a ref gets."""

    __slots__ = ("index", "whole")

    def __init__(self, whole: Cell, index: Value):
        super().__init__(None, whole.origin)
        self.whole, self.index = whole, index
        self.method = whole.method
        self.changes = whole.changes

    def read(self) -> Value:
        return parts.read_row(self.whole.read(), self.index)

    def write(self, value: Value) -> None:
        self.whole.write(parts.update_row(self.whole.read(), self.index, value))


def root(cell: Cell) -> Cell:
    """The cell of the whole ref that a row, perhaps of a row, is in; any other cell as it is."""
    while isinstance(cell, Row):
        cell = cell.whole
    return cell


def split(args: Sequence[Value]) -> list[Value]:
    """The array operands among `args`."""
    return [a for a in args if not isinstance(a, Cell)]


def merge(args: Sequence[Value], arrays: Sequence[Value]) -> list[Any]:
    """`args` with its array operands replaced."""
    rest = iter(arrays)
    return [a if isinstance(a, Cell) else next(rest) for a in args]


def check_no_ref_returned(out: Sequence[Value]) -> None:
    for x in out:
        if isinstance(x, Cell):
            raise RefEscapeError(
                f"{x.describe()} is returned from the body of a loop, a branch or an inner "
                "function: return its value, `ref[...]`"
            )
