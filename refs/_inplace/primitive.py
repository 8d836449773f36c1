"""The primitive of a pure program that is to be compiled in place: its lowering runs the pass.

As a primitive of its own the program keeps everything that JAX's transformations must see, custom
derivatives above all, until there is nothing left to transform.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.interpreters import ad

from refs import _jax
from refs._inplace.model import in_place_p
from refs._inplace.rewrite import rewrite
from refs._tracing.touch_analysis import used
from refs._types import Aval, ClosedJaxpr, Value

in_place_p.multiple_results = True


def run_in_place(closed: ClosedJaxpr, args: Sequence[Value]) -> list[Value]:
    """Runs a jaxpr, in place when it is compiled. Arguments that it doesn't use aren't passed."""
    closed, args = _jax.without_constants(closed), [*closed.consts, *args]
    variables = closed.jaxpr.invars
    kept = [k for k, v in enumerate(variables) if v in used(closed.jaxpr)]
    jaxpr = closed.replace(jaxpr=closed.jaxpr.replace(invars=[variables[k] for k in kept]))
    return in_place_p.bind(*(args[k] for k in kept), jaxpr=jaxpr)


@_jax.def_effectful_abstract_eval(in_place_p)
def _abstract_eval(*_: Aval, jaxpr: ClosedJaxpr) -> tuple[list[Aval], Any]:
    return jaxpr.out_avals, jaxpr.effects


@in_place_p.def_impl
def _evaluate(*args: Value, jaxpr: ClosedJaxpr) -> list[Value]:
    """Outside `jax.jit` a program runs operation by operation, and there is nothing to order."""
    return _jax.eval_jaxpr(jaxpr, jaxpr.consts, args)


def _jvp(
    primals: Sequence[Value], tangents: Sequence[Value], *, jaxpr: ClosedJaxpr
) -> tuple[list[Value], list[Value]]:
    """The derivative isn't in place: for that, users put `in_place` around it."""

    fun = functools.partial(_evaluate, jaxpr=jaxpr)
    return jax.jvp(fun, tuple(primals), tuple(map(_jax.instantiate, tangents)))


def _transpose(cotangents: Sequence[Value], *args: Value, jaxpr: ClosedJaxpr) -> list[Value | None]:
    linear = [k for k, x in enumerate(args) if ad.is_undefined_primal(x)]

    def fun(*operands: Value) -> list[Value]:
        given = dict(zip(linear, operands, strict=True))
        return _evaluate(*(given.get(k, x) for k, x in enumerate(args)), jaxpr=jaxpr)

    transposed = jax.linear_transpose(fun, *(args[k].aval for k in linear))
    found = dict(zip(linear, transposed([*map(_jax.instantiate, cotangents)]), strict=True))
    return [found.get(k) for k in range(len(args))]


ad.primitive_jvps[in_place_p] = _jvp
ad.primitive_transposes[in_place_p] = _transpose
_jax.register_call_batching(in_place_p)
_jax.register_call_to_lojax(in_place_p)
_jax.register_call_lowering(in_place_p, rewrite)
