"""Rule of functions with a user's VJP rule, which stays in force."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from refs import _jax
from refs.discharge._interpreter import Cell, Context, merge, split
from refs.discharge._registry import register
from refs.errors import RefEscapeError


@register(_jax.custom_vjp_call_p)
def discharge_custom_vjp(ctx: Context, eqn: Any, args: Sequence[Any]) -> list[Any]:
    """The state is threaded through the function and through the user's forward rule.

    The user's backward rule gives the cotangents of the arguments, a ref argument's contents at
    entry among them. The state of a ref that the function closes over has no cotangent: what the
    rule does is all that is differentiated.
    """
    [closed] = _jax.jaxprs_in(eqn.params)
    rule = _jax.vjp_rule(eqn.params)
    scope = ctx.scope((closed, args))
    arguments = args[rule.num_consts :]

    call = jax.custom_vjp(scope.function(closed, args))

    def fwd(arrays: list[Any], state: list[Any], constants: list[Any]) -> Any:
        nonzeros = [True] * len(arguments)
        if rule.symbolic_zeros:
            nonzeros = [
                True if isinstance(a, Cell) else a.perturbed
                for a in merge(args, arrays)[rule.num_consts :]
            ]
            arrays, state, constants = _values((arrays, state, constants))
        inside = scope.enter(state, constants)
        primals = inside.args(merge(args, arrays))
        jaxpr, consts = rule.fwd(nonzeros)
        out = inside.ctx.eval_open(
            jaxpr, [inside.ctx.resolve(c) for c in consts], primals[rule.num_consts :]
        )
        forwards = rule.residual_forwards()
        own = sum(f is None for f in forwards)
        made = iter(out[:own])
        residuals = [next(made) if f is None else primals[f] for f in forwards]
        for r in residuals:
            if isinstance(r, Cell):
                raise RefEscapeError(
                    f"{r.describe()} is a residual of a custom VJP rule, at "
                    f"{_jax.user_line(eqn)}: save its value, `ref[...]`"
                )
        return (out[own:], inside.state), residuals

    def bwd(residuals: list[Any], cotangents: Any) -> Any:
        out_cts, _ = cotangents
        in_cts = [None if _jax.is_symbolic_zero(ct) else ct for ct in rule.bwd(residuals, out_cts)]
        of_ref = {id(a): ct for a, ct in zip(arguments, in_cts, strict=True) if isinstance(a, Cell)}
        arrays = [ct for a, ct in zip(arguments, in_cts, strict=True) if not isinstance(a, Cell)]
        closed_over = split(args[: rule.num_consts])
        return (
            [*([None] * len(closed_over)), *arrays],
            [of_ref.get(id(c)) for c in scope.written],
            [of_ref.get(id(c)) for c in scope.read],
        )

    call.defvjp(fwd, bwd, symbolic_zeros=rule.symbolic_zeros)
    return scope.call(call, args)


def _values(primals: Any) -> Any:
    """The values of a forward rule's arguments, which say whether each is differentiated."""
    return jax.tree.map(lambda p: p.value, primals, is_leaf=lambda p: hasattr(p, "perturbed"))
