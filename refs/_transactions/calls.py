"""Calls outside of `jit`: at top level as transactions, in an op-by-op trace as operations.

JAX traces the body of a loop once, and again only for arguments of other types or if it is another
function. The same holds here: traces and compiled programs are cached while the user's functions
live.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jax

from refs import _jax
from refs._discharge.op_by_op import OpByOp
from refs._handles.resharding import go_along
from refs._inplace.flatten import without_rules
from refs._inplace.in_place import in_place
from refs._tracing.facts import can_fail
from refs._tracing.form import form_of
from refs._tracing.trace import PartlyKnown, ref_type
from refs._tracing.weak_memo import WeakMemo
from refs._transactions.signature import are_arrays, type_of
from refs._transactions.transaction import Transaction, links_of
from refs._types import ClosedJaxpr, Eqn, Jaxpr, Primitive, RefLike, Value


def in_transaction(
    fun: Callable[..., Any],
    refs: Sequence[RefLike],
    arrays: Sequence[Value],
    functions: Sequence[object] = (),
    static: Any = None,
) -> Any:
    """`fun(refs, arrays)`: at top level as a transaction, inside a trace as a part of that trace.

    Only the given refs and arrays are traced. Other values that `fun` uses stay as they are, so
    Python can still inspect them. If the user's `functions` that `fun` calls are given, `fun` is
    traced once for arguments of the same types; then `static` is all else that the trace depends
    on.
    """
    trace, is_outside = _jax.current_trace(), _jax.at_top_level()
    is_by_itself = is_outside or (isinstance(trace, OpByOp) and not trace.is_staged)
    # The function of JAX's that `fun` calls raises its own error about what is no array.
    if not is_by_itself or not are_arrays(arrays):
        return fun(refs, arrays)
    traced_call = _traced_call(fun, refs, arrays, functions, static) if functions else None
    if traced_call is not None and not any(k is not None for k in traced_call.links(refs)):
        return (
            traced_call.run(refs, arrays) if is_outside else traced_call.run_in(trace, refs, arrays)
        )
    return run(fun, refs, arrays) if is_outside else fun(refs, arrays)


def run(fun: Callable[..., Any], refs: Sequence[RefLike], arrays: Sequence[Value]) -> Any:
    """`fun(refs, arrays)` as one transaction, run op by op; compiled if there are loops in it.

    If an error is raised, while it is traced or while it runs, no ref has changed.
    """
    # Closed over, not arguments: so a ref that `fun` closes over, too, is seen to be the same.
    traced_call = _TracedCall(lambda _, arrays: fun(refs, arrays), [], arrays)
    if _jax.at_top_level():
        traced_call.share()
    return traced_call.run([], arrays)


class _TracedCall:
    """A function that was traced for calls with arguments of the same types."""

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
        # JAX compiles loops and branches in any case; each by itself wouldn't be in place. And the
        # failure of a callback that is run by itself would be found too late, or not at all.
        self._is_compiled = (
            _holds_loops(t.traced.jaxpr)
            or can_fail(t.traced.jaxpr)
            or (comes_again and _jax.any_equation(t.traced.jaxpr, _is_compiled))
        )
        self._call = self._call_undonated = t.run
        if self._is_compiled:
            self._call = jax.jit(in_place(t.run), donate_argnums=0)
            # Donates nothing: JAX, when it looks for NaNs, runs the program a second time.
            self._call_undonated = jax.jit(in_place(t.run))

    def share(self) -> None:
        """Lets the calls of equal programs share what is compiled.

        The user's function, which runs in each call, mostly does the same. At the first of these
        calls nothing is kept unless it is compiled: there may be no second one.
        """
        t = self._t
        jaxpr = _jax.with_own_constants(t.traced.jaxpr)
        if jaxpr is not t.traced.jaxpr:
            t = Transaction(t.traced._replace(jaxpr=jaxpr), [], t.rules)
        try:
            form = form_of(jaxpr), t.program.const_refs, _jax.trace_context()
            shared = _shared(self._is_compiled, form)
        except TypeError:
            return
        if self._is_compiled or shared.comes_again:
            self._t, self._call = t, functools.partial(shared, t.run)
        shared.comes_again = True

    @property
    def is_lasting(self) -> bool:
        """Whether it serves other refs, and closes over no tracers, whose trace ends."""
        if self._t.has_other_names:
            return False
        closed_over = (*self._t.program.refs, *self._t.program.arrays)
        return not any(isinstance(x, _jax.Tracer) for x in closed_over)

    def links(self, refs: Sequence[RefLike]) -> tuple[int | None, ...]:
        """For each of the given refs: which closed-over ref it is, or None."""
        return links_of(refs, self._t.program.refs)

    def run(self, refs: Sequence[RefLike], arrays: Sequence[Value]) -> Any:
        """A call as a transaction: at top level, or in a trace that may be differentiated."""
        t = self._t
        go_along(t.refs([*t.written, *t.read], refs), [*arrays, *t.program.arrays, *t.places])
        # Closed-over arrays are operands, not constants of the program that is compiled.
        given: dict[str, Any] = {"captured": t.program.arrays}
        if _jax.is_staging():
            given["targets"] = refs
        call = self._call_undonated if _jax.looks_for_nans() else self._call
        outputs, made = t.update(
            refs, lambda state, constants: call(state, constants, arrays, **given)
        )
        return t.result(outputs, made, refs)

    def run_in(self, trace: OpByOp, refs: Sequence[RefLike], arrays: Sequence[Value]) -> Any:
        """A call as an operation of an op-by-op trace."""
        t = self._t
        out = trace.call(t.traced.jaxpr, [*refs, *arrays])
        n = len(out) - len(t.new_origins)
        return t.result(out[:n], out[n:], refs)


class _Shared:
    """The pure program of transactions of one form, which holds no refs.

    Where it isn't compiled as a whole, its calls of compiled functions find these again.
    """

    def __init__(self, is_compiled: bool):
        self._is_compiled, self.comes_again = is_compiled, False
        self._program: Callable[..., Any] | None = None

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`run(*args, **kwargs)`, for a `Transaction.run` of this form."""
        if self._program is None:
            closed, out = jax.make_jaxpr(run, return_shape=True)(*args, **kwargs)
            pure, tree = _jax.with_equations(closed, without_rules), jax.tree.structure(out)

            def program(*args: Any, **kwargs: Any) -> Any:
                leaves = jax.tree.leaves((args, kwargs))
                return tree.unflatten(_jax.eval_jaxpr(pure, pure.consts, leaves))

            self._program = program
            if self._is_compiled:
                self._program = jax.jit(in_place(program), donate_argnums=0)
        return self._program(*args, **kwargs)


