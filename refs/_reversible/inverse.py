"""`refs.inverse`: an operation that a reversible function may undo."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
from jax.extend.core import Primitive

from refs import _jax
from refs._handles.access import describe
from refs._handles.predicates import is_ref
from refs._reversible.inverses import INVERSES, Given, Inverse
from refs._types import Aval, ClosedJaxpr, Value
from refs.errors import RefTypeError, RefValueError

P = ParamSpec("P")
R = TypeVar("R")

# The operands are the first argument, the leaves of the others, and what the two functions close
# over. Both jaxprs take all of them, `back` the result in place of the first argument.
inverse_p = Primitive("inverse")
inverse_p.multiple_results = True


def inverse(fun: Callable[P, R], back: Callable[..., Any]) -> Callable[P, R]:
    """`fun`, with its inverse in its first argument, which `refs.reversible` undoes it by.

    Everywhere else it is `fun`.

    Args:
      fun: a function of arrays to one array. Its first argument is an array.
      back: `back(y, *rest)` gives the first argument `x` for which `fun(x, *rest)` is `y`.

    Raises:
      RefTypeError: when called, if the first argument or the result isn't one array, if `fun` or
        `back` touches a ref, or is given one.
      RefValueError: when called, if the shape or dtype that `back` gives isn't that of the first
        argument.

    >>> shift = refs.inverse(lambda x, n: jnp.roll(x, n), lambda y, n: jnp.roll(y, -n))
    >>> r = refs.new_ref(jnp.array([1.0, 2.0, 3.0]))
    >>> @refs.reversible
    ... def step():
    ...     r[...] = shift(r[...], 1)
    ...     return r[0] ** 2
    >>> refs.grad(lambda x: (r.set(x), step())[1])(jnp.array([1.0, 2.0, 3.0]))
    Array([0., 0., 6.], dtype=float32)
    """

    @functools.wraps(fun)
    def invertible(x: Any, *rest: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((rest, kwargs))
        for leaf in (x, *leaves):
            if is_ref(leaf):
                raise RefTypeError(
                    f"inverse: {describe(leaf)} is an argument, and the function is one of arrays: "
                    "pass its value, `ref[...]`"
                )
        if not (hasattr(x, "dtype") or isinstance(x, bool | int | float | complex)):
            raise RefTypeError(
                f"inverse: the first argument is a {type(x).__name__}: it must be one array"
            )

        def of(f: Callable[..., Any], first: Any) -> ClosedJaxpr:
            def flat(first: Value, leaves: list[Value]) -> Any:
                rest, kwargs = jax.tree.unflatten(tree, leaves)
                return f(first, *rest, **kwargs)

            traced = jax.make_jaxpr(flat)(first, leaves)
            for c in traced.consts:
                if is_ref(c):
                    raise RefTypeError(
                        f"inverse: a function touches {describe(c)}: read it before, `ref[...]`, "
                        "and pass the value"
                    )
            if len(traced.out_avals) != 1:
                raise RefTypeError(
                    f"inverse: a function returns {len(traced.out_avals)} arrays: it must be one"
                )
            return traced

        x = _jax.as_array(x)
        there = of(fun, x)
        [y] = there.out_avals
        again = of(back, jax.ShapeDtypeStruct(y.shape, y.dtype))
        [found] = again.out_avals
        if (found.shape, found.dtype) != (x.shape, x.dtype):
            raise RefValueError(
                f"inverse: the inverse gives {found.str_short()}, and the first argument is "
                f"{jax.typeof(x).str_short()}"
            )
        n = len(there.consts)
        operands = [x, *leaves, *there.consts, *again.consts]
        like = [*map(jax.typeof, operands)]
        n_args = 1 + len(leaves)

        def whole(closed: ClosedJaxpr, start: int, first: Any) -> ClosedJaxpr:
            """The jaxpr as one of all operands."""
            consts = slice(start, start + len(closed.consts))
            return _traced(
                lambda *xs: _jax.eval_jaxpr(closed, xs[consts], xs[:n_args]), [first, *like[1:]]
            )

        [out] = inverse_p.bind(
            *operands, jaxpr=whole(there, n_args, like[0]), back=whole(again, n_args + n, y)
        )
        return out

    return invertible


def _traced(fun: Callable[..., Any], types: Sequence[Aval]) -> ClosedJaxpr:
    return jax.make_jaxpr(fun)(*map(_jax.AbstractArgument, types))


def _run(*operands: Value, jaxpr: ClosedJaxpr, back: ClosedJaxpr) -> list[Value]:
    return _jax.eval_jaxpr(jaxpr, jaxpr.consts, operands)


def _undo(g: Given) -> Value:
    back: ClosedJaxpr = g.eqn.params["back"]
    [x] = _jax.eval_jaxpr(back, back.consts, [g.result, *g.operands[1:]])
    return x


def _batched(
    size: int,
    operands: Sequence[Value],
    axes: Sequence[int | None],
    *,
    jaxpr: ClosedJaxpr,
    back: ClosedJaxpr,
) -> dict[str, Any]:
    def mapped(closed: ClosedJaxpr, axes: Sequence[int | None], out_axis: int) -> Any:
        run = lambda *xs: _jax.eval_jaxpr(closed, closed.consts, xs)  # noqa: E731
        return jax.vmap(run, tuple(axes), out_axis, axis_size=size)

    types = [*map(jax.typeof, operands)]
    there = _traced(mapped(jaxpr, axes, 0), types)
    # An operand that isn't batched is the same in each lane.
    again = _traced(
        lambda y, *xs: jax.tree.map(
            lambda x: x if axes[0] is not None else x[0],
            mapped(back, [0, *axes[1:]], 0 if axes[0] is None else axes[0])(y, *xs),
        ),
        [*there.out_avals, *types[1:]],
    )
    return {"jaxpr": there, "back": again}


_jax.register_inlined(inverse_p, _run, _batched)
INVERSES[inverse_p] = Inverse(_undo, places=(0,))


@inverse_p.def_abstract_eval
def _type(*avals: Aval, jaxpr: ClosedJaxpr, back: ClosedJaxpr) -> list[Aval]:
    return list(jaxpr.out_avals)
