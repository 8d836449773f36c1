"""The transaction that every wrapper is: trace, discharge, run, write the state back.

A traced function touches refs that it is given and refs that it closes over. Each distinct one is
a *slot*; a ref that is both is one slot. What the function does to a slot decides its role:
written, only read, or idle (then it isn't passed at all).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from refs import _jax
from refs._effects import Touch
from refs._tracing import NewRef, Trace, ref_type, trace
from refs.discharge._interpreter import Cell
from refs.discharge._pure import Program


class Slot(NamedTuple):
    """A distinct ref: the `argument`-th given, the `outer`-th closed over, or both."""

    argument: int | None
    outer: int | None
    origin: Any

    def ref(self, arguments: Sequence[Any], outers: Sequence[Any]) -> Any:
        if self.argument is not None:
            return arguments[self.argument]
        return outers[self.outer]  # pyright: ignore[reportArgumentType, reportCallIssue]


class Transaction:
    """A traced function as a pure function of state.

    Attributes:
      traced: the trace.
      program: its jaxpr and the refs that it closes over.
      links: for each ref argument: which closed-over ref it is, or None.
      written: the slots that the function changes, arguments first.
      read: the slots that it only reads.
    """

    def __init__(self, traced: Trace, arguments: Sequence[Any]):
        self.traced = traced
        self.program = Program.of(traced.jaxpr)
        self.links = links_of(arguments, self.program.refs)
        self._n_arguments = len(arguments)
        same = {i: k for i, k in enumerate(self.links) if k is not None}
        of_outers, of_inputs = self.program.touches(same)
        slots = [
            (Slot(i, self.links[i], _origin(in_aval)), of_inputs[i])
            for i, in_aval in enumerate(traced.jaxpr.in_avals[: len(arguments)])
        ]
        slots += [
            (Slot(None, k, _origin(_jax.typeof(ref))), of_outers[k])
            for k, ref in enumerate(self.program.refs)
            if k not in same.values()
        ]
        self._slots = [slot for slot, _ in slots]
        self.written = [slot for slot, kind in slots if kind.changes]
        self.read = [slot for slot, kind in slots if kind == Touch.READ]
        self._n_new = len({x for x in traced.out_leaves if isinstance(x, NewRef)})

    @staticmethod
    def of(
        fun: Callable[..., Any], arguments: Sequence[Any], leaves: Sequence[Any], rebuild: Any
    ) -> Transaction:
        """Traces `fun`. `arguments` are distinct refs, `leaves` the other arguments' leaves."""
        types = [ref_type(r) for r in arguments]
        return Transaction(trace(fun, types, leaves, rebuild), arguments)

    def run(
        self, state: Sequence[Any], constants: Sequence[Any], leaves: Sequence[Any]
    ) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
        """The pure function: (new state, (array outputs, final values of new refs)).

        State comes first among the outputs: XLA gives an alias to the first output that fits.
        """
        cells = {s: Cell(v, s.origin) for s, v in zip(self.written, state, strict=True)}
        cells |= {s: Cell(v, s.origin) for s, v in zip(self.read, constants, strict=True)}
        cells |= {s: Cell(None, s.origin) for s in self._slots if s not in cells}
        of_argument = {s.argument: cell for s, cell in cells.items()}
        of_outer = {s.outer: cell for s, cell in cells.items()}
        out = self.program.run(
            [of_outer[k] for k in range(len(self.program.refs))],
            [*(of_argument[i] for i in range(self._n_arguments)), *leaves],
        )
        n_arrays = len(out) - self._n_new
        return [cells[s].read() for s in self.written], (out[:n_arrays], out[n_arrays:])

    def refs(self, slots: Sequence[Slot], arguments: Sequence[Any]) -> list[Any]:
        """The refs that slots stand for in a call."""
        return [s.ref(arguments, self.program.refs) for s in slots]

    @property
    def new_origins(self) -> list[Any]:
        """The origins of the refs that the function makes and returns."""
        found = {x.position: x.origin for x in self.traced.out_leaves if isinstance(x, NewRef)}
        return [found[k] for k in range(self._n_new)]


def links_of(arguments: Sequence[Any], outers: Sequence[Any]) -> tuple[int | None, ...]:
    """For each argument: which of `outers` it is, or None."""
    position = {id(ref): k for k, ref in enumerate(outers)}
    return tuple(position.get(id(a)) for a in arguments)


def _origin(aval: Any) -> Any:
    return getattr(aval, "origin", None)
