"""Rule of functions with a user's JVP rule, which stays in force."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from refs import _jax
from refs.discharge._cells import Cell
from refs.discharge._custom import eval_rule, is_smooth, through
from refs.discharge._interpreter import Context, merge
from refs.discharge._registry import register


@register(_jax.custom_jvp_call_p)
def discharge_custom_jvp(ctx: Context, eqn: Any, args: Sequence[Any]) -> list[Any]:
    """The state is threaded through the function and through the user's rule.

    A ref argument has a tangent cell, which the rule reads and writes. That of a ref that the
    function closes over goes with its contents, through what the function does to them. How they
    depend on the function's arguments isn't followed: of those, the rule has said all.
    """
    [closed] = _jax.jaxprs_in(eqn.params)
    rule = _jax.jvp_rule(eqn.params)
    scope = ctx.scope((closed, args))
    arguments = args[rule.num_consts :]
    passed = {id(a) for a in arguments if isinstance(a, Cell)}
    where = _jax.user_line(eqn)

    call = jax.custom_jvp(scope.function(closed, args))

    def call_jvp(primals: Any, tangents: Any) -> Any:
        arrays, state, constants = primals
        array_tangents, state_tangents, constant_tangents = tangents
        inside = scope.enter(state, constants)
        tangent_of = {
            id(outer): Cell(_jax.instantiate(t), outer.origin)
            for outers, ts in (
                (scope.written, state_tangents),
                # What comes after them are flags, which have no tangents.
                (scope.read, constant_tangents[: len(scope.read)]),
            )
            for outer, t in zip(outers, ts, strict=True)
        }
        primal_args = inside.args(merge(args, arrays)[rule.num_consts :])
        tangent_args = [
            tangent_of[id(a)] if isinstance(a, Cell) else a
            for a in merge(args, array_tangents)[rule.num_consts :]
        ]
        if not rule.symbolic_zeros:
            tangent_args = [_jax.instantiate(t) for t in tangent_args]
        zeros_in = [_jax.is_symbolic_zero(t) for t in tangent_args]
        jaxpr, consts, zeros_out = rule.trace(zeros_in)
        nonzero_args = [t for t in tangent_args if not _jax.is_symbolic_zero(t)]
        consts = [inside.ctx.resolve(c) for c in consts]
        out = eval_rule(inside.ctx, jaxpr, consts, [*primal_args, *nonzero_args], where)
        primals_out, nonzeros = out[: len(zeros_out)], iter(out[len(zeros_out) :])
        tangents_out = [
            _zero_tangent(p) if zero else next(nonzeros)
            for p, zero in zip(primals_out, zeros_out, strict=True)
        ]
        smooth = {
            k: t
            for k, (c, t) in enumerate(zip(scope.written, state_tangents, strict=True))
            if id(c) not in passed and not _jax.is_symbolic_zero(t) and is_smooth(t)
        }
        new_tangents = [
            tangent_of[id(c)].read() if id(c) in passed else _zero_tangent(x)
            for c, x in zip(scope.written, inside.state, strict=True)
        ]
        if smooth:
            part = through(scope, closed, args, (arrays, state, constants), [*smooth], where)
            _, moved = jax.jvp(part, ([state[k] for k in smooth],), ([*smooth.values()],))
            for k, tangent in zip(smooth, moved, strict=True):
                new_tangents[k] = tangent
        return (primals_out, inside.state), (tangents_out, new_tangents)

    call.defjvp(call_jvp, symbolic_zeros=True)
    return scope.call(call, args)


def _zero_tangent(primal: Any) -> Any:
    if is_smooth(primal):
        return jnp.zeros_like(primal)
    return np.zeros(primal.shape, jax.dtypes.float0)
