"""Rule of JAX's "hi" primitives: the operations that they expand to are discharged instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import jax

from refs import _jax
from refs._discharge.cells import Cell
from refs._discharge.interpreter import Context
from refs._discharge.registry import register
from refs._tracing.trace import AbstractArgument
from refs._types import Eqn, Value
from refs.errors import MissingRuleError


@register(_jax.call_hi_primitive_p)
def discharge_hi_primitive(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    def refuse() -> NoReturn:
        described = next(a.describe() for a in args if isinstance(a, Cell))
        raise MissingRuleError(
            f"the derivative of primitive `{type(eqn.params['_prim']).__name__}` at "
            f"{_jax.user_line(eqn)}, which takes {described}: read the ref before (`ref[...]`), "
            "or register a rule for `call_hi_primitive` with `refs.extend.register`"
        )

    with _jax.without_hi_primitives():
        fun = _jax.hi_function(eqn, refuse)
        traced = jax.make_jaxpr(fun)(*(AbstractArgument(v.aval) for v in eqn.invars))
    return ctx.eval(traced, args)
