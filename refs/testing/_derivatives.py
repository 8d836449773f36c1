"""The laws of derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from refs._tracing import Call, is_ref
from refs.testing._case import Case, Law, Seen, is_inexact, results, with_arrays
from refs.transforms.functionalize import functionalize
from refs.transforms.jvp import jvp, linearize
from refs.transforms.vjp import vjp

NOT_SMOOTH = "no argument and no ref is of an inexact type"


class _Smooth(NamedTuple):
    """What of a function can be differentiated.

    `fun(f, refs, arrays)` calls `f`, and returns its inexact results with what `refs` then hold,
    and its other results. `refs` are the inexact refs of the case, `arrays` the inexact arguments.
    """

    fun: Callable[..., Any]
    refs: list[Any]
    arrays: list[Any]

    @staticmethod
    def of(case: Case) -> _Smooth | None:
        leaves, refs = Call.of(case.args, {}).leaves, [r for r in case.refs if is_inexact(r)]
        arrays = [jnp.asarray(x) for x in leaves if is_inexact(x)]
        if not refs and not arrays:
            return None

        def fun(f: Callable[..., Any], refs_inside: Sequence[Any], arrays: Sequence[Any]) -> Any:
            inside = {id(r): s for r, s in zip(refs, refs_inside, strict=True)}
            rest = iter(arrays)
            given = with_arrays(case.args, [next(rest) if is_inexact(x) else x for x in leaves])
            given = jax.tree.map(lambda x: inside.get(id(x), x) if is_ref(x) else x, given)
            out = [jnp.asarray(x) for _, x in results(f(*given))]
            contents = [r[...] for r in refs_inside]
            smooth = [x for x in out if is_inexact(x)]
            return [*smooth, *contents], [x for x in out if not is_inexact(x)]

        return _Smooth(fun, refs, arrays)

    def pure(self, case: Case) -> Callable[..., Any]:
        """`fun` of the refs' values, with the new state beside the other results."""
        place = {id(r): k for k, r in enumerate(self.refs)}

        def program(arrays: Sequence[Any]) -> Any:
            return self.fun(case.f, self.refs, arrays)

        def pure(values: Sequence[Any], arrays: Sequence[Any]) -> Any:
            state = [
                values[place[id(r)]] if id(r) in place else x
                for r, x in zip(case.refs, case.held, strict=True)
            ]
            (out, rest), state = functionalize(program, closed_over=case.refs)(state, arrays)
            return out, (rest, state)

        return pure

    def values(self, case: Case) -> list[Any]:
        held = {id(r): x for r, x in zip(case.refs, case.held, strict=True)}
        return [jnp.asarray(held[id(r)]) for r in self.refs]


def _random_like(xs: Any) -> Any:
    random = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype), xs)


def _named(case: Case, **parts: Any) -> Seen:
    found = [
        (f"{what}[{k}]", x)
        for what, values in parts.items()
        for k, x in enumerate(jax.tree.leaves(values))
    ]
    return found + case.contents()


def forwards(derivative: Callable[..., Any]) -> Law:
    """`derivative(jvp, fun, primals, tangents)` gives (output, tangent, other results)."""

    def law(case: Case, name: str) -> str | None:
        if (smooth := _Smooth.of(case)) is None:
            return NOT_SMOOTH
        primals = smooth.values(case), smooth.arrays
        tangents = _random_like(primals)
        (right, d_right, (rest, state)) = jax.jvp(
            smooth.pure(case), primals, tangents, has_aux=True
        )

        def program(refs: Any, arrays: Any) -> Any:
            return smooth.fun(case.f, refs, arrays)

        out, d_out, others = derivative(program, (smooth.refs, smooth.arrays), tangents)
        got = _named(case, result=out, tangent=d_out, other=others)
        case.put(state)
        case.compare(name, [got], [_named(case, result=right, tangent=d_right, other=rest)])
        return None

    return law


def by_jvp(program: Any, primals: Any, tangents: Any) -> Any:
    return jvp(program, primals, tangents, has_aux=True)


def by_linearize(program: Any, primals: Any, tangents: Any) -> Any:
    out, pushforward, rest = linearize(program, *primals, has_aux=True)
    return out, pushforward(*tangents), rest


def backwards(
    inner: Callable[..., Any] = lambda f: f, outer: Callable[..., Any] = lambda f: f
) -> Law:
    """The law of `outer(vjp(inner(f)))`."""

    def law(case: Case, name: str) -> str | None:
        if (smooth := _Smooth.of(case)) is None:
            return NOT_SMOOTH
        primals = smooth.values(case), smooth.arrays
        right, pull, (rest, state) = jax.vjp(smooth.pure(case), *primals, has_aux=True)
        cotangent = _random_like(right)

        def program(refs: Any, arrays: Any) -> Any:
            return smooth.fun(inner(case.f), refs, arrays)

        def gradient(refs: Any, arrays: Any, cotangent: Any) -> Any:
            out, pullback, others = vjp(program, refs, arrays, has_aux=True)
            return out, pullback(cotangent), others

        out, cts, others = outer(gradient)(smooth.refs, smooth.arrays, cotangent)
        got = _named(case, result=out, gradient=cts, other=others)
        case.put(state)
        expected = _named(case, result=right, gradient=pull(cotangent), other=rest)
        case.compare(name, [got], [expected])
        return None

    return law


def quotients(case: Case, name: str) -> str | None:
    from jax import test_util  # imports what no program needs

    if (smooth := _Smooth.of(case)) is None:
        return NOT_SMOOTH
    pure = smooth.pure(case)
    shapes, _ = jax.eval_shape(pure, smooth.values(case), smooth.arrays)
    if any(jnp.finfo(x.dtype).bits < 32 for x in (*shapes, *smooth.refs, *smooth.arrays)):
        return "difference quotients of numbers of 16 bits say nothing"
    test_util.check_grads(
        lambda *primals: pure(*primals)[0],
        (smooth.values(case), smooth.arrays),
        order=1,
        atol=case.rtol,
        rtol=case.rtol,
        eps=case.eps,
    )
    return None
