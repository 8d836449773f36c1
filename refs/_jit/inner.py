"""Calls of a compiled function in the trace of another one: traced once for arguments alike.

The layers of a network call one function with refs of equal types. JAX's jit then takes the refs as
arguments, and traces the function once; and discharge interprets its jaxpr once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import jax

from refs import _jax
from refs._handles.making import make
from refs._handles.predicates import is_ref
from refs._tracing.discharged import is_lane
from refs._tracing.trace import Call, flattened, new_origins, ref_type, result_of
from refs._transactions.signature import Static, type_of
from refs._types import PyTree, RefLike, Value


class Inner(NamedTuple):
    """JAX's jit of a function, `(refs, leaves) -> (arrays, values of new refs)`, and its result.

    Attributes:
      out: the structure of the function's result, and what each of its leaves is.
    """

    compiled: Callable[..., tuple[list[Value], list[Value]]]
    out: list[Any]

    @staticmethod
    def of(fun: Callable[..., Any], static: Static, call: Call, **options: Any) -> Inner | None:
        """The form for calls like this one.

        None if the function closes over a ref or over a value of the trace around it: the ref may
        be an argument, too, and the value is another one in the next trace. Only a trace tells,
        so it is kept for the function's code, which nested functions may share.
        """
        code = getattr(fun, "__code__", None)
        if code is not None and code in _closing:
            return None
        made = Inner._of(fun, static, call, options)
        if made is None and code is not None:
            _closing.add(code)
        return made

    @staticmethod
    def _of(
        fun: Callable[..., Any], static: Static, call: Call, options: dict[str, Any]
    ) -> Inner | None:
        # It holds no ref of this call.
        rebuild = Call(call.tree, [], call.ref_places, [], []).rebuild
        flat, out = flattened(fun, lambda refs, leaves: static.restore(*rebuild(refs, leaves)))
        compiled = jax.jit(flat, **options)
        try:
            traced = compiled.trace(call.refs, call.leaves)
        except ValueError:  # JAX takes each ref once. One of the user's is raised by the call.
            return None
        closed_over = (*_jax.captured(traced), *traced.jaxpr.consts)
        if any(isinstance(c, _jax.Tracer) or is_ref(c) for c in closed_over):
            return None
        return Inner(compiled, out)

    def __call__(self, refs: Sequence[RefLike], leaves: Sequence[Value]) -> PyTree:
        arrays, new = self.compiled([*refs], [*leaves])
        out_tree, markers = self.out
        return result_of(out_tree, markers, arrays, refs, [*map(make, new, new_origins(markers))])


# The code of functions that were found to close over refs or over values of a trace.
_closing: WeakSet[Any] = WeakSet()


def key_of(static: Static | None, call: Call) -> tuple[Any, ...]:
    """What a trace for a call depends on."""
    types = (*map(ref_type, call.refs), *map(type_of, call.leaves))
    return (static, call.tree, call.ref_places, is_lane(), _jax.trace_context(), *types)
