"""Rule of `while_loop` and of the `fori_loop`s that become one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from refs import _jax
from refs._effects import touches
from refs.discharge._interpreter import Context
from refs.discharge._registry import register


@register(_jax.while_p)
def discharge_while(ctx: Context, eqn: Any, args: Sequence[Any]) -> list[Any]:
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts, body_consts = args[:n_cond], args[n_cond : n_cond + n_body]
    init = list(args[n_cond + n_body :])
    cond = _jax.as_closed(eqn.params["cond_jaxpr"])
    body = _jax.as_closed(eqn.params["body_jaxpr"])
    scope = ctx.scope((cond, [*cond_consts, *init]), (body, [*body_consts, *init]))
    constants = scope.constants

    def test(carry: list[Any], state: list[Any]) -> tuple[Any, list[Any]]:
        [go_on], state = scope.run(cond, [*cond_consts, *carry], state, constants)
        return go_on, state

    def step(carry: list[Any], state: list[Any]) -> tuple[list[Any], list[Any]]:
        return scope.run(body, [*body_consts, *carry], state, constants)

    if _writes(cond):
        # What the predicate writes can only leave the loop as a carry: test after each step, and
        # once before the first.
        def tested_step(loop: Any) -> Any:
            _, carry, state = loop
            carry, state = step(carry, state)
            go_on, state = test(carry, state)
            return go_on, carry, state

        go_on, state = test(init, scope.state)
        _, out, state = lax.while_loop(lambda loop: loop[0], tested_step, (go_on, init, state))
    else:
        out, state = lax.while_loop(
            lambda loop: test(*loop)[0], lambda loop: step(*loop), (init, scope.state)
        )
    scope.update(state)
    return out


def _writes(closed: Any) -> bool:
    found = touches(closed)
    kinds = (*found.consts, *found.inputs, *(kind for _, kind in found.hidden))
    return any(kind.changes for kind in kinds)
