"""Discharge without a jaxpr: a trace in which refs are cells, and all else is as it is outside.

A Python function that runs in it gets the values that it would get without refs: concrete ones, or
tracers of the transformation under way. So it may inspect, print and branch on them.

An operation that touches a ref is discharged by the same rules as an equation (`Context`); any
other is bound in the trace around this one, custom functions too (`old_custom_calls.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax.export import is_symbolic_dim

from refs import _jax
from refs._discharge.cells import Cell
from refs._discharge.interpreter import Context
from refs._discharge.old_custom_calls import OldCustomCalls
from refs._discharge.operation_cache import call, made_of
from refs._discharge.program import Program
from refs._discharge.ref_tracer import RefTracer, TouchedError
from refs._discharge.registry import rule_for
from refs._discharge.rule_choice import (
    Operation,
    only_computes,
    refuse_hidden,
    runs_over_refs,
    takes_or_makes_refs,
)
from refs._handles import access
from refs._handles.predicates import is_ref
from refs._handles.ref_type import RefType
from refs._origin import Origin, origin_of
from refs._tracing import touch_analysis
from refs._tracing.derivative_rules import has_custom_rules, has_custom_vjp, touched_by_rules
from refs._tracing.facts import can_fail, can_fail_itself
from refs._tracing.names import one_name
from refs._tracing.trace import ref_type, rules_where
from refs._types import Atom, Aval, ClosedJaxpr, Primitive, RefLike, Value
from refs.errors import RefEscapeError


class OpByOp(OldCustomCalls):
    """Runs a function's operations one by one.

    Attributes:
      parent: the trace that operations without refs are bound in.
      outside: the trace around the transformation, to which refs from outside belong.
      is_differentiated: whether `parent` differentiates.
      is_guard: whether a ref from outside may not be touched.
      is_staged: whether operations are only recorded, so that values aren't known.
      can_fail: whether an operation so far may fail when it runs.
      has_custom_vjp: whether a function so far has a user's backward rule.
      is_over: whether the function has ended, and with it the refs that it has made.
    """

    def __init__(
        self,
        parent: Any,
        outside: _jax.Trace,
        is_differentiated: bool = False,
        is_guard: bool = False,
    ):
        super().__init__()
        self.parent, self.outside = parent, outside
        self.is_differentiated, self.is_guard = is_differentiated, is_guard
        self.is_staged = is_staged(outside)
        self.requires_low = parent.requires_low
        self.can_fail = self.has_custom_vjp = self.is_over = False
        self._opened: dict[int, Opened] = {}
        self._memo: dict[Any, Any] = {}

    # -- refs -----------------------------------------------------------------------------------

    def open(self, ref: RefLike, value: Value) -> None:
        """Makes the cell of a ref from outside; `value` is the ref's value before the function."""
        cell = Cell(value, origin_of(jax.typeof(ref)), target=ref)
        self._opened[id(ref)] = Opened(ref, cell, value)

    def make(self, value: Value, origin: Origin) -> RefTracer:
        """A new ref."""
        cell = Cell(None, origin)
        cell.made_here = True
        cell.write(value)
        inner = _jax.AbstractRef(jax.typeof(cell.read()))
        return RefTracer(self, RefType.of(inner, origin), cell)

    def cell_of(self, ref: RefLike) -> Cell:
        """The cell of a ref, which is made when a ref from outside is touched first."""
        return self._cell_of(one_name(ref))

    def _cell_of(self, ref: RefLike) -> Cell:
        if self.has_made(ref):
            ref.cell.origin = origin_of(ref.aval)  # The type gets it after JAX has made the ref.
            return ref.cell
        if self.is_guard:
            raise TouchedError(ref)
        if isinstance(ref, RefTracer) and (of := _jax.trace_of(ref)).is_over:
            if not of.is_differentiated:
                raise access.escaped(ref, "use")
            raise RefEscapeError(
                f"use of {access.describe(ref)}, which was made inside a differentiated function, "
                "when that has ended: a backward rule, which runs later, can't touch it. Use a ref "
                "made outside"
            )
        return self._outer_cell(ref)

    def _outer_cell(self, ref: RefLike) -> Cell:
        if id(ref) not in self._opened:
            self.open(ref, self.read(ref))
        return self._opened[id(ref)].cell

    def read(self, ref: RefLike) -> Value:
        """The current value of a ref from outside."""
        with _jax.set_current_trace(self.outside):
            return access.get(ref)

    def has_made(self, x: Value) -> bool:
        """Whether `x` is a ref that was made in this trace."""
        return isinstance(x, RefTracer) and _jax.trace_of(x) is self

    @property
    def opened(self) -> list[RefLike]:
        """The refs from outside that have been touched."""
        return [x.ref for x in self._opened.values()]

    @property
    def written(self) -> tuple[list[RefLike], list[Value]]:
        """The refs from outside that have been written, and the current values of their cells."""
        changed = [x for x in self._opened.values() if x.cell.read() is not x.before]
        return [x.ref for x in changed], [x.cell.read() for x in changed]

    def end(self) -> None:
        """Ends the function. JAX may keep this trace, in rules traced inside; the refs must go."""
        self.is_over = True
        self._opened.clear()
        self._memo.clear()

    # -- the interface of JAX's traces ------------------------------------------------------------

    def process_primitive(
        self, primitive: Primitive, operands: Sequence[Value], params: dict[str, Any], /
    ) -> Any:
        if primitive in _ACCESSES and is_ref(operands[0]):
            return self.access(primitive, operands, params)
        # Most operations of `jax.numpy` are such calls, with many parameters.
        is_call = primitive is _jax.jit_p
        inner = [_jax.jit_params(params).jaxpr] if is_call else _jax.jaxprs_in(params)
        operation: Any = Operation(primitive, params)
        has_refs = takes_or_makes_refs(operation, operands)
        is_custom = _jax.has_rules(operation)
        if not (has_refs or is_custom) and all(map(only_computes, inner)):
            self.can_fail = self.can_fail or can_fail_itself(primitive)
            return self.bind(primitive, operands, params, inner)
        self._note(primitive, inner)
        self.has_custom_vjp |= _jax.is_custom_vjp(operation)
        # JAX's own derivatives leave tracers in jaxprs, where they aren't operands.
        is_open = self.is_staged and touch_analysis.close_over_values_of(self.parent, inner)
        concerns_us = has_refs or is_open or runs_over_refs(primitive, inner)
        may_run_rules = self.is_differentiated and (
            is_custom or any(has_custom_rules(closed.jaxpr) for closed in inner)
        )
        if not concerns_us and not may_run_rules:
            return self.bind(primitive, operands, params, inner)
        jaxpr = _jax.as_jaxpr(primitive, [_type_of(x) for x in operands], params)
        if not concerns_us and not touched_by_rules(*jaxpr.eqns):
            return self.bind(primitive, operands, params, inner)
        made = None if self.is_staged or is_custom else made_of(primitive, params)
        out = self._discharged(jaxpr, operands, made)
        return out if primitive.multiple_results else out[0]

    def call(self, closed: ClosedJaxpr, operands: Sequence[Value]) -> list[Any]:
        """The outputs, for values and refs, of a jaxpr that may be evaluated again."""
        self._note(_jax.jit_p, [closed])
        made = None if self.is_staged else made_of(_jax.jit_p, {"jaxpr": closed})
        return self._discharged(closed, operands, made)

    def _note(self, primitive: Primitive, inner: Sequence[ClosedJaxpr]) -> None:
        self.can_fail |= can_fail_itself(primitive) or any(map(can_fail, inner))
        self.has_custom_vjp |= any(has_custom_vjp(closed.jaxpr) for closed in inner)

    def process_shard_map(
        self, primitive: Primitive, fun: Any, operands: Sequence[Value], /, **params: Any
    ) -> Any:
        if any(map(is_ref, operands)):
            return self.traced(primitive, (fun,), operands, params)
        try:
            with _jax.set_current_trace(self.parent):
                return primitive.bind(*operands, subfuns=(self.guarded(fun),), **params)
        except TouchedError as touched:
            raise RefEscapeError(
                f"{access.describe(touched.args[0])} is touched inside of shard_map, which "
                "doesn't take refs from outside: pass it as an argument to `refs.shard_map`. A "
                "backward rule may return what it writes as a cotangent, or apply shard_map inside"
            ) from None

    def stage_value(self, value: Value) -> Value:
        with _jax.set_current_trace(self.parent):
            return self.parent.stage_value(value)

    def cur_qdd(self, x: Value) -> Any:  # pragma: no cover, JAX before 0.12
        with _jax.set_current_trace(self.parent):
            return self.parent.cur_qdd(x)

    def bind(
        self,
        primitive: Primitive,
        operands: Sequence[Value],
        params: dict[str, Any],
        inner: Sequence[ClosedJaxpr],
    ) -> Any:
        """Binds a primitive in `parent`. Its operands and `inner`, its jaxprs, have no refs."""
        if self.is_differentiated:
            refuse_hidden(Operation(primitive, params))
        with _jax.set_current_trace(self.parent):
            try:
                return self.parent.process_primitive(primitive, operands, params)
            except _jax.NaNFound as error:
                _jax.raise_about_nan(error, inner, operands)

    # -- discharge --------------------------------------------------------------------------------

    def access(
        self,
        primitive: Primitive,
        operands: Sequence[Value],
        params: dict[str, Any],
        is_used: bool = True,
    ) -> Any:
        """A read, a write or an addition by its rule, without a jaxpr.

        `is_used` says whether anybody uses the result, a write's old value for instance.
        """
        cell = self.cell_of(operands[0])
        with _jax.set_current_trace(self.parent):
            rest = [_jax.as_array(x) if is_symbolic_dim(x) else x for x in operands[1:]]
            operation: Any = Operation(primitive, params, is_used)
            out = rule_for(primitive)(_AS_IS, operation, [cell, *rest])  # type: ignore[misc]
        return out if primitive.multiple_results else out[0]

    def _discharged(
        self, jaxpr: ClosedJaxpr, operands: Sequence[Value], made: dict[Any, Any] | None = None
    ) -> list[Any]:
        """The outputs of a jaxpr, for values and refs. `made` caches its compiled forms."""
        rules = rules_where(self.is_differentiated)
        program = Program.of(jaxpr, self.is_differentiated and made is None)
        args = [self.cell_of(x) if is_ref(x) else x for x in operands]
        closed_over = [*map(self.cell_of, program.refs)]
        n = len(closed_over)

        memo = self._memo if self.is_staged else None

        def context() -> Context:
            return Context(differentiated=self.is_differentiated, rules=rules, memo=memo)

        def evaluate(context: Context, given: Sequence[Any]) -> list[Any]:
            # A derivative rule may close over a ref that its function takes as an argument.
            refs = zip(operands, given[n:], strict=True)
            context.cells = {id(x): cell for x, cell in refs if is_ref(x)}
            return program.run(context, given[:n], given[n:])

        with _jax.set_current_trace(self.parent):
            if made is None:
                out = evaluate(context(), [*closed_over, *args])
            else:
                out = call(made, evaluate, context, [*closed_over, *args])
        names = {id(a): x for a, x in zip(args, operands, strict=True) if isinstance(a, Cell)}

        def outside(x: Value, var: Atom) -> Any:
            if not isinstance(x, Cell):
                return x
            return names[id(x)] if id(x) in names else RefTracer(self, var.aval, x)

        return [outside(x, v) for x, v in zip(out, jaxpr.jaxpr.outvars, strict=True)]

    def guarded(self, fun: Any) -> Callable[..., Any]:
        """`fun`, which runs until it touches a ref from outside."""

        def run(*args: Any) -> Any:
            with guarding():
                return _jax.call_wrapped(fun, args)

        return _jax.rewrap(fun, run)

    def traced(
        self,
        primitive: Primitive,
        funs: Sequence[Any],
        operands: Sequence[Value],
        params: dict[str, Any],
    ) -> Any:
        """Binds a primitive of functions by tracing it to an equation, which is discharged."""
        types = [_jax.AbstractArgument(_type_of(x)) for x in operands]
        with _jax.set_current_trace(self.parent):
            jaxpr, as_given = _jax.trace_functions(primitive, funs, types, params)
        return as_given(self._discharged(jaxpr, operands))


class _AsIs(Context):
    """The context of operations that are run one by one."""

    def is_used(self, eqn: Any) -> bool:
        return eqn.is_used


_AS_IS = _AsIs()
_ACCESSES = frozenset([_jax.get_p, _jax.swap_p, _jax.addupdate_p])


class Opened:
    """A ref from outside, its cell, and the value that it had before."""

    __slots__ = ("before", "cell", "ref")

    def __init__(self, ref: RefLike, cell: Cell, before: Value):
        self.ref, self.cell, self.before = ref, cell, before


def is_staged(trace: _jax.Trace) -> bool:
    """Whether operations in a trace are only recorded, so that values aren't known."""
    return trace.is_staged if isinstance(trace, OpByOp) else _jax.is_staging_trace(trace)


def _type_of(x: Value) -> Aval:
    return ref_type(x) if is_ref(x) else jax.typeof(x)


@contextmanager
def guarding() -> Iterator[OpByOp]:
    """A context in which touching a ref from outside raises a `TouchedError`."""
    trace = _jax.current_trace()
    guard = OpByOp(trace, trace, is_guard=True)
    with _jax.set_current_trace(guard):
        yield guard
