"""JAX's own call wrappers inside a trace: over the arrays of a call, closing over its refs.

So the outer trace sees each touch of a ref, not a ref read and written as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from refs import _jax
from refs._ref import new_ref
from refs._tracing import Call, result_of, strip_refs
from refs.transforms._signature import Static


def call_over_arrays(
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    fun: Callable[..., Any],
    static: Static,
    call: Call,
) -> Any:
    """The result of `fun`, called through `wrap` with the call's arrays as only argument."""
    out: list[Any] = []

    def inner(leaves: list[Any]) -> Any:
        args, kwargs = static.restore(*call.rebuild(call.refs, leaves))
        _jax.name_arguments(fun, args, kwargs, leaves)
        result, out_tree = jax.tree.flatten(fun(*args, **kwargs))
        arrays, markers, new = strip_refs(result, call.refs)
        out[:] = [out_tree, markers]
        return arrays, new

    inner.__name__ = inner.__qualname__ = getattr(fun, "__name__", "function")
    arrays, new = wrap(inner)(call.leaves)
    out_tree, markers = out
    return result_of(out_tree, markers, arrays, call.refs, [new_ref(v) for v in new])
