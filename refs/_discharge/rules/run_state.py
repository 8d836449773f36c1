"""Rule of JAX's internal `run_state`: arrays in, refs inside, their final values out."""

from __future__ import annotations

from collections.abc import Sequence

from refs import _jax
from refs._discharge.cells import Cell
from refs._discharge.interpreter import Context
from refs._discharge.registry import register
from refs._types import Eqn, Value


@register(_jax.run_state_p)
def discharge_run_state(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    [closed] = _jax.jaxprs_in(eqn.params)
    cells = [a if isinstance(a, Cell) else Cell(a) for a in args]
    ctx.eval(closed, cells)
    return [c.read() for c in cells]
