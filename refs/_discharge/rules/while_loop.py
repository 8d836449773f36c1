"""Rule of `while_loop` and of the `fori_loop`s that become one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from refs import _jax
from refs._discharge.interpreter import Context
from refs._discharge.lanes import Lanes
from refs._discharge.registry import register
from refs._lanes.primitives import lane_any
from refs._tracing.facts import Inner
from refs._tracing.touch_analysis import touches
from refs._types import ClosedJaxpr, Eqn, Value


def predicate_and_body(eqn: Eqn) -> Inner:
    params, args = eqn.params, eqn.invars
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    carry = args[n_cond + n_body :]
    yield _jax.as_closed(params["cond_jaxpr"]), [*args[:n_cond], *carry]
    yield _jax.as_closed(params["body_jaxpr"]), [*args[n_cond : n_cond + n_body], *carry]


def carries(eqn: Eqn) -> tuple[int, int]:
    first = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    return first, len(eqn.invars) - first


@register(_jax.while_p, inner=predicate_and_body, carries=carries, is_computed_once=True)
def discharge_while(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts, body_consts = args[:n_cond], args[n_cond : n_cond + n_body]
    init = list(args[n_cond + n_body :])
    cond = _jax.as_closed(eqn.params["cond_jaxpr"])
    body = _jax.as_closed(eqn.params["body_jaxpr"])
    scope = ctx.scope((cond, [*cond_consts, *init]), (body, [*body_consts, *init]))
    scope.check_same_writes(cond.out_avals[0], eqn)
    constants = scope.constants

    def test(carry: list[Value], state: list[Value]) -> tuple[Value, list[Value]]:
        [go_on], state = scope.run(cond, [*cond_consts, *carry], state, constants)
        return go_on, state

    def step(carry: list[Value], state: list[Value]) -> tuple[list[Value], list[Value]]:
        return scope.run(body, [*body_consts, *carry], state, constants)

    all_lanes = ctx.lanes
    if all_lanes is not None and (all_lanes.mask is not None or all_lanes.analysis.diverges(eqn)):
        # A lane whose loop has ended keeps its carry while others go on. A lane outside the mask
        # doesn't keep the loop running.
        def going(
            lanes: Lanes, carry: list[Value], state: list[Value]
        ) -> tuple[Value, list[Value]]:
            inputs = scope.in_lanes(constants, lanes)
            [go_on], state = scope.run(cond, [*cond_consts, *carry], state, inputs)
            return lanes.where(go_on).mask, state

        def masked_step(loop: Any) -> Any:
            mask, carry, state = loop
            lanes = all_lanes._replace(mask=mask)
            inputs = scope.in_lanes(constants, lanes)
            new, state = scope.run(body, [*body_consts, *carry], state, inputs)
            carry = [lanes.select(a, b) for a, b in zip(new, carry, strict=True)]
            mask, state = going(lanes, carry, state)
            return mask, carry, state

        mask, state = going(all_lanes, init, scope.state)
        _, out, state = lax.while_loop(
            lambda loop: lane_any(loop[0]), masked_step, (mask, init, state)
        )
    elif _writes(cond):
        # Values that the predicate writes can only leave the loop in the carry. So the predicate
        # runs after each step, and once before the first.
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


def _writes(closed: ClosedJaxpr) -> bool:
    found = touches(closed)
    kinds = (*found.consts, *found.inputs, *(kind for _, kind in found.hidden))
    return any(kind.changes for kind in kinds)
