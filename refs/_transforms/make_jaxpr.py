"""`refs.make_jaxpr`: traces a function over refs to its effectful jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import jax

from refs._indexing.accesses import in_lax
from refs._tracing.trace import Call, ref_type, result_of, trace
from refs._transactions.signature import Choice, are_arrays, check_call
from refs._types import RefLike, Value

P = ParamSpec("P")


def make_jaxpr(
    fun: Callable[P, Any],
    static_argnums: int | Sequence[int] = (),
    axis_env: Sequence[tuple[Any, int]] | None = None,
    return_shape: bool = False,
) -> Callable[P, Any]:
    """Makes a function that returns the effectful jaxpr of `fun`, like `jax.make_jaxpr`.

    Refs may be anywhere in the arguments (a ref that occurs several times is one input), closed
    over (they are among `jaxpr.consts`, or the constants of an inner call where JAX leaves them
    there), or returned (the jaxpr returns the final values of refs made inside, and nothing for
    others).

    Args:
      fun: a function of pytrees of arrays and refs.
      static_argnums: positions of arguments that are not inputs, but part of the program.
      axis_env: names and sizes of axes that `fun` may use collectives over.
      return_shape: whether to return a pair: the jaxpr, and the result's shapes and dtypes.

    Returns:
      A function of `fun`'s arguments that returns a `ClosedJaxpr`. Its inputs are one ref for each
      distinct ref argument, then the other leaves in order.

    >>> r = refs.new_ref(jnp.zeros(3))
    >>> def f(x):
    ...     r[0] = x
    >>> refs.make_jaxpr(f)(1.0)
    { lambda a:Ref{f32[3]}; b:f32[]. let
        c:f32[] = convert_element_type[new_dtype=float32 weak_type=False] b
        a[0] <- c
      in () }
    """

    nums = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)

    def made(*args: Any, **kwargs: Any) -> Any:
        static, rest, kwargs = Choice(nums, frozenset()).split(args, kwargs)
        call = Call.of(rest, kwargs, runs=False)
        if call.refs:
            check_call("make_jaxpr", static, call)
        elif not are_arrays(call.leaves):
            return jax.make_jaxpr(fun, nums)(*args, **kwargs)  # It raises its own error.

        def rebuild(refs: Sequence[RefLike], leaves: Sequence[Value]) -> Any:
            return static.restore(*call.rebuild(refs, leaves))

        types = [ref_type(r) for r in call.refs]
        with in_lax():
            jaxpr, out_tree, markers = trace(fun, types, call.leaves, rebuild, axis_env or ())
        if not return_shape:
            return jaxpr
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in jaxpr.out_avals]
        n_arrays = sum(marker is None for marker in markers)
        made_inside = [s.update(is_ref=True) for s in shapes[n_arrays:]]
        return jaxpr, result_of(out_tree, markers, shapes[:n_arrays], call.refs, made_inside)

    return made