@functools.lru_cache(maxsize=256)
def _shared(is_compiled: bool, form: Hashable) -> _Shared:
    """What transactions of a form share, which is all that their pure program depends on."""
    return _Shared(is_compiled)


def _traced_call(
    fun: Callable[..., Any],
    refs: Sequence[RefLike],
    arrays: Sequence[Value],
    functions: Sequence[object],
    static: Any,
) -> _TracedCall | None:
    """The cached trace for such a call, or a new one; None if the call can't be a key."""
    try:
        found = _known.of(functions)
        key = (static, _jax.trace_context(), *map(ref_type, refs), *map(type_of, arrays))
        if key in found:
            return found[key]
    except TypeError:  # no hash, no weak reference
        return None
    traced_call = _TracedCall(fun, refs, arrays, comes_again=True)
    if traced_call.is_lasting:
        found[key] = traced_call
    return traced_call


_known = WeakMemo()


def has_loops(primitive: Primitive, inner: Iterable[ClosedJaxpr]) -> bool:
    """Whether a primitive is a loop, or one is in the jaxprs, `inner`, that it runs."""
    return primitive in _jax.loop_primitives or any(map(_holds_loops, inner))


def _is_compiled(eqn: Eqn) -> bool:
    """Whether JAX compiles an equation by itself, in each call anew once its refs are gone."""
    takes_refs = any(_jax.is_ref_type(v.aval) for v in eqn.invars)
    return eqn.primitive is _jax.cond_p or (eqn.primitive is _jax.jit_p and takes_refs)


def _holds_loops(closed: ClosedJaxpr) -> bool:
    jaxpr = closed.jaxpr
    if jaxpr not in _with_loops:
        _with_loops[jaxpr] = any(
            has_loops(eqn.primitive, _jax.jaxprs_in(eqn.params)) for eqn in jaxpr.eqns
        )
    return _with_loops[jaxpr]


_with_loops: WeakKeyDictionary[Jaxpr, bool] = WeakKeyDictionary()
