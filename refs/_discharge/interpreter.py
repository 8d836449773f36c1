"""The interpreter: evaluates an effectful jaxpr with each ref a mutable cell.

A variable of array type has a value, written once; a variable of ref type has a `Cell`, whose value
changes. Two variables may share a cell, so aliases need no special case. Equations without refs are
evaluated as they are; the others by the rule that is registered for their primitive.

Evaluated on tracers, a program is discharged: the trace records a pure one. Rules for loops,
branches and calls go through `Context.scope`, which turns an inner jaxpr into a pure function of
arrays and state: state in, new state out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

from refs import _jax
from refs._callbacks.primitives import host_callback_p
from refs._discharge.cells import Cell, Row, check_no_ref_returned, merge, root, split
from refs._discharge.lanes import Accumulator, Lanes
from refs._discharge.rule_choice import rule_of
from refs._discharge.rule_closures import Bindings, Frame, late, untouched
from refs._handles.access import describe
from refs._tracing import derivative_rules, touch_analysis
from refs._tracing.derivative_rules import has_custom_vjp
from refs._tracing.touch_analysis import Touch
from refs._types import Atom, ClosedJaxpr, Eqn, Jaxpr, RefLike, Value


class Context:
    """One interpretation, or one body within it.

    Attributes:
      cells: the cell of each concrete ref, by the ref's id.
      differentiated: whether the results may be differentiated.
      keeps_reads: whether `checkpoint` stores the values read from refs instead of the refs.
      repeats: whether a backward pass would evaluate this again.
      lanes: the lanes of `refs.vmap` that this is evaluated in, or None.
      held: how derivative rules may touch a ref that their function is given and doesn't touch.
    """

    def __init__(
        self,
        outer: Context | None = None,
        around: Bindings | None = None,
        inside: Callable[[Cell], Cell | None] = lambda cell: cell,
        differentiated: bool = False,
        lanes: Lanes | None = None,
        held: Touch = Touch.NONE,
    ):
        self.differentiated = differentiated if outer is None else outer.differentiated
        self.keeps_reads = outer is not None and outer.keeps_reads
        self.repeats = outer is not None and outer.repeats
        self.lanes = lanes
        self.held = held if outer is None else outer.held
        self._frames: list[Frame] = []
        self.cells: dict[int, Cell] = {}
        self._memo: dict[Any, Any] = {}
        self._around, self._inside = around, inside

    def eval(self, closed: ClosedJaxpr, args: Sequence[Value]) -> list[Any]:
        """Interprets a closed jaxpr here. The arguments and results are values and cells."""
        consts = [
            self.cell_of(c)
            if isinstance(c, _jax.NativeRef)
            else self.resolve(c)
            if isinstance(c, _jax.Tracer)
            else c
            for c in closed.consts
        ]
        return self.eval_open(closed.jaxpr, consts, args)

    def eval_open(self, jaxpr: Jaxpr, consts: Sequence[Value], args: Sequence[Value]) -> list[Any]:
        """`eval` of a jaxpr whose constants are given, as values and cells."""
        # JAX 0.12 has the variables of constants that aren't attached among the inputs.
        frame = Frame(jaxpr)
        frame.write((*jaxpr.constvars, *jaxpr.invars), (*consts, *args))

        def value(atom: Atom) -> Any:
            return atom.val if isinstance(atom, _jax.Literal) else frame.env[atom]

        with self._frame(frame):
            for k, eqn in enumerate(jaxpr.eqns):
                with _jax.at_source_of(eqn):
                    out = self.eval_eqn(jaxpr, k, [value(v) for v in eqn.invars])
                frame.write(eqn.outvars, out)
            return [value(v) for v in jaxpr.outvars]

    def eval_eqn(self, jaxpr: Jaxpr, k: int, args: Sequence[Value]) -> list[Any]:
        """Evaluates the `k`-th equation: by its rule if it involves refs, otherwise as it is."""
        eqn = jaxpr.eqns[k]
        # Where lanes diverge, only those that reach a callback make the call.
        calls_host = self.lanes is not None and _calls_host(eqn)
        must_discharge = calls_host or self._may_touch_later(eqn) or self._touches_in_rules(eqn)
        rule = rule_of(eqn, args, must_discharge)
        if rule is not None:
            return rule(self, eqn, args)
        if self.differentiated or self.lanes is not None:
            eqn = late(jaxpr, k, self.bindings(), self._memo)
        return _jax.bind_eqn(eqn, args)

    def _may_touch_later(self, eqn: Eqn) -> bool:
        """Whether a user's backward rule may run later, in lanes: it needs the mask from here."""
        return self.lanes is not None and (
            _jax.is_custom_vjp(eqn)
            or any(has_custom_vjp(inner.jaxpr) for inner in _jax.jaxprs_in(eqn.params))
        )

    def _touches_in_rules(self, eqn: Eqn) -> bool:
        return self.differentiated and any(True for _ in derivative_rules.touched_by_rules(eqn))

    def is_used(self, var: Atom) -> bool:
        """Whether anything uses `var`, an output of the equation under way."""
        return var in touch_analysis.used(self._frames[-1].jaxpr)

    def cell_of(self, ref: RefLike) -> Cell:
        """The cell of a concrete ref."""
        if id(ref) not in self.cells:
            raise untouched(describe(ref))
        return self.cells[id(ref)]

    def memoised(self, key: Any, alive: Any, make: Callable[[], Any]) -> Any:
        """`make()`, once for each key in this body. `alive`, whose id is in the key, is kept."""
        if key not in self._memo:
            self._memo[key] = (alive, make())
        return self._memo[key][1]

    def scope(
        self, *calls: tuple[ClosedJaxpr, Sequence[Any]], rules_of: Eqn | None = None
    ) -> Scope:
        """Prepares inner jaxprs, each with its operands, to be run as pure functions.

        `rules_of` is their equation, if it has a user's derivative rules.
        """
        return Scope(self, calls, rules_of)

    @contextmanager
    def where(self, flag: Value) -> Iterator[Lanes]:
        """A context in which only the lanes for which `flag` is true take part."""
        lanes = self.lanes
        assert lanes is not None
        self.lanes = lanes.where(flag)
        try:
            yield self.lanes
        finally:
            self.lanes = lanes

    def bindings(self) -> Bindings:
        """The values and cells of variables and refs here."""
        frames = tuple(frame.known for frame in reversed(self._frames))
        return Bindings(frames, self.cells, self._around, self._inside)

    def resolve(self, const: Value) -> Any:
        """The value or cell here of a constant of a rule, which JAX has traced later."""
        found = self.bindings().find(const)
        return self.cell_of(found) if isinstance(found, _jax.NativeRef) else found

    @contextmanager
    def _frame(self, frame: Frame) -> Iterator[None]:
        self._frames.append(frame)
        try:
            yield
        finally:
            self._frames.pop()
            if not self._frames:
                # The memo holds tracers, through functions that hold this context.
                self._memo.clear()


