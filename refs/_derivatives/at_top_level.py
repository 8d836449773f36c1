"""Code that is run op by op at top level: it changes refs at its end, or not at all."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from refs import _jax
from refs._buffers.operations import buffer_of
from refs._buffers.several import holding, replace
from refs._callbacks.failure import failures_told
from refs._discharge.op_by_op import OpByOp
from refs._handles.access import describe
from refs._handles.making import make
from refs._inplace.in_place import in_place
from refs._tracing.facts import can_fail, can_fail_itself
from refs._tracing.trace import advised
from refs._transactions.calls import has_loops, run
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
            result = advised(fun)()
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
        return holding([*self.opened], call)

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
                if buffer is not self._buffers[id(ref)]
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
