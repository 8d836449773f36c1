"""Rule of functions with a user's JVP rule, which stays in force."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.custom_derivatives import zero_from_primal

from refs import _jax
from refs._discharge.cells import merge, root, split
from refs._discharge.custom_rules import changed_by, check_given, eval_rule, is_smooth, through
from refs._discharge.interpreter import Context
from refs._discharge.registry import register
from refs._types import Eqn, PyTree, RefLike, Value


@register(_jax.custom_jvp_call_p, runs_once=True)
def discharge_custom_jvp(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    """Threads the state through the function and through the user's rule.

    A ref argument has a tangent cell, which the rule reads and writes. The tangent of a ref that
    the rule doesn't write, or that the function closes over, is propagated through the function's
    updates of the ref (see `through`). The dependence of the ref's contents on the function's other
    arguments isn't followed: the rule accounts for all of it.
    """
    [closed] = _jax.jaxprs_in(eqn.params)
    rule = _jax.jvp_rule(eqn)
    scope = ctx.scope((closed, args), rules_of=eqn)
    where, n_read = _jax.user_line(eqn), len(scope.read)

    # The refs that lanes accumulate into are arguments, so that their tangents accumulate, too.
    def function(
        arrays: list[Value], state: list[Value], constants: list[Value], sums: list[RefLike]
    ) -> tuple[list[Value], list[Value]]:
        return scope.enter(state, constants, sums).run(closed, merge(args, arrays))

    function.__name__ = _jax.function_name(closed)  # for messages
    call = jax.custom_jvp(function)

    def call_jvp(primals: PyTree, tangents: PyTree) -> Any:
        arrays, state, constants, sums = primals
        array_tangents, state_tangents, constant_tangents, sum_tangents = tangents
        known, tangents_of_known = constants[:n_read], constant_tangents[:n_read]
        moves = [not _jax.is_symbolic_zero(t) for t in tangents_of_known]
        check_given(scope, args[rule.num_consts :], known, moves, where)
        inside = scope.enter(state, constants, sums)
        along = scope.enter(
            [_jax.instantiate(t) for t in state_tangents],
            # After the values of refs come scalars of the lanes, which have no tangents.
            [*map(_jax.instantiate, tangents_of_known), *constants[n_read:]],
            [None if _jax.is_symbolic_zero(t) else t for t in sum_tangents],
            are_tangents=True,
        )
        primal_args = inside.args(merge(args, arrays))[rule.not_given :]
        tangent_args = along.args(merge(args, array_tangents))[rule.not_given :]
        if not rule.symbolic_zeros:
            tangent_args = [_jax.instantiate(t) for t in tangent_args]
        zeros_in = [_jax.is_symbolic_zero(t) for t in tangent_args]
        jaxpr, consts, zeros_out = rule.trace(zeros_in)
        given = [*primal_args, *(t for t in tangent_args if not _jax.is_symbolic_zero(t))]
        consts = [inside.ctx.resolve(c) for c in consts]
        out = eval_rule(inside.ctx, jaxpr, consts, given, where)
        primals_out, nonzeros = out[: len(zeros_out)], iter(out[len(zeros_out) :])
        tangents_out = [
            zero_from_primal(p, symbolic_zeros=True) if zero else next(nonzeros)
            for p, zero in zip(primals_out, zeros_out, strict=True)
        ]
        said = {id(root(x)) for x in changed_by(jaxpr, consts, given)}
        followed = {
            k: t
            for k, (c, t) in enumerate(zip(scope.written, state_tangents, strict=True))
            if id(along.cell(c)) not in said
            and not scope.is_held(c)
            and not _jax.is_symbolic_zero(t)
            and is_smooth(t)
        }
        new_tangents = along.state
        if followed:
            part = through(scope, closed, args, (arrays, state, constants), [*followed], where)
            _, moved = jax.jvp(part, ([state[k] for k in followed],), ([*followed.values()],))
            for k, tangent in zip(followed, moved, strict=True):
                new_tangents[k] = tangent
        return (primals_out, inside.state), (tangents_out, new_tangents)

    call.defjvp(call_jvp, symbolic_zeros=True)
    out, state = call(split(args), scope.state, scope.constants, scope.sums)
    scope.update(state)
    return out
