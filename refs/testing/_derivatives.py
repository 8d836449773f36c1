"""The laws of derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from refs._handles.access import describe
from refs._handles.predicates import is_ref
from refs._tracing.trace import Call
from refs._transforms.functionalize import functionalize
from refs._transforms.jvp import jvp, linearize
from refs._transforms.vjp import vjp
from refs._types import PyTree, RefLike, Value
from refs.testing._case import Case, Law, Seen, is_inexact, results, with_arrays

NOT_SMOOTH = "no argument and no ref is of an inexact type"


class _Smooth(NamedTuple):
    """The part of a function that can be differentiated.

    `fun(f, refs, arrays)` calls `f`, and returns a pair: its inexact results with the final
    contents of `refs`, and its other results. `refs` are the inexact refs of the case, `arrays` the
    inexact arguments.
    """

    fun: Callable[..., Any]
    refs: list[RefLike]
    arrays: list[Value]

    @staticmethod
    def of(case: Case) -> _Smooth | None:
        leaves, refs = Call.of(case.args, {}).leaves, [r for r in case.refs if is_inexact(r)]
        arrays = [jnp.asarray(x) for x in leaves if is_inexact(x)]
        if not refs and not arrays:
            return None

        def fun(
            f: Callable[..., Any], refs_inside: Sequence[RefLike], arrays: Sequence[Value]
        ) -> tuple[list[Value], list[Value]]:
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
        """`fun` as a pure function of the refs' values; the new state joins the other results."""
        place = {id(r): k for k, r in enumerate(self.refs)}

        def program(arrays: Sequence[Value]) -> Any:
            return self.fun(case.f, self.refs, arrays)

        def pure(values: Sequence[Value], arrays: Sequence[Value]) -> Any:
            state = [
                values[place[id(r)]] if id(r) in place else x
                for r, x in zip(case.refs, case.held, strict=True)
            ]
            (out, rest), state = functionalize(program, closed_over=case.refs)(state, arrays)
            return out, (rest, state)

        return pure

    def inputs(self, case: Case) -> list[str]:
        """The names of the refs and the arrays in messages."""
        given = [
            f"argument{jax.tree_util.keystr(path)}"
            for path, x in jax.tree_util.tree_leaves_with_path(case.args)
            if not is_ref(x) and is_inexact(x)
        ]
        return [*map(describe, self.refs), *given]

    def outputs(self, out: PyTree) -> list[str]:
        """The names of the results of `fun` in messages."""
        n = len(jax.tree.leaves(out)) - len(self.refs)
        return [*(f"result {k}" for k in range(n)), *map(describe, self.refs)]

    def values(self, case: Case) -> list[Value]:
        held = {id(r): x for r, x in zip(case.refs, case.held, strict=True)}
        return [jnp.asarray(held[id(r)]) for r in self.refs]


def _random_like(xs: PyTree) -> PyTree:
    random = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype), xs)


def _named(case: Case, *parts: tuple[Sequence[str], PyTree], other: PyTree) -> Seen:
    """The named values of each part, the other results, and the refs' contents."""
    others = [f"other result {k}" for k in range(len(jax.tree.leaves(other)))]
    found = [
        (name, x)
        for names, values in (*parts, (others, other))
        for name, x in zip(names, jax.tree.leaves(values), strict=True)
    ]
    return found + case.contents()


def _of(what: str, names: Sequence[str]) -> list[str]:
    return [f"the {what} of {name}" for name in names]


def forwards(derivative: Callable[..., Any]) -> Law:
    """The law of a forward-mode derivative.

    `derivative(fun, primals, tangents)` returns (output, tangent, other results).
    """

    def law(case: Case, name: str) -> str | None:
        if (smooth := _Smooth.of(case)) is None:
            return NOT_SMOOTH
        primals = smooth.values(case), smooth.arrays
        tangents = _random_like(primals)
        (right, d_right, (rest, state)) = jax.jvp(
            smooth.pure(case), primals, tangents, has_aux=True
        )

        def program(refs: Sequence[RefLike], arrays: Sequence[Value]) -> Any:
            return smooth.fun(case.f, refs, arrays)

        out, d_out, others = derivative(program, (smooth.refs, smooth.arrays), tangents)
        names = smooth.outputs(right)

        def named(out: PyTree, d_out: PyTree, other: PyTree) -> Seen:
            return _named(case, (names, out), (_of("tangent", names), d_out), other=other)

        got = named(out, d_out, others)
        case.put(state)
        case.compare(name, [got], [named(right, d_right, rest)])
        return None

    return law


def by_jvp(program: Callable[..., Any], primals: PyTree, tangents: PyTree) -> Any:
    return jvp(program, primals, tangents, has_aux=True)


def by_linearize(program: Callable[..., Any], primals: PyTree, tangents: PyTree) -> Any:
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

        def program(refs: Sequence[RefLike], arrays: Sequence[Value]) -> Any:
            return smooth.fun(inner(case.f), refs, arrays)

        def gradient(refs: Sequence[RefLike], arrays: Sequence[Value], cotangent: PyTree) -> Any:
            out, pullback, others = vjp(program, refs, arrays, has_aux=True)
            return out, pullback(cotangent), others

        out, cts, others = outer(gradient)(smooth.refs, smooth.arrays, cotangent)
        names, inputs = smooth.outputs(right), smooth.inputs(case)

        def named(out: PyTree, cts: PyTree, other: PyTree) -> Seen:
            return _named(case, (names, out), (_of("gradient", inputs), cts), other=other)

        got = named(out, cts, others)
        case.put(state)
        case.compare(name, [got], [named(right, pull(cotangent), rest)])
        return None

    return law


STEP, TOLERANCE = 1e-4, 2e-3  # JAX's defaults for 32 bits


def quotients(case: Case, name: str) -> str | None:
    """The law of difference quotients."""
    from jax import test_util  # imports modules that no program needs

    if (smooth := _Smooth.of(case)) is None:
        return NOT_SMOOTH
    pure = smooth.pure(case)
    shapes, _ = jax.eval_shape(pure, smooth.values(case), smooth.arrays)
    if any(jnp.finfo(x.dtype).bits < 32 for x in (*shapes, *smooth.refs, *smooth.arrays)):
        return "difference quotients of numbers of 16 bits say nothing"
    primals, tree = jax.tree.flatten((smooth.values(case), smooth.arrays))

    # A difference quotient has an error of the value's rounding, divided by the step.
    values = jax.tree.leaves(pure(*tree.unflatten(primals))[0])
    rounding = [float(jnp.abs(x).max(initial=0) * jnp.finfo(x.dtype).eps) for x in values]
    noise = max([0.0, *rounding]) / (case.eps or STEP)
    atol = noise if noise > (case.rtol or TOLERANCE) else case.rtol

    def check(fun: Callable[..., Any], *primals: PyTree) -> None:
        precision = {"atol": atol, "rtol": case.rtol, "eps": case.eps}
        test_util.check_grads(fun, primals, order=1, **precision)

    def by(k: int) -> Callable[[Any], Any]:
        return lambda x: pure(*tree.unflatten([*primals[:k], x, *primals[k + 1 :]]))[0]

    try:
        check(lambda *primals: pure(*tree.unflatten(primals))[0], *primals)
    except AssertionError:
        # Check one input after the other, so that the message names the wrong one.
        for k, what in enumerate(smooth.inputs(case)):
            try:
                check(by(k), primals[k])
            except AssertionError as error:
                raise AssertionError(
                    f"{name}: the derivative by {what} is wrong: {error}"
                ) from None
        raise  # pragma: no cover, only the sum of the inputs' errors is too large
    return None
