"""Calls outside of `jit`: at top level as transactions, op by op as operations.

JAX traces the body of a loop once, and again only for other arguments or if it is another function.
So it is here: what was traced, and compiled, is kept for as long as the user's functions live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jax

from refs import _jax
from refs._discharge.op_by_op import OpByOp
from refs._inplace.in_place import in_place
from refs._tracing.trace import PartlyKnown, ref_type
from refs._tracing.weak_memo import WeakMemo
from refs._transactions.signature import type_of
from refs._transactions.transaction import Transaction, links_of
from refs._types import ClosedJaxpr, Primitive, RefLike, Value


def in_transaction(
    fun: Callable[..., Any],
    refs: Sequence[RefLike],
    arrays: Sequence[Value],
    functions: Sequence[Any] = (),
    static: Any = None,
) -> Any:
    """`fun(refs, arrays)`: at top level as a transaction, inside a trace as a part of that one.

    Only the refs and arrays given are traced. What else `fun` uses stays as it is, so Python can
    still look at it. With `functions`, those of the user's that `fun` calls, it is traced once for
    each kind of arguments; then `static` says on what else it depends.
    """
    trace, is_outside = _jax.current_trace(), _jax.at_top_level()
    if not (is_outside or isinstance(trace, OpByOp)):
        return fun(refs, arrays)
    traced_call = _traced_call(fun, refs, arrays, functions, static) if functions else None
    if traced_call is not None and not any(k is not None for k in traced_call.links(refs)):
        return (
            traced_call.run(refs, arrays) if is_outside else traced_call.run_in(trace, refs, arrays)
        )
    return run(fun, refs, arrays) if is_outside else fun(refs, arrays)


def run(fun: Callable[..., Any], refs: Sequence[RefLike], arrays: Sequence[Value]) -> Any:
    """`fun(refs, arrays)` as one transaction, run op by op; compiled if there are loops in it.

    Whatever is raised, while it is traced or while it runs, no ref has changed.
    """
    # Closed over, not arguments: so a ref that `fun` closes over besides is seen to be the same.
    return _TracedCall(lambda _, arrays: fun(refs, arrays), [], arrays).run([], arrays)


class _TracedCall:
    """A function that was traced for calls with arguments of the same kinds."""

    def __init__(
        self,
        fun: Callable[..., Any],
        refs: Sequence[RefLike],
        arrays: Sequence[Value],
        comes_again: bool = False,
    ):
        def known(refs: Sequence[RefLike], arrays: Sequence[Value]) -> Any:
            return PartlyKnown(fun(refs, arrays))

        self._t = t = Transaction.of(known, refs, arrays, lambda *given: (given, {}))
        # XLA compiles loops and branches in any case; on their own they wouldn't be in place.
        is_compiled = _holds_loops(t.traced.jaxpr) or (
            comes_again and _jax.any_equation(t.traced.jaxpr, lambda e: e.primitive is _jax.cond_p)
        )
        self._call = self._call_undonated = t.run
        if is_compiled:
            self._call = jax.jit(in_place(t.run), donate_argnums=0)
            # Donating nothing, for debugging: JAX then runs the program a second time.
            self._call_undonated = jax.jit(in_place(t.run))

    @property
    def is_lasting(self) -> bool:
        """Whether it closes over nothing of a trace, which ends."""
        closed_over = (*self._t.program.refs, *self._t.program.arrays)
        return not any(isinstance(x, _jax.Tracer) for x in closed_over)

    def links(self, refs: Sequence[RefLike]) -> tuple[int | None, ...]:
        """Which of the refs that it closes over those given are."""
        return links_of(refs, self._t.program.refs)

    def run(self, refs: Sequence[RefLike], arrays: Sequence[Value]) -> Any:
        """A call as a transaction: at top level, or in a trace that may be differentiated."""
        # What it closes over are operands, and no part of the program that is compiled.
        given: dict[str, Any] = {"captured": self._t.program.arrays}
        if _jax.is_staging():
            given["targets"] = refs
        call = self._call_undonated if _jax.looks_for_nans() else self._call
        outputs, made = self._t.update(
            refs, lambda state, constants: call(state, constants, arrays, **given)
        )
        return self._t.result(outputs, made, refs)

    def run_in(self, trace: OpByOp, refs: Sequence[RefLike], arrays: Sequence[Value]) -> Any:
        """A call as an operation."""
        t = self._t
        out = trace.call(t.traced.jaxpr, [*refs, *arrays])
        n = len(out) - len(t.new_origins)
        return t.result(out[:n], out[n:], refs)


def _traced_call(
    fun: Callable[..., Any],
    refs: Sequence[RefLike],
    arrays: Sequence[Value],
    functions: Sequence[Any],
    static: Any,
) -> _TracedCall | None:
    """What was traced for such a call, or is now; None where that couldn't be found again."""
    try:
        found = _known.of(functions)
        key = (static, _jax.trace_context(), *map(ref_type, refs), *map(type_of, arrays))
        if key in found:
            return found[key]
    except (TypeError, OverflowError):  # no hash, no weak reference, no array
        return None
    traced_call = _TracedCall(fun, refs, arrays, comes_again=True)
    if traced_call.is_lasting:
        found[key] = traced_call
    return traced_call


_known = WeakMemo()


def has_loops(primitive: Primitive, inner: Iterable[Any]) -> bool:
    """Whether an operation is a loop, or one is in the jaxprs that it runs."""
    return primitive in _jax.loop_primitives or any(map(_holds_loops, inner))


def _holds_loops(closed: ClosedJaxpr) -> bool:
    jaxpr = closed.jaxpr
    if jaxpr not in _with_loops:
        _with_loops[jaxpr] = any(
            has_loops(eqn.primitive, _jax.jaxprs_in(eqn.params)) for eqn in jaxpr.eqns
        )
    return _with_loops[jaxpr]


_with_loops: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
