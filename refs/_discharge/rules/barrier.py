"""Rule of `optimization_barrier`: the values of refs pass through it, too."""

from __future__ import annotations

from collections.abc import Sequence

from jax import lax

from refs._discharge.cells import Cell, root
from refs._discharge.interpreter import Context
from refs._discharge.registry import register
from refs._tracing.touch import Touch
from refs._types import Eqn, Value


# The effects of a barrier only keep an order: it touches no ref.
@register(lax.optimization_barrier_p, touch=Touch.NONE, is_computed_once=True)
def discharge_optimization_barrier(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    out = list(args)
    # Cells of refs that nothing else here touches have no value, nor have accumulators.
    held = [a if not isinstance(a, Cell) else None if root(a).is_idle else a.read() for a in args]
    places = [k for k, x in enumerate(held) if x is not None]
    for k, x in zip(places, lax.optimization_barrier([held[k] for k in places]), strict=True):
        if not isinstance(args[k], Cell):
            out[k] = x
        elif root(args[k]).sealed is None:
            args[k].write(x)
    # On JAX 0.12 a barrier returns no refs.
    is_returned = len(eqn.outvars) == len(args)
    return [x for x in out if is_returned or not isinstance(x, Cell)]
