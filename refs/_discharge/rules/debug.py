"""Rule of `jax.debug.print` and `jax.debug.callback`: they get the values of refs."""

from __future__ import annotations

from collections.abc import Sequence

from refs import _jax
from refs._discharge.cells import Cell
from refs._discharge.interpreter import Context
from refs._discharge.registry import register
from refs._tracing.touch import Touch
from refs._types import Eqn, Value


@register(*_jax.debug_primitives, touch=Touch.READ)
def discharge_debug(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    return _jax.bind_eqn(eqn, [a.read() if isinstance(a, Cell) else a for a in args])
