"""Rule of JAX's internal `run_state`: arrays in, refs inside, their final values out."""

from __future__ import annotations

from collections.abc import Sequence

from refs import _jax
from refs._discharge.cells import Cell
from refs._discharge.interpreter import Context
from refs._discharge.registry import register
from refs._types import Eqn, Value


@register(_jax.run_state_p, runs_once=True)
def discharge_run_state(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    [closed] = _jax.jaxprs_in(eqn.params)
    given = iter(args)
    cells: list[Cell] = []
    for var, initialised in zip(closed.jaxpr.invars, eqn.params["is_initialized"], strict=True):
        if initialised:
            arg = next(given)
            cells.append(arg if isinstance(arg, Cell) else Cell(arg))
        else:
            cells.append(Cell(_jax.zeros_like_aval(var.aval.inner_aval)))
    ctx.eval(closed, cells)
    return [c.read() for c in cells]
