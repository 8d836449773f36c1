"""Rule of functions with a user's VJP rule, which stays in force."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from refs import _jax
from refs._access import describe
from refs.discharge._cells import Cell
from refs.discharge._custom import eval_rule, is_smooth, through
from refs.discharge._interpreter import Context, merge, split
from refs.discharge._lanes import Lanes
from refs.discharge._late import apply_backward, found_later
from refs.discharge._program import Program, run_in_lanes
from refs.discharge._registry import register
from refs.errors import RefEscapeError


@register(_jax.custom_vjp_call_p)
def discharge_custom_vjp(ctx: Context, eqn: Any, args: Sequence[Any]) -> list[Any]:
    """The state is threaded through the function and through the user's forward rule.

    The user's backward rule gives the cotangents of the arguments, a ref argument's contents at
    entry among them, as far as the outputs depend on them. How what refs hold afterwards depends on
    what they held is followed through what the function does to them; how it depends on the
    function's arguments isn't: of those, the rule has said all. What the backward rule does to refs
    happens when the backward pass runs, to the refs themselves.
    """
    [closed] = _jax.jaxprs_in(eqn.params)
    rule = _jax.vjp_rule(eqn.params)
    scope = ctx.scope((closed, args))
    where, variance = _jax.user_line(eqn), ctx.lanes and ctx.lanes.variance
    n_flags = len(scope.constants) - len(scope.read)
    n_sums = len(scope.sums)
    # The backward pass comes when the values of this interpretation are gone: it knows cells by id.
    n_closed_over = len(split(args[: rule.num_consts]))
    cell_ids = [id(a) if isinstance(a, Cell) else None for a in args[rule.num_consts :]]
    written_ids, read_ids = [id(c) for c in scope.written], [id(c) for c in scope.read]

    # The lanes' sums are arguments: JAX won't have a ref differentiated that a custom function
    # closes over, and doesn't know that these aren't.
    @jax.custom_vjp
    def call(arrays: Any, state: list[Any], constants: list[Any], sums: list[Any]) -> Any:
        inside = scope.enter(state, constants, sums)
        return inside.ctx.eval(closed, inside.args(merge(args, arrays))), inside.state

    def fwd(arrays: list[Any], state: list[Any], constants: list[Any], sums: list[Any]) -> Any:
        of_cell = {id(c): p.perturbed for c, p in zip(scope.written, state, strict=True)}
        of_cell |= {id(c): p.perturbed for c, p in zip(scope.read, constants, strict=False)}
        nonzeros = [
            of_cell.get(id(a), False) if isinstance(a, Cell) else a.perturbed
            for a in merge(args, arrays)[rule.num_consts :]
        ]
        arrays, state, constants, sums = _values((arrays, state, constants, sums))

        inside = scope.enter(state, constants, sums)
        primals = inside.args(merge(args, arrays))
        jaxpr, consts = rule.fwd(nonzeros)
        consts = [inside.ctx.resolve(c) for c in consts]
        out = eval_rule(inside.ctx, jaxpr, consts, primals[rule.num_consts :], where)
        forwards = rule.residual_forwards()
        own = sum(f is None for f in forwards)
        made = iter(out[:own])
        residuals = [next(made) if f is None else primals[f] for f in forwards]
        for r in residuals:
            if isinstance(r, Cell):
                raise RefEscapeError(
                    f"{r.describe()} is a residual of a custom VJP rule, at {where}: save its "
                    "value, `ref[...]`"
                )
        smooth = [k for k, x in enumerate(state) if is_smooth(x)]
        pull = None
        if any(of_cell[written_ids[k]] for k in smooth):
            part = through(scope, closed, args, (arrays, state, constants), smooth, where)
            _, pull = jax.vjp(part, [state[k] for k in smooth])
        return (out[own:], inside.state), (residuals, constants[len(scope.read) :], pull)

    def bwd(saved: Any, cotangents: Any) -> Any:
        residuals, flags, pull = saved
        out_cts, state_cts = cotangents
        if not rule.symbolic_zeros:
            out_cts = [_jax.instantiate(ct) for ct in out_cts]

        def run(traced: Any, arrays: list[Any]) -> list[Any]:
            program = Program.of(traced)
            if program.refs and jax.sharding.get_abstract_mesh().manual_axes:
                raise RefEscapeError(
                    f"the backward rule at {where} touches {describe(program.refs[0])} inside of "
                    "shard_map, where a ref from outside can't be written after the forward pass: "
                    "return what it writes as a cotangent, or apply shard_map inside"
                )

            def found(consts: Sequence[Any]) -> list[Any]:
                return [found_later(c, scope.bindings, where) for c in consts]

            if variance is None:
                return _jax.eval_jaxpr(traced, found(traced.consts), arrays)
            lanes = Lanes(variance, *flags)
            return run_in_lanes(program, found(program.refs), found(program.arrays), arrays, lanes)

        def backward(*given: Any) -> list[Any]:
            return rule.bwd(given[: len(residuals)], given[len(residuals) :])

        in_cts = apply_backward(backward, [*residuals, *out_cts], run)
        in_cts = [None if _jax.is_symbolic_zero(ct) else ct for ct in in_cts]
        of_ref: dict[Any, Any] = {}
        for key, ct in zip(cell_ids, in_cts, strict=True):
            if key is not None:
                of_ref[key] = _sum(of_ref.get(key), ct)
        arrays = [ct for key, ct in zip(cell_ids, in_cts, strict=True) if key is None]
        state_in = [of_ref.get(key) for key in written_ids]
        if pull is not None:
            smooth = [k for k, ct in enumerate(state_cts) if is_smooth(ct)]
            [passed] = pull([_jax.instantiate(state_cts[k]) for k in smooth])
            for k, ct in zip(smooth, passed, strict=True):
                state_in[k] = _sum(state_in[k], ct)
        return (
            [*([None] * n_closed_over), *arrays],
            state_in,
            [*(of_ref.get(key) for key in read_ids), *([None] * n_flags)],
            [None] * n_sums,
        )

    # Always: JAX must be told what is not differentiated, closed-over refs for instance.
    call.defvjp(fwd, bwd, symbolic_zeros=True)
    out, state = call(split(args), scope.state, scope.constants, scope.sums)
    scope.update(state)
    return out


def _sum(a: Any, b: Any) -> Any:
    """The sum of two cotangents, of which None is zero."""
    return b if a is None else a if b is None else a + b


def _values(primals: Any) -> Any:
    """The values of a forward rule's arguments, which say whether each is differentiated."""
    return jax.tree.map(lambda p: p.value, primals, is_leaf=lambda p: hasattr(p, "perturbed"))
