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
from refs._discharge.rule_closures import Bindings, untouched
from refs._discharge.scope import Scope
from refs._handles.access import describe
from refs._tracing import derivative_rules, touch_analysis
from refs._tracing.touch_analysis import Rules
from refs._types import Atom, ClosedJaxpr, Eqn, Jaxpr, Value


class Context:
    """One interpretation, or one body within it.

    Attributes:
      cells: the cell of each concrete ref, by the ref's id.
      differentiated: whether the results may be differentiated.
      keeps_reads: whether `checkpoint` stores the values read from refs instead of the refs.
      repeats: whether a backward pass would evaluate this again.
      lanes: the lanes of `refs.vmap` that this is evaluated in, or None.
      rules: what derivative rules may do to a ref that their function is given and doesn't touch.
    """

    def __init__(
        self,
        outer: Context | None = None,
        around: Bindings | None = None,
        inside: Callable[[Cell], Cell] = lambda cell: cell,
        differentiated: bool = False,
        lanes: Lanes | None = None,
        rules: Rules = Rules.NEVER_RUN,
        memo: dict[Any, Any] | None = None,
    ):
        """`memo`: for `memoised`, if it outlives this interpretation."""
        self.differentiated = differentiated if outer is None else outer.differentiated
        self.keeps_reads = outer is not None and outer.keeps_reads
        self.repeats = outer is not None and outer.repeats
        self.lanes = lanes
        self.rules = rules if outer is None else outer.rules
        # The jaxprs under way, each with the values and cells of its variables.
        self._frames: list[tuple[Jaxpr, dict[Any, Any]]] = []
        self.cells: dict[int, Cell] = {}
        self._memo: dict[Any, Any] = {} if memo is None else memo
        self._is_memo_own = memo is None
        self._around, self._inside = around, inside

    def eval(self, closed: ClosedJaxpr, args: Sequence[Value]) -> list[Any]:
        """Interprets a closed jaxpr here. The arguments and results are values and cells."""
        return self.eval_open(closed.jaxpr, [*map(self.resolve, closed.consts)], args)

    def eval_open(self, jaxpr: Jaxpr, consts: Sequence[Value], args: Sequence[Value]) -> list[Any]:
        """`eval` of a jaxpr whose constants are given, as values and cells."""
        # JAX 0.12 has the variables of constants that aren't attached among the inputs.
        variables = (*jaxpr.constvars, *jaxpr.invars)
        env: dict[Any, Any] = dict(zip(variables, (*consts, *args), strict=True))

        def value(atom: Atom) -> Any:
            return atom.val if isinstance(atom, _jax.Literal) else env[atom]

        with self._frame(jaxpr, env):
            for eqn in jaxpr.eqns:
                with _jax.source_of(eqn), eqn.ctx.manager:
                    out = self.eval_eqn(eqn, [value(v) for v in eqn.invars])
                env.update(zip(eqn.outvars, out, strict=True))
            return [value(v) for v in jaxpr.outvars]

    def eval_eqn(self, eqn: Eqn, args: Sequence[Value]) -> list[Any]:
        """Evaluates an equation: by its rule if it involves refs, otherwise as it is."""
        rule = rule_of(eqn, args, self._must_discharge(eqn))
        if rule is not None:
            return rule(self, eqn, args)
        if self.differentiated:
            refuse_hidden(eqn)
        return _jax.bind_eqn(eqn, args)

    def _must_discharge(self, eqn: Eqn) -> bool:
        """Whether an equation is to be discharged even if it involves no refs."""
        in_lanes = self.lanes is not None
        return (
            # Where lanes diverge, only those that reach a callback make the call.
            (in_lanes and _calls_host(eqn))
            or (self.differentiated and bool(derivative_rules.touched_by_rules(eqn)))
            # What a rule that runs later closes over is looked up here, with the mask of lanes.
            or ((in_lanes or self.differentiated) and derivative_rules.is_open(eqn))
        )

    def is_used(self, eqn: Eqn) -> bool:
        """Whether anything uses the first output of the equation under way."""
        return eqn.outvars[0] in touch_analysis.used(self._frames[-1][0])

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

    @contextmanager
    def outside_lanes(self) -> Iterator[None]:
        """As if what is evaluated weren't in lanes: it is one lane, which JAX batches."""
        lanes, self.lanes = self.lanes, None
        try:
            yield
        finally:
            self.lanes = lanes

    def bindings(self) -> Bindings:
        """The values and cells of variables and refs here."""
        frames = tuple(env for _, env in reversed(self._frames))
        return Bindings(frames, self.cells, self._around, self._inside)

    def resolve(self, const: Value) -> Any:
        """The value or cell here of a constant of a rule, which JAX has traced later."""
        found = self.bindings().find(const)
        if isinstance(found, _jax.NativeRef):  # It has no cell here or further out.
            raise untouched(describe(found))
        return found

    @contextmanager
    def _frame(self, jaxpr: Jaxpr, env: dict[Any, Any]) -> Iterator[None]:
        self._frames.append((jaxpr, env))
        try:
            yield
        finally:
            self._frames.pop()
            # Tracers of JAX's batching or differentiation are useless when that has ended, and may
            # hold the rules bound so far, which hold the values here.
            if not _jax.is_staging():
                trace = _jax.current_trace()
                for var, x in [*env.items()]:
                    if isinstance(x, _jax.Tracer) and _jax.trace_of(x) is trace:
                        del env[var]
            if not self._frames and self._is_memo_own:
                # The memo holds tracers, through functions that hold this context.
                self._memo.clear()


def _calls_host(eqn: Eqn) -> bool:
    return eqn.primitive is host_callback_p or any(
        _has_host_callback(inner.jaxpr) for inner in _jax.jaxprs_in(eqn.params)
    )


_has_host_callback = _jax.anywhere(lambda e: e.primitive is host_callback_p)
