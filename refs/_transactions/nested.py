"""JAX's own call wrappers inside a trace: they take the arrays of a call and close over its refs.

So the outer trace sees each access to a ref, not a ref that is read and written as a whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from refs import _jax
from refs._handles.making import make
from refs._handles.predicates import is_ref
from refs._tracing.trace import Call, flatten_result, new_origins, result_of, strip_refs
from refs._transactions.signature import Static, shardings_of_arguments, shardings_of_result
from refs._types import PyTree, Sharding, Value

if TYPE_CHECKING:
    from refs._jit.program import Options


def call_over_arrays(
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    fun: Callable[..., Any],
    static: Static,
    call: Call,
) -> PyTree:
    """The result of `fun`, called through `wrap`, whose only argument is the call's arrays."""
    out: list[Value] = []

    def inner(leaves: list[Value]) -> tuple[list[Value], list[Value]]:
        args, kwargs = static.restore(*call.rebuild(call.refs, leaves))
        _jax.name_arguments(fun, args, kwargs, leaves)
        result, out_tree = flatten_result(fun, fun(*args, **kwargs))
        arrays, markers, new = strip_refs(result, call.refs)
        out[:] = [out_tree, markers]
        return arrays, new

    inner.__name__ = inner.__qualname__ = getattr(fun, "__name__", "function")
    arrays, new = wrap(inner)(call.leaves)
    out_tree, markers = out
    return result_of(out_tree, markers, arrays, call.refs, [*map(make, new, new_origins(markers))])


def call_inside(fun: Callable[..., Any], static: Static, call: Call, options: Options) -> PyTree:
    """The result of `fun` under `jax.jit` with these options.

    Arrays are resharded by separate equations: JAX can't discharge a jit over refs that has
    shardings.
    """
    if options.in_shardings is not None:
        shardings = shardings_of_arguments(options.in_shardings, call.tree)
        places = zip(shardings, call.ref_places, strict=True)
        of_leaves = [s for s, number in places if number is None]
        call = call._replace(leaves=[*map(_resharded, call.leaves, of_leaves)])

    @functools.wraps(fun)
    def resharded(*args: Any, **kwargs: Any) -> PyTree:
        leaves, tree = jax.tree.flatten(fun(*args, **kwargs))
        shardings = shardings_of_result(options.out_shardings, tree)
        return tree.unflatten(map(_resharded, leaves, shardings))

    nowhere = {"in_shardings": None, "out_shardings": None, "compiler_options": None}
    wrap = functools.partial(jax.jit, **(options._asdict() | nowhere))
    inner = fun if options.out_shardings is None else resharded
    return call_over_arrays(wrap, inner, static, call)


def _resharded(x: Value, sharding: Sharding | None) -> Value:
    return x if sharding is None or is_ref(x) else jax.lax.with_sharding_constraint(x, sharding)
