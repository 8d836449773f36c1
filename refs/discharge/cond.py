"""Rule of `cond` and `switch`, which are one primitive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from refs import _jax
from refs.discharge._interpreter import Context, merge, split
from refs.discharge._registry import register


@register(_jax.cond_p)
def discharge_cond(ctx: Context, eqn: Any, args: Sequence[Any]) -> list[Any]:
    index, *operands = args
    branches = [_jax.as_closed(b) for b in eqn.params["branches"]]
    scope = ctx.scope(*[(b, operands) for b in branches])
    constants = scope.constants

    def as_function(branch: Any) -> Callable[..., Any]:
        return lambda arrays, state: scope.run(branch, merge(operands, arrays), state, constants)

    # Every branch returns the cells that any branch writes.
    out, state = lax.switch(index, [as_function(b) for b in branches], split(operands), scope.state)
    scope.update(state)
    return out
