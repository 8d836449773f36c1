"""The transaction that every wrapper runs: trace, discharge, transform and run, write back.

A traced function touches refs that it is given and refs that it closes over. Each distinct one is
a *slot*; a ref that is both is one slot. The function's accesses to a slot decide its role:
written, only read, or idle (then it isn't passed at all).

A wrapper traces the user's function into a `Transaction`, applies JAX's own transformation to its
pure function `run`, and reads and writes the refs around that with `values` and `commit`, whatever
they are: handles, or the traced refs of an enclosing transformation. So wrappers nest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax

from refs import _jax
from refs._buffers.several import replaced
from refs._callbacks.failure import failures_told
from refs._discharge.cells import Cell
from refs._discharge.interpreter import Context
from refs._discharge.program import Program
from refs._handles import access
from refs._handles.making import make
from refs._origin import Origin, origin_of
from refs._tracing.discharged import is_lane
from refs._tracing.facts import can_fail
from refs._tracing.names import Names
from refs._tracing.touch_analysis import Rules, Touch
from refs._tracing.trace import (
    ArgumentRef,
    NewRef,
    OuterRef,
    Trace,
    neutral_like,
    new_origins,
    ref_type,
    result_of,
    rules_where,
    trace,
)
from refs._transactions.lines import Lines
from refs._types import Aval, PyTree, RefLike, Value
from refs.errors import RefValueError


class Slot(NamedTuple):
    """A distinct ref: the `argument`-th given, the `outer`-th closed over, or both."""

    argument: int | None
    outer: int | None
    origin: Origin

    def ref(self, arguments: Sequence[RefLike], outers: Sequence[RefLike]) -> RefLike:
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
      touch_of: how the function touches each slot.
      has_other_names: whether a wrapper inside has met a ref that is given and closed over.
      rules: what derivative rules may do to a slot that their function is given and doesn't touch.
    """

    def __init__(
        self,
        traced: Trace,
        arguments: Sequence[RefLike],
        rules: Rules = Rules.NEVER_RUN,
        is_differentiated: bool = False,
        has_other_names: bool = False,
    ):
        self.traced, self.rules, self.has_other_names = traced, rules, has_other_names
        # A derivative in a lane: the rules get the value of a ref that is a variable, for its
        # cotangent. They may accumulate into any other, which lanes share, if its value isn't read.
        is_in_lane = is_differentiated and rules is Rules.MAY_READ
        rules_outside = Rules.NEVER_RUN if is_in_lane else rules
        self.program = Program.of(traced.jaxpr, is_differentiated)
        for ref in self.program.refs:
            if isinstance(ref, _jax.Tracer):  # At top level: that of a function that has ended.
                access.check_ref(ref, "use")
        self.links = links_of(arguments, self.program.refs)
        self._n_arguments = len(arguments)
        same = {i: k for i, k in enumerate(self.links) if k is not None}
        of_outers, of_inputs = self.program.touches(same, rules, rules_outside)
        slots = [
            (Slot(i, self.links[i], origin_of(in_aval)), of_inputs[i])
            for i, in_aval in enumerate(traced.jaxpr.in_avals[: len(arguments)])
        ]
        slots += [
            (Slot(None, k, origin_of(jax.typeof(ref))), of_outers[k])
            for k, ref in enumerate(self.program.refs)
            if k not in same.values()
        ]
        self.touch_of = dict(slots)
        self.written = [slot for slot, kind in slots if kind.changes]
        self.read = [slot for slot, kind in slots if kind == Touch.READ]
        self._n_new = len({x for x in traced.out_leaves if isinstance(x, NewRef)})

    @staticmethod
    def of(
        fun: Callable[..., Any],
        arguments: Sequence[RefLike],
        leaves: Sequence[Value],
        rebuild: Callable[
            [Sequence[RefLike], Sequence[Value]], tuple[tuple[Any, ...], dict[str, Any]]
        ],
        types: Sequence[Aval] | None = None,
        axis_env: Sequence[tuple[Any, int]] = (),
        is_differentiated: bool = False,
    ) -> Transaction:
        """Traces `fun`. `arguments` are distinct refs, `leaves` the other arguments' leaves.

        `types` are the types of the refs inside, if these differ from those outside.
        """
        outside = [ref_type(r) for r in arguments]
        types = outside if types is None else types
        names = Names()

        # Wrappers inside take a ref that is given and closed over for one, the one that is given.
        def named(
            refs: Sequence[RefLike], leaves: Sequence[Value]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            same = zip(arguments, outside, refs, types, strict=True)
            names.other.update({id(ref): x for ref, t, x, inner in same if t == inner})
            return rebuild(refs, leaves)

        @functools.wraps(fun)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return fun(*args, **kwargs)
            finally:
                names.other.clear()  # JAX looks for leaks when the trace ends.

        with names.known():
            traced = trace(run, types, leaves, named, axis_env)
        return Transaction(
            traced, arguments, rules_where(is_differentiated), is_differentiated, bool(names.used)
        )

    def run(
        self,
        state: Sequence[Value],
        constants: Sequence[Value],
        leaves: Sequence[Value],
        targets: Sequence[RefLike] | None = None,
        captured: Sequence[Value] | None = None,
    ) -> tuple[list[Value], tuple[list[Value], list[Value]]]:
        """The pure function: (new state, (array outputs, final values of new refs)).

        State comes first among the outputs: XLA gives an alias to the first output that fits.
        State in the host's memory is updated on the device, and goes back.

        `targets` are the ref arguments of the call, if it is to be differentiated: the backward
        rules of the user's custom derivatives write them. `captured` replace the constants that
        aren't refs.
        """
        given = state
        state, constants = ([*map(_jax.in_device_memory, values)] for values in (state, constants))
        cells = self.cells(self.written, state) | self.cells(self.read, constants)
        for slot in self.written:
            cells[slot].method = self._method(slot)
        if targets is not None:
            self.aim(cells, list(self.touch_of), targets)
        context = Context(differentiated=targets is not None, rules=self.rules)
        new, rest = self.run_cells(cells, leaves, context, captured)
        return [*map(_jax.in_memory_of, given, map(_jax.in_device_memory, new))], rest

    @staticmethod
    def cells(slots: Sequence[Slot], values: Sequence[Value] | None = None) -> dict[Slot, Cell]:
        """A cell for each of the slots."""
        values = [None] * len(slots) if values is None else values
        return {s: Cell(v, s.origin) for s, v in zip(slots, values, strict=True)}

    def aim(
        self, cells: dict[Slot, Cell], slots: Sequence[Slot], arguments: Sequence[RefLike]
    ) -> None:
        """Gives the cells of these slots their refs, for backward rules that touch them."""
        for slot, ref in zip(slots, self.refs(slots, arguments), strict=True):
            cells.setdefault(slot, Cell(None, slot.origin)).target = ref

    def run_cells(
        self,
        cells: dict[Slot, Cell],
        leaves: Sequence[Value],
        context: Context,
        captured: Sequence[Value] | None = None,
    ) -> tuple[list[Value], tuple[list[Value], list[Value]]]:
        """`run`, on cells for the slots that are not idle."""
        cells = self.cells([s for s in self.touch_of if s not in cells]) | cells
        of_argument = {s.argument: cell for s, cell in cells.items()}
        of_outer = {s.outer: cell for s, cell in cells.items()}
        out = self.program.run(
            context,
            [of_outer[k] for k in range(len(self.program.refs))],
            [*(of_argument[i] for i in range(self._n_arguments)), *leaves],
            captured,
        )
        out = [_jax.output(x) for x in out]  # A constant may be a Python scalar still.
        n_arrays = len(out) - self._n_new
        return [cells[s].read() for s in self.written], (out[:n_arrays], out[n_arrays:])

    def values(self, slots: Sequence[Slot], arguments: Sequence[RefLike]) -> list[Value]:
        """The current values of slots.

        In a lane of `refs.vmap`, a slot that is only accumulated into starts from the neutral
        element of the update (zeros for "add", ones for "multiply"), and `commit` accumulates the
        result: the lane must not read a ref that it shares with others.
        """
        values: list[Value] = []
        for slot, ref in zip(slots, self.refs(slots, arguments), strict=True):
            method = self._method(slot)
            with self._at(Lines.of_read, slot):
                values.append(neutral_like(ref, method) if method else access.get(ref))
        return values

    def commit(
        self, slots: Sequence[Slot], arguments: Sequence[RefLike], state: Sequence[Value]
    ) -> None:
        """Gives written slots their new values."""
        refs = self.refs(slots, arguments)
        for slot, ref, value in zip(slots, refs, state, strict=True):
            method = self._method(slot)
            with self._at(Lines.of_write, slot):
                if method:
                    access.accumulate(ref, ..., method, value)
                else:
                    access.set(ref, ..., value)

    def update(
        self,
        arguments: Sequence[RefLike],
        body: Callable[[list[Value], list[Value]], tuple[Sequence[Value], Any]],
    ) -> Any:
        """Writes the state of `(state, rest) = body(state, constants)`; returns the rest.

        At top level this is atomic: no other thread's call, and no interrupt, comes between.
        """
        written, read = self.refs(self.written, arguments), self.refs(self.read, arguments)
        if _jax.at_top_level():
            with failures_told():
                return replaced(written, read, body, can_fail(self.traced.jaxpr))
        values = self.values(self.written, arguments), self.values(self.read, arguments)
        state, rest = body(*values)
        self.commit(self.written, arguments, state)
        return rest

    def _method(self, slot: Slot) -> str | None:
        """In a lane: the update method of a slot that is only accumulated into; else None."""
        return self.touch_of[slot].method if is_lane() else None

    def result(
        self, arrays: Sequence[Value], made: Sequence[Value], arguments: Sequence[RefLike]
    ) -> PyTree:
        """The function's result, from its arrays, the values of its new refs and its arguments."""
        new = [make(v, origin) for v, origin in zip(made, self.new_origins, strict=True)]
        return result_of(self.traced.out_tree, self.traced.out_leaves, arrays, arguments, new)

    def per_result(self, prefix: PyTree) -> tuple[list[Any], list[Any]]:
        """The items of a prefix of the result: for its arrays, and for its new refs."""
        items = _jax.broadcast_prefix(prefix, self.traced.out_tree)
        return of_leaves(items, self.traced.out_leaves)

    def refs(self, slots: Sequence[Slot], arguments: Sequence[RefLike]) -> list[RefLike]:
        """The refs that slots stand for in a call."""
        return [s.ref(arguments, self.program.refs) for s in slots]

    def _at(
        self, line: Callable[[Lines, Slot], AbstractContextManager[None]], slot: Slot
    ) -> AbstractContextManager[None]:
        """A context with a line of a slot. Only operations that are recorded have lines."""
        return line(self._lines, slot) if _jax.is_staging() else nullcontext()

    @functools.cached_property
    def _lines(self) -> Lines:
        of_argument = {slot.argument: slot for slot in self.touch_of}
        of_outer = {slot.outer: slot for slot in self.touch_of}
        return Lines(
            self.traced.jaxpr,
            [of_argument.get(k) for k in range(len(self.traced.jaxpr.in_avals))],
            self.program.by_identity([of_outer[k] for k in range(len(self.program.refs))]),
        )

    @functools.cached_property
    def places(self) -> list[jax.sharding.Sharding]:
        """Where its `shard_map`s run."""
        return _jax.places_in(self.traced.jaxpr)

    @property
    def new_origins(self) -> list[Origin]:
        """The origins of the refs that the function makes and returns."""
        return new_origins(self.traced.out_leaves)


def of_leaves(
    items: Sequence[Any], markers: Sequence[ArgumentRef | OuterRef | NewRef | None]
) -> tuple[list[Any], list[Any]]:
    """Splits items for the leaves of a result: for its arrays, and for its new refs."""
    arrays = [x for x, m in zip(items, markers, strict=True) if m is None]
    made: dict[int, Any] = {}
    for x, m in zip(items, markers, strict=True):
        if isinstance(m, NewRef) and made.setdefault(m.position, x) != x:
            raise RefValueError(
                f"a ref that is made inside is returned twice, once for {made[m.position]} and "
                f"once for {x}: it becomes one ref. Return it once"
            )
    return arrays, [made[k] for k in range(len(made))]


def links_of(arguments: Sequence[RefLike], outers: Sequence[RefLike]) -> tuple[int | None, ...]:
    """For each argument: which of `outers` it is, or None."""
    position = {id(ref): k for k, ref in enumerate(outers)}
    return tuple(position.get(id(a)) for a in arguments)
