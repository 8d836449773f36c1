"""Rule of `custom_linear_solve`, and of what is made of it: `cg`, `gmres`, `bicgstab`.

Its functions may read refs: they become functions of what the refs hold, so that derivatives with
respect to that are right. They can't write any: how often they run, also in a derivative, is the
solver's affair.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.extend.core import Primitive

from refs import _jax
from refs._discharge.interpreter import Context
from refs._discharge.registry import register
from refs._handles.access import describe
from refs._tracing.discharged import is_to_be_discharged
from refs._tracing.facts import Inner
from refs._types import Aval, ClosedJaxpr, Eqn, Value
from refs.errors import RefValueError

# The same operation in a jaxpr: JAX gives its own one the effects of an inner jaxpr.
linear_solve_over_refs_p = Primitive("custom_linear_solve")
linear_solve_over_refs_p.multiple_results = True


@_jax.def_effectful_abstract_eval(linear_solve_over_refs_p)
def _types(*avals: Aval, **params: Any) -> tuple[Sequence[Aval], set[Any]]:
    types, _ = _jax.linear_solve_p.abstract_eval(*avals, **params)
    return types, _jax.only_read(k for k, aval in enumerate(avals) if _jax.is_ref_type(aval))


def _takes_refs(avals: Sequence[Aval]) -> bool:
    return is_to_be_discharged() and any(map(_jax.is_ref_type, avals))


_jax.register_staging(_jax.linear_solve_p, linear_solve_over_refs_p, _takes_refs)


_NAMES = ("matvec", "vecmat", "solve", "transpose_solve")


def _calls(eqn: Eqn, operands: Sequence[Any]) -> dict[str, tuple[ClosedJaxpr, list[Any]]]:
    """The jaxprs of an equation by name, each with its operands; without transposes two."""
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    rest = iter(operands)
    constants = [[*itertools.islice(rest, n)] for n in lengths]
    b = [*rest]
    return {
        name: (_jax.as_closed(jaxpr), [*given, *b])
        for name, jaxpr, given in zip(_NAMES, jaxprs, constants, strict=True)
        if jaxpr is not None
    }


def inner(eqn: Eqn) -> Inner:
    yield from _calls(eqn, eqn.invars).values()


@register(_jax.linear_solve_p, linear_solve_over_refs_p, inner=inner)
def discharge_linear_solve(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    calls, jaxprs = _calls(eqn, args), eqn.params["jaxprs"]
    b = [*args[sum(eqn.params["const_lengths"]) :]]
    scope = ctx.scope(*calls.values())
    constants = scope.constants
    written = [*(c.describe() for c in scope.written), *map(describe, scope.sums)]
    if written:
        raise RefValueError(
            f"a function of the custom_linear_solve at {_jax.user_line(eqn)} writes {written[0]}: "
            "it can only read refs, as the solver, and each derivative, calls it as often as it "
            "likes. Write the ref before or after"
        )

    def solution(name: str) -> Callable[[Any, list[Value]], tuple[list[Value], list[Value]]]:
        closed, given = calls[name]

        def solve(_: Any, x: list[Value]) -> tuple[list[Value], list[Value]]:
            out, _ = scope.run(closed, [*given[: len(given) - len(b)], *x], [], constants)
            return out[: len(b)], out[len(b) :]

        return solve

    out, more = lax.custom_linear_solve(
        lambda x: solution("matvec")(None, x)[0],
        b,
        solution("solve"),
        solution("transpose_solve") if "transpose_solve" in calls else None,
        symmetric=jaxprs.vecmat is jaxprs.matvec,
        has_aux=True,
    )
    return [*out, *more]
