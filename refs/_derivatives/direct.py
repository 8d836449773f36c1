"""A call that is differentiated while it runs, so that Python code may inspect its values."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from refs import _jax
from refs._buffers.handles import buffer_of, is_ours
from refs._buffers.several import holding, replace
from refs._callbacks.failure import failures_told
from refs._derivatives.differentiable import Check, Differentiable, returning_pair
from refs._derivatives.inputs import Inputs
from refs._discharge.op_by_op import OpByOp
from refs._handles import access
from refs._handles.access import describe
from refs._handles.making import make
from refs._handles.predicates import is_ref
from refs._inplace.in_place import in_place
from refs._origin import Origin
from refs._tracing.discharged import is_lane
from refs._tracing.facts import can_fail, can_fail_itself
from refs._tracing.touch_analysis import Touch
from refs._tracing.trace import (
    PartlyKnown,
    advised,
    new_origins,
    result_of,
    strip_refs,
)
from refs._transactions.calls import has_loops, run
from refs._transactions.transaction import Transaction
from refs._types import Buffer, ClosedJaxpr, Primitive, RefLike, Value
from refs.errors import RefStateError


def op_by_op(fun: Callable[[], Any]) -> Any:
    """`fun()`, at top level as one operation: refs get all that it writes to them, or nothing.

    Inside a trace it is a part of that trace. If another thread has written a ref meanwhile, the
    results that `fun` has computed from the ref are void, and `fun` is called once more.

    Raises:
      RefStateError: if that happens again and again, or if callbacks would be called again.
    """
    if not _jax.at_top_level():
        return fun()
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(random.random() * min(attempt, 10) * 1e-3)
        result, changed, is_final = _attempt(fun)
        if changed is None:
            return result
        if is_final:
            break
    raise RefStateError(
        f"write of {describe(changed)} at the end of a differentiated function: it has been "
        "written from elsewhere meanwhile, by another thread or by a callback, and that would be "
        "lost. No ref has changed. Differentiate inside of `refs.jit`, whose calls are one "
        "operation, or hold a lock"
    )


_ATTEMPTS = 100


def _attempt(fun: Callable[[], Any]) -> tuple[Any, RefLike | None, bool]:
    """(the result, a ref that was written from elsewhere, whether `fun` can't be called again)."""
    trace = _AtTopLevel()
    with failures_told():
        with _jax.set_current_trace(trace):
            result = fun()
        made = {
            id(x): make(x.cell.read(), x.cell.origin)
            for x in jax.tree.leaves(result)
            if trace.has_made(x)
        }
        if made:
            result = jax.tree.map(lambda x: made.get(id(x), x), result)
        refs, values = trace.written
    changed = replace(refs, values, trace.first_changed)
    trace.end()
    return result, changed, trace.can_fail


class _AtTopLevel(OpByOp):
    """The outermost trace. It compiles loops, as other traces do, so that they work in place."""

    def __init__(self) -> None:
        super().__init__(_jax.eval_trace, _jax.eval_trace)
        self._buffers: dict[int, Buffer] = {}  # by the id of a ref: its buffer when it was read

    def read(self, ref: RefLike) -> Value:
        if isinstance(ref, _jax.Tracer):
            return super().read(ref)  # raises, as the function that it belongs to has ended
        buffer = value = None
        while buffer is None or buffer_of(ref) is not buffer:  # Another thread may write.
            buffer, value = buffer_of(ref), super().read(ref)
            if not is_ours(ref):  # JAX's own refs aren't thread-safe.
                break
        self._buffers[id(ref)] = buffer
        return value

    def bind(
        self,
        primitive: Primitive,
        operands: Sequence[Value],
        params: dict[str, Any],
        inner: Sequence[ClosedJaxpr],
    ) -> Any:
        call = functools.partial(super().bind, primitive, operands, params, inner)
        if has_loops(primitive, inner):
            call = functools.partial(_compiled(primitive, tuple(params.items())), *operands)
        if not (can_fail_itself(primitive) or any(map(can_fail, inner))):
            return call()
        return holding([*filter(is_ours, self.opened)], call)

    def _discharged(
        self, jaxpr: ClosedJaxpr, operands: Sequence[Value], made: dict[Any, Any] | None = None
    ) -> list[Any]:
        discharged = functools.partial(super()._discharged, jaxpr, operands, made)
        return _jax.finished(discharged) if can_fail(jaxpr) else discharged()

    def first_changed(self, refs: Sequence[RefLike], buffers: Sequence[Buffer]) -> RefLike | None:
        """The first of these refs that was written from elsewhere after it was read."""
        return next(
            (
                ref
                for ref, buffer in zip(refs, buffers, strict=True)
                if is_ours(ref) and buffer is not self._buffers[id(ref)]
            ),
            None,
        )


@functools.lru_cache(maxsize=256)
def _compiled(primitive: Primitive, params: tuple[Any, ...]) -> Callable[..., Any]:
    compiled = jax.jit(in_place(lambda *operands: primitive.bind(*operands, **dict(params))))

    def call(*operands: Value) -> Any:
        with _jax.set_current_trace(_jax.eval_trace):
            return compiled(*operands)

    return call


def backward(
    fun: Callable[..., Any], refs: Sequence[RefLike], arrays: Sequence[Value], has_effects: bool
) -> Any:
    """`fun(refs, arrays)`, the backward pass of a call. With `has_effects` it may touch refs.

    JAX transposes loops and branches to equations that hide the refs which users' backward rules
    touch in them; only this library finds these. So in a staging trace, such a pass is a
    transaction of its own.
    """
    if has_effects and _jax.is_staging():
        return run(fun, refs, arrays)
    return op_by_op(lambda: fun(refs, arrays))


class Direct(Differentiable):
    """A call that is run op by op.

    Its `rest` is `(arrays, contents, state)`: the arrays in the auxiliary data, the final values of
    new refs in them, and those of the refs that the function has written.
    """

    _outside: _jax.Trace  # the trace around the transformation

    def __init__(
        self,
        doing: str,
        fun: Callable[..., Any],
        inputs: Inputs,
        has_aux: bool,
        check: Check,
    ):
        super().__init__(doing, inputs, has_aux, check)
        self._fun = returning_pair(doing, fun) if has_aux else fun

    def __call__(self, values: Sequence[Value]) -> tuple[list[Value], Any]:
        n, refs = len(self.inputs.arrays), self.inputs.refs
        trace = _Differentiated(_jax.current_trace(), self._outside, self._lane)
        for ref, value in zip(refs, values[n:], strict=True):
            trace.open(ref, value)
        with _jax.set_current_trace(trace), _jax.without_hi_primitives():
            args, kwargs = self.inputs.rebuild(refs, values[:n])
            result = advised(self._fun)(*args, **kwargs)
        output, aux = result if self.has_aux else (result, None)
        out, self.out_tree = jax.tree.flatten(output)
        for x in out:
            if is_ref(x):
                raise self.escaped(describe(x))
        leaves, self._aux_tree = jax.tree.flatten(PartlyKnown(aux))
        with _jax.set_current_trace(trace):
            arrays, self._markers, contents = strip_refs(leaves, [])
        self.has_backward_effects = trace.has_custom_vjp
        self._written, state = trace.written
        trace.end()
        return out, (arrays, contents, state)

    def with_contents(
        self, values: Sequence[Value]
    ) -> tuple[tuple[list[Value], dict[int, Value]], Any]:
        out, rest = self(values)
        *_, state = rest
        number = {id(ref): k for k, ref in enumerate(self.inputs.refs)}
        final = {
            number[id(ref)]: value
            for ref, value in zip(self._written, state, strict=True)
            if id(ref) in number
        }
        return (out, final), rest

    def run(self, transformed: Callable[[list[Value]], tuple[Any, ...]]) -> tuple[Any, ...]:
        def inside() -> tuple[Any, ...]:
            self._outside = _jax.current_trace()
            arrays, refs = self.inputs.arrays, self.inputs.refs
            self._lane = lane = _Lane.of(self._fun, self.inputs) if is_lane() else None
            get = access.get if lane is None else lane.get
            values = [*arrays, *map(get, refs)]
            for k, x in enumerate(values):
                self.check(k, x)
            *out, (arrays, contents, state) = transformed(values)
            for ref, value in zip(self._written, state, strict=True):
                if lane is None:
                    access.set(ref, ..., value)
                else:
                    lane.set(ref, value)
            new = [*map(_made, contents, new_origins(self._markers))]
            return *out, result_of(self._aux_tree, self._markers, arrays, [], new)

        return op_by_op(inside)


class _Differentiated(OpByOp):
    """The trace of a differentiated function."""

    def __init__(self, parent: Any, outside: _jax.Trace, lane: _Lane | None):
        super().__init__(parent, outside, is_differentiated=True)
        self._lane = lane

    def read(self, ref: RefLike) -> Value:
        if self._lane is None:
            return super().read(ref)
        with _jax.set_current_trace(self.outside):
            return self._lane.get(ref)


class _Lane:
    """The refs of a function that is differentiated in a lane of `refs.vmap`.

    There, a ref that lanes share must not be read if the function only accumulates into it, nor if
    only a backward rule does. So the function is traced once before, to tell.
    """

    def __init__(self, t: Transaction, arguments: Sequence[RefLike]):
        self._transaction, self._arguments = t, arguments
        slots = [*t.touch_of]
        self._slots = dict(zip(map(id, t.refs(slots, arguments)), slots, strict=True))

    @staticmethod
    def of(fun: Callable[..., Any], inputs: Inputs) -> _Lane:
        def known(*args: Any, **kwargs: Any) -> Any:
            return PartlyKnown(fun(*args, **kwargs))

        refs, rebuild = inputs.refs, inputs.rebuild
        t = Transaction.of(known, refs, inputs.arrays, rebuild, is_differentiated=True)
        return _Lane(t, refs)

    def get(self, ref: RefLike) -> Value:
        """What the function has for a ref's value: the neutral element, if it only accumulates."""
        slot = self._slots[id(ref)]
        if self._transaction.touch_of[slot] == Touch.NONE:
            return None
        [value] = self._transaction.values([slot], self._arguments)
        return value

    def set(self, ref: RefLike, value: Value) -> None:
        """Gives a ref its new value, or accumulates what the function has accumulated."""
        self._transaction.commit([self._slots[id(ref)]], self._arguments, [value])


def _made(value: Value, origin: Origin) -> RefLike:
    """The ref outside of a function for one that it has made and returned, with its final value."""
    trace = _jax.current_trace()
    return trace.make(value, origin) if isinstance(trace, OpByOp) else make(value, origin)
