"""Inner jaxprs as pure functions: the bodies of loops, branches and calls.

A `Scope` tells which cells outside of a body are state of it; an `InnerScope` is the inside, where
cells of its own stand for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from refs import _jax
from refs._discharge.cells import Cell, Row, check_no_ref_returned, merge, root, split
from refs._discharge.lanes import Accumulator, Lanes
from refs._discharge.rule_closures import untouched
from refs._handles.binding import OR_EACH_ITS_OWN
from refs._tracing import derivative_rules, touch_analysis
from refs._tracing.derivative_rules import has_custom_vjp
from refs._tracing.touch_analysis import Rules, Touch
from refs._types import Aval, ClosedJaxpr, Eqn, RefLike, Value
from refs.errors import RefValueError

if TYPE_CHECKING:
    from refs._discharge.interpreter import Context


class Scope:
    """Inner jaxprs of one equation as pure functions over one state.

    Attributes:
      written: the outer cells that any of the jaxprs changes, distinct.
      read: the outer cells that they only read.
      portable: whether a function made here serves any refs that alias in the same pattern.
      sums: the distinct refs that lanes share and that the jaxprs only accumulate into.
    """

    def __init__(
        self, ctx: Context, calls: Sequence[tuple[ClosedJaxpr, Sequence[Any]]], rules_of: Eqn | None
    ):
        self._ctx = ctx
        self.bindings = ctx.bindings()
        touched, closes_over_refs = self._touched(calls, rules_of)
        sums = [cell for cell, _ in touched if isinstance(cell, Accumulator)]
        kinds, rows = _by_cell([(c, k) for c, k in touched if not isinstance(c, Accumulator)])
        self.sums = list({id(cell.ref): cell.ref for cell in sums}.values())
        # The places of rows that are no state themselves are operands of a body: a derivative rule,
        # which JAX traces later, can't close over them.
        places = {id(c): (c, c.prefix) for c in sums} | {id(c): (c, (c.index,)) for c in rows}
        self.places: list[tuple[Cell, tuple[Value, ...]]] = list(places.values())
        self._indices = [i for _, indices in self.places for i in indices]
        # A backward rule touches the refs of this particular call.
        has_backward_rule = any(has_custom_vjp(closed.jaxpr) for closed, _ in calls)
        self.portable = not (closes_over_refs or has_backward_rule or self.places)
        self._held = {key for key, (_, kind) in kinds.items() if kind == Touch.HELD}
        kinds = {
            key: (c, (Rules.NEVER_RUN if root(c).is_idle else ctx.rules).settle(kind))
            for key, (c, kind) in kinds.items()
        }
        self.written = [c for c, kind in kinds.values() if kind.changes]
        self.read = [c for c, kind in kinds.values() if kind == Touch.READ]
        self._idle = [c for c, kind in kinds.values() if kind == Touch.NONE]

    def _touched(
        self, calls: Sequence[tuple[ClosedJaxpr, Sequence[Any]]], rules_of: Eqn | None
    ) -> tuple[list[tuple[Cell, Touch]], bool]:
        """How the jaxprs touch cells, each touch by itself; and whether they close over refs."""
        least = Touch.NONE if rules_of is None else Touch.HELD
        touched: list[tuple[Cell, Touch]] = []
        closes_over_refs = False
        for closed, args in calls:
            if not self._ctx.differentiated:
                found = touch_analysis.touches(closed)
            elif rules_of is None:
                found = derivative_rules.touches(closed)
            else:
                found = derivative_rules.touches_of_call(rules_of, closed)
            for arg, kind in zip(args, found.inputs, strict=True):
                if isinstance(arg, Cell):
                    touched.append((arg, kind or least))
            for const, kind in (*zip(closed.consts, found.consts, strict=True), *found.hidden):
                if isinstance(const, _jax.NativeRef):
                    closes_over_refs = True
                    # One without a cell here is touched only by a rule, which JAX may never trace.
                    if isinstance(cell := self.bindings.find(const), Cell):
                        touched.append((cell, kind))
        return touched, closes_over_refs

    def is_held(self, cell: Cell) -> bool:
        """Whether only derivative rules may touch the ref, and not their function."""
        return id(cell) in self._held

    @property
    def state(self) -> list[Value]:
        """The current values of the written cells."""
        return [c.read() for c in self.written]

    @property
    def constants(self) -> list[Value]:
        """The values of the cells that are only read, `Lanes.operands` if in lanes, and indices."""
        operands = [] if self._ctx.lanes is None else self._ctx.lanes.operands
        return [*(c.read() for c in self.read), *operands, *self._indices]

    def split_constants(
        self, constants: Sequence[Value]
    ) -> tuple[Sequence[Value], Sequence[Value], Sequence[Value]]:
        """The three parts of `constants`, or of what JAX has in their places."""
        start, end = len(self.read), len(constants) - len(self._indices)
        return constants[:start], constants[start:end], constants[end:]

    def in_lanes(self, constants: Sequence[Value], lanes: Lanes) -> list[Value]:
        """`constants` for a body that runs in these lanes."""
        values, _, indices = self.split_constants(constants)
        return [*values, *lanes.operands, *indices]

    def check_same_writes(self, flag: Aval, eqn: Eqn) -> None:
        """Raises if devices differ in whether they write a ref that is the same on all of them.

        `flag` is the type of what tells them. JAX's branches and loops don't make results of it.
        """
        if not _jax.varying_axes(flag):
            return
        for cell in self.written:
            if axes := _jax.axes_beyond(flag, cell.read()):
                raise RefValueError(
                    f"{cell.describe()} is written in the branch or loop at {_jax.user_line(eqn)}, "
                    f"which devices take or leave for themselves, as its predicate varies over "
                    f"mesh axis {axes}: what the ref holds is the same on every device. Decide for "
                    f"all (`jax.lax.pmax(predicate, {axes})`), {OR_EACH_ITS_OWN}"
                )

    def update(self, state: Sequence[Value]) -> None:
        """Gives the written cells their new values."""
        for cell, value in zip(self.written, state, strict=True):
            cell.write(value)

    def enter(
        self,
        state: Sequence[Value],
        constants: Sequence[Value],
        sums: Sequence[RefLike] | None = None,
        is_silent: bool = False,
        are_tangents: bool = False,
    ) -> InnerScope:
        """A body, in which the cells hold these values, and `sums` replace `self.sums`.

        Nothing is accumulated into a ref that `sums` has None for, nor, with `is_silent`, into any.
        Where the values `are_tangents`, no `checkpoint` stores what is read of them.
        """
        return InnerScope(self._ctx, self, state, constants, sums, is_silent, are_tangents)

    def function(self, closed: ClosedJaxpr, args: Sequence[Value]) -> Callable[..., Any]:
        """One of the jaxprs as `f(arrays, state, constants) -> (outputs, new state)`."""

        def called(arrays: list[Value], state: list[Value], constants: list[Value]) -> Any:
            return self.run(closed, merge(args, arrays), state, constants)

        return called

    def call(self, called: Callable[..., Any], args: Sequence[Value]) -> list[Value]:
        """Calls a `function`, perhaps transformed, on the current state, and updates that."""
        out, state = called(split(args), self.state, self.constants)
        self.update(state)
        return out

    def run(
        self,
        closed: ClosedJaxpr,
        args: Sequence[Value],
        state: Sequence[Value],
        constants: Sequence[Value],
    ) -> tuple[list[Value], list[Value]]:
        """Runs one of the jaxprs on inner arrays and outer cells: (outputs, new state)."""
        return self.enter(state, constants).run(closed, args)


def _by_cell(
    touched: Sequence[tuple[Cell, Touch]],
) -> tuple[dict[int, tuple[Cell, Touch]], list[Row]]:
    """The cells that are state, by id, with all that is done to each; and rows within these.

    Two rows of one ref may be the same row, or the ref itself may be touched, too. Then the whole
    ref is state, and its rows are read and written within it.
    """
    sharing: dict[int, set[int]] = {}
    for cell, _ in touched:
        sharing.setdefault(id(root(cell)), set()).add(id(cell))
    kinds: dict[int, tuple[Cell, Touch]] = {}
    rows: list[Row] = []
    for cell, kind in touched:
        if len(sharing[id(root(cell))]) > 1:
            while isinstance(cell, Row):
                rows.append(cell)
                cell = cell.whole
        kinds[id(cell)] = (cell, kinds.get(id(cell), (cell, Touch.NONE))[1] | kind)
    return kinds, rows


class InnerScope:
    """The inside of a body: its own context and cells."""

    def __init__(
        self,
        ctx: Context,
        scope: Scope,
        state: Sequence[Value],
        constants: Sequence[Value],
        sums: Sequence[RefLike] | None,
        is_silent: bool,
        are_tangents: bool,
    ):
        inner_sums = scope.sums if sums is None else sums
        sum_of = {id(r): s for r, s in zip(scope.sums, inner_sums, strict=True)}
        only_read = "which the primal function only reads: a custom rule may not write it either"

        def inner(outer: Cell, value: Value, sealed: str | None = None) -> Cell:
            cell = Cell(value, outer.origin, sealed, outer.target)
            cell.method, cell.number = outer.method, outer.number
            cell.changes = not are_tangents and (outer.changes or sealed is None)
            return cell

        self._written = [inner(c, v) for c, v in zip(scope.written, state, strict=True)]
        values, operands, indices = scope.split_constants(constants)
        read = [inner(c, v, only_read) for c, v in zip(scope.read, values, strict=True)]
        idle = [inner(c, None) for c in scope._idle]
        outers = (*scope.written, *scope.read, *scope._idle)
        inners = (*self._written, *read, *idle)
        inner_of = {id(o): i for o, i in zip(outers, inners, strict=True)}
        given = iter(indices)
        place_of = {id(c): tuple(islice(given, len(place))) for c, place in scope.places}
        counterparts = _Counterparts(inner_of, sum_of, place_of, is_silent)
        self.cell = counterparts.cell
        self.ctx = ctx.inner(scope.bindings, counterparts.cell)
        if ctx.lanes is not None:
            self.ctx.lanes = ctx.lanes.inside(operands)
        self.ctx.cells = {
            ref: self.cell(cell)
            for ref, cell in ctx.cells.items()
            if isinstance(cell, Accumulator) or id(cell) in inner_of
        }

    @property
    def state(self) -> list[Value]:
        return [c.read() for c in self._written]

    def run(self, closed: ClosedJaxpr, args: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        """Runs a jaxpr on inner arrays and outer cells: (outputs, new state)."""
        out = self.ctx.eval(closed, self.args(args))
        check_no_ref_returned(out)
        return out, self.state

    def args(self, args: Sequence[Value]) -> list[Any]:
        """`args` with outer cells replaced by inner ones."""
        return [self.cell(a) if isinstance(a, Cell) else a for a in args]


class _Counterparts(NamedTuple):
    """The cells of a body. They don't refer to the body: such a cycle would keep refs alive."""

    inner_of: dict[int, Cell]
    sum_of: dict[int, RefLike]
    place_of: dict[int, tuple[Value, ...]]
    is_silent: bool

    def cell(self, outer: Cell) -> Cell:
        """The inner cell that stands for an outer cell."""
        if isinstance(outer, Accumulator):
            ref = self.sum_of.get(id(outer.ref), outer.ref)
            is_silent = self.is_silent or ref is None
            prefix = self.place_of.get(id(outer), outer.prefix)
            return outer.of(outer.ref if ref is None else ref, prefix, is_silent)
        if isinstance(outer, Row) and id(outer) not in self.inner_of:
            [index] = self.place_of.get(id(outer), (outer.index,))
            return Row(self.cell(outer.whole), index)
        if id(outer) not in self.inner_of:
            raise untouched(outer.describe())
        return self.inner_of[id(outer)]