def _calls_host(eqn: Eqn) -> bool:
    return eqn.primitive is host_callback_p or any(
        _jax.any_equation(inner, lambda e: e.primitive is host_callback_p)
        for inner in _jax.jaxprs_in(eqn.params)
    )


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
        least = Touch.NONE if rules_of is None else Touch.HELD
        touched: list[tuple[Cell, Touch]] = []
        self.portable = True
        for closed, args in calls:
            # A backward rule touches the refs of this particular call.
            self.portable &= not has_custom_vjp(closed.jaxpr)
            if not ctx.differentiated:
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
                    self.portable = False
                    # One without a cell here is touched only by a rule, which JAX may never trace.
                    if isinstance(cell := self.bindings.find(const), Cell):
                        touched.append((cell, kind))
        sums = {id(cell.ref): cell.ref for cell, _ in touched if isinstance(cell, Accumulator)}
        self.sums = list(sums.values())
        # The places of rows that are no state themselves are operands of a body: a derivative rule,
        # which JAX traces later, can't close over them.
        places: dict[int, tuple[Cell, tuple[Value, ...]]] = {
            id(cell): (cell, cell.prefix) for cell, _ in touched if isinstance(cell, Accumulator)
        }
        touched = [(cell, kind) for cell, kind in touched if not isinstance(cell, Accumulator)]
        self.portable &= not self.sums
        # Two rows of one ref may be the same row, or the ref itself may be touched, too. Then the
        # whole ref is state, and its rows are read and written within it.
        sharing: dict[int, set[int]] = {}
        for cell, _ in touched:
            sharing.setdefault(id(root(cell)), set()).add(id(cell))
        kinds: dict[int, tuple[Cell, Touch]] = {}
        for cell, kind in touched:
            if isinstance(cell, Row) and len(sharing[id(root(cell))]) > 1:
                self.portable = False
                while isinstance(cell, Row):
                    places[id(cell)] = (cell, (cell.index,))
                    cell = cell.whole
            kinds[id(cell)] = (cell, kinds.get(id(cell), (cell, Touch.NONE))[1] | kind)
        self.places = list(places.values())
        self._indices = [i for _, indices in self.places for i in indices]
        self._held = {key for key, (_, kind) in kinds.items() if kind == Touch.HELD}
        kinds = {
            key: (c, kind.settled(Touch.NONE if root(c).is_idle else ctx.held))
            for key, (c, kind) in kinds.items()
        }
        self.written = [c for c, kind in kinds.values() if kind.changes]
        self.read = [c for c, kind in kinds.values() if kind == Touch.READ]
        self._idle = [c for c, kind in kinds.values() if kind == Touch.NONE]

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
    ) -> InnerScope:
        """A body, in which the cells hold these values, and `sums` replace `self.sums`.

        Nothing is accumulated into a ref that `sums` has None for, nor, with `is_silent`, into any.
        """
        return InnerScope(self._ctx, self, state, constants, sums, is_silent)

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
    ):
        inner_sums = scope.sums if sums is None else sums
        sum_of = {id(r): s for r, s in zip(scope.sums, inner_sums, strict=True)}
        only_read = "which the primal function only reads: a custom rule may not write it either"

        def inner(outer: Cell, value: Value, sealed: str | None = None) -> Cell:
            cell = Cell(value, outer.origin, sealed, outer.target)
            cell.method, cell.number = outer.method, outer.number
            cell.changes = outer.changes or sealed is None
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
        self.ctx = Context(ctx, scope.bindings, counterparts.find)
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
        return self.inner_of[id(outer)]

    def find(self, outer: Cell) -> Cell | None:
        """`cell`, or None if the scope doesn't have it."""
        try:
            return self.cell(outer)
        except KeyError:
            return None
