"""Cells: what a ref is during an interpretation."""

from __future__ import annotations

from typing import Any

from jax import lax

from refs import _jax
from refs._indexing.sharded import sharded_like
from refs._origin import UNKNOWN, Origin
from refs._types import Value
from refs.errors import RefStateError


class Cell:
    """The current value of a ref during an interpretation.

    `target` is the ref itself, where the backward pass will find it. `method` says that lanes
    share the ref, and how the value has been accumulated for it; `changes`, that the body under way
    or a loop around it changes it. `number` says which one it is of those that the program writes.
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
        self, value: Value, origin: Origin = UNKNOWN, sealed: str | None = None, target: Any = None
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

    def describe(self) -> str:
        return self.origin.describe()

    def end(self, doing: str, how: str) -> None:
        """Ends the ref, which only the function that made it can do: others run many times."""
        if not self.made_here:
            raise RefStateError(
                f"{doing} of {self.describe()} inside a traced function that did not make it: do "
                "it where the ref was made, or read `ref[...]`"
            )
        if self.ended is not None:
            raise RefStateError(f"{doing} of {self.describe()}, which {self.ended}")
        self.ended = how

    def read(self) -> Any:
        """The value now."""
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

    def row(self, index: Any) -> Cell:
        """The cell of one row."""
        return Row(self, index)


class Row(Cell):
    """A row of another cell: what a step of a scan over a ref sees."""

    __slots__ = ("index", "whole")

    def __init__(self, whole: Cell, index: Any):
        super().__init__(None, whole.origin)
        self.whole, self.index = whole, index
        self.method = whole.method
        self.changes = whole.changes

    def read(self) -> Any:
        return lax.dynamic_index_in_dim(
            self.whole.read(), self.index, keepdims=False, allow_negative_indices=False
        )

    def write(self, value: Value) -> None:
        self.whole.write(
            lax.dynamic_update_index_in_dim(
                self.whole.read(),
                sharded_like(value, self.read()),
                self.index,
                0,
                allow_negative_indices=False,
            )
        )


def root(cell: Cell) -> Cell:
    while isinstance(cell, Row):
        cell = cell.whole
    return cell
