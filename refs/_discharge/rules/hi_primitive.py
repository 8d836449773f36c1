"""Rule of JAX's "hi" primitives: the operations that they expand to are discharged instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import jax

from refs import _jax
from refs._discharge.interpreter import Context
from refs._discharge.registry import register
from refs._discharge.rule_choice import taken
from refs._tracing.trace import unique
from refs._types import Eqn, Value
from refs.errors import MissingRuleError


@register(_jax.call_hi_primitive_p)
def discharge_hi_primitive(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    def refuse() -> NoReturn:
        described = next(taken(args, _jax.jaxprs_in(eqn.params)))
        raise MissingRuleError(
            f"the derivative of primitive `{type(eqn.params['_prim']).__name__}` at "
            f"{_jax.user_line(eqn)}, which takes {described}: read the ref before (`ref[...]`), "
            "or register a rule for `call_hi_primitive` with `refs.extend.register`"
        )

    given = unique(args)  # JAX's functions take each ref once.
    types = {k: v.aval for k, v in zip(given.places, eqn.invars, strict=True)}.values()
    fun = _jax.hi_function(eqn, given.places, refuse)
    traced = jax.make_jaxpr(fun)(*map(_jax.AbstractArgument, types))
    return ctx.eval(traced, given.items)
