"""The interpreter: evaluates an effectful jaxpr with each ref a mutable cell.

A variable of array type has a value, written once; a variable of ref type has a `Cell`, whose value
changes. Two variables may share a cell, so aliases need no special case. Equations without refs are
evaluated as they are; the others by the rule that is registered for their primitive.

Evaluated on tracers, a program is discharged: the trace records a pure one. Rules for loops,
branches and calls go through `Context.scope` (`scope.py`), which turns an inner jaxpr into a pure
function of arrays and state: state in, new state out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from refs import _jax
from refs._callbacks.primitives import host_callback_p
from refs._discharge.cells import Cell
from refs._discharge.lanes import Lanes
from refs._discharge.rule_choice import refuse_hidden, rule_of
from refs._discharge.rule_closures import Bindings, Frame, late, untouched
from refs._discharge.scope import Scope
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
        inside: Callable[[Cell], Cell] = lambda cell: cell,
        differentiated: bool = False,
        lanes: Lanes | None = None,
        held: Touch = Touch.NONE,
        memo: dict[Any, Any] | None = None,
    ):
        """`memo`: for `memoised`, if it outlives this interpretation."""
        self.differentiated = differentiated if outer is None else outer.differentiated
        self.keeps_reads = outer is not None and outer.keeps_reads
        self.repeats = outer is not None and outer.repeats
        self.lanes = lanes
        self.held = held if outer is None else outer.held
        self._frames: list[Frame] = []
        self.cells: dict[int, Cell] = {}
        self._memo: dict[Any, Any] = {} if memo is None else memo
        self._is_memo_own = memo is None
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
                with _jax.source_of(eqn), eqn.ctx.manager:
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
        if self.differentiated:
            refuse_hidden(eqn)
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

    def is_used(self, eqn: Eqn) -> bool:
        """Whether anything uses the first output of the equation under way."""
        return eqn.outvars[0] in touch_analysis.used(self._frames[-1].jaxpr)

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

    def inner(self, around: Bindings, inside: Callable[[Cell], Cell]) -> Context:
        """The context of a body, with the bindings around it: `inside` finds a cell of its own."""
        return Context(self, around, inside)

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
            if not self._frames and self._is_memo_own:
                # The memo holds tracers, through functions that hold this context.
                self._memo.clear()


def _calls_host(eqn: Eqn) -> bool:
    return eqn.primitive is host_callback_p or any(
        _has_host_callback(inner.jaxpr) for inner in _jax.jaxprs_in(eqn.params)
    )


_has_host_callback = _jax.anywhere(lambda e: e.primitive is host_callback_p)
