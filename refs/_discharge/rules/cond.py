"""Rule of `cond` and `switch`, which are one primitive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from refs import _jax
from refs._callbacks.primitives import host_callback_p, ref_callback_p
from refs._discharge.cells import merge, split
from refs._discharge.interpreter import Context
from refs._discharge.registry import register
from refs._tracing.facts import Inner
from refs._types import ClosedJaxpr, Eqn, Value


def branches_of(eqn: Eqn) -> Inner:
    for branch in eqn.params["branches"]:
        yield _jax.as_closed(branch), eqn.invars[1:]


@register(_jax.cond_p, inner=branches_of)
def discharge_cond(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    index, *operands = args
    branches = [_jax.as_closed(b) for b in eqn.params["branches"]]
    scope = ctx.scope(*[(b, operands) for b in branches])
    scope.check_same_writes(jax.typeof(index), eqn)
    if ctx.lanes is not None and (
        ctx.lanes.analysis.diverges(eqn) or scope.sums or any(_has_io(ctx, b) for b in branches)
    ):
        return _every_branch(ctx, index, branches, operands)
    constants = scope.constants

    def as_function(branch: ClosedJaxpr) -> Callable[..., Any]:
        return lambda arrays, state: scope.run(branch, merge(operands, arrays), state, constants)

    # Each branch returns the values of all cells that any branch writes.
    out, state = lax.switch(index, [as_function(b) for b in branches], split(operands), scope.state)
    scope.update(state)
    return out


def _has_io(ctx: Context, branch: ClosedJaxpr) -> bool:
    """Whether a branch makes a call with an effect, which JAX doesn't batch: see `callback.py`."""
    repeats = ctx.repeats or _jax.any_equation(
        branch, lambda e: _jax.primitive_of(e) is _jax.remat_p
    )
    return _jax.any_equation(
        branch,
        lambda e: (
            (e.primitive is host_callback_p and bool(e.effects))
            or (repeats and e.primitive is ref_callback_p and e.params["spec"].is_io)
        ),
    )


def _every_branch(
    ctx: Context, index: Value, branches: Sequence[ClosedJaxpr], operands: Sequence[Value]
) -> list[Value]:
    """Runs each branch in all lanes, masked: they diverge, or JAX can't batch its effects."""
    results = []
    for k, branch in enumerate(branches):
        with ctx.where(lax.eq(index, lax.convert_element_type(k, index.dtype))):
            results.append(ctx.eval(branch, operands))
    out = results[0]
    for k, result in enumerate(results[1:], start=1):
        taken = lax.eq(index, lax.convert_element_type(k, index.dtype))
        out = [jnp.where(taken, new, old) for new, old in zip(result, out, strict=True)]
    return out
