"""How JAX calls custom functions in the old form: with functions, not jaxprs, of their rules.

A custom function is bound in the trace around as it is, with its rules, so that these get the
values that they would get without refs. But JAX runs the function and its rules outside of the
trace over refs, where a ref has no cell. So if one of them touches a ref, it is stopped there, and
the function is discharged as an equation.

On the day when JAX has only its new forms, this file goes, with `_jax/old_forms.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from refs import _jax
from refs._discharge.ref_tracer import TouchedError
from refs._handles.predicates import is_ref
from refs._types import Primitive, Value

_is_attempt: ContextVar[bool] = ContextVar("_is_attempt", default=False)


class OldCustomCalls(_jax.Trace):
    """The part of a trace over refs that JAX hands custom functions to."""

    parent: Any
    has_custom_vjp: bool
    traced: Callable[..., Any]
    guarded: Callable[[Any], Any]

    def process_custom_jvp_call(
        self, primitive: Primitive, fun: Any, jvp: Any, operands: Sequence[Value], /, **params: Any
    ) -> Any:
        return self._process_custom(primitive, (fun, jvp), operands, params)

    def process_custom_vjp_call(
        self,
        primitive: Primitive,
        fun: Any,
        fwd: Any,
        bwd: Any,
        operands: Sequence[Value],
        /,
        **params: Any,
    ) -> Any:
        self.has_custom_vjp = True
        return self._process_custom(primitive, (fun, fwd, bwd), operands, params)

    def process_call(  # pragma: no cover, JAX before 0.12
        self, primitive: Primitive, fun: Any, operands: Sequence[Value], params: Any, /
    ) -> Any:
        with _jax.set_current_trace(self):
            return _jax.call_wrapped(fun, operands)

    def _process_custom(
        self,
        primitive: Primitive,
        funs: Sequence[Any],
        operands: Sequence[Value],
        params: dict[str, Any],
    ) -> Any:
        """Calls a function with rules. A backward rule runs only after this trace has ended."""
        if self.parent is _jax.eval_trace:  # Nothing is differentiated.
            with _jax.set_current_trace(self):
                return _jax.call_wrapped(funs[0], operands)
        if not any(map(is_ref, operands)):
            guarded = (*map(self.guarded, funs[:2]), *funs[2:])
            is_part, token = _is_attempt.get(), _is_attempt.set(True)
            try:
                with _jax.set_current_trace(self.parent):
                    return primitive.bind(*operands, subfuns=guarded, **params)
            except TouchedError:
                if is_part:  # An attempt that fails must not have changed a ref: all of it fails.
                    raise
            finally:
                _is_attempt.reset(token)
        out = self.traced(primitive, funs, operands, params)
        _jax.settle_result_tree(*funs[:2])
        return out
