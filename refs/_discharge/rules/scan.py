"""Rule of `scan`, of `map` and of the `fori_loop`s that become one."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from refs import _jax
from refs._discharge.cells import Cell, merge, split
from refs._discharge.interpreter import Context
from refs._discharge.registry import register
from refs._types import Eqn, PyTree, Value


def carries(eqn: Eqn) -> tuple[int, int]:
    p = _jax.scan_params(eqn)
    return p.num_consts, p.num_carry


@register(_jax.scan_p, carries=carries, is_computed_once=True)
def discharge_scan(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    """A ref that the body closes over is carried if it is written, and a constant otherwise.

    A ref among the scanned-over operands gives each step its row: the whole ref is carried (or
    constant), and the step reads and writes at its index, in place.
    """
    p = _jax.scan_params(eqn)
    args = [args[k] for k in p.order]
    consts, init = args[: p.num_consts], args[p.num_consts : p.num_consts + p.num_carry]
    xs = args[p.num_consts + p.num_carry :]
    scope = ctx.scope((p.jaxpr, args))
    constants = scope.constants

    def step(loop: PyTree, x: PyTree) -> PyTree:
        carry, state = loop
        index, rows = x
        row_args = [a.row(index) if isinstance(a, Cell) else a for a in merge(xs, rows)]
        out, state = scope.run(p.jaxpr, [*consts, *carry, *row_args], state, constants)
        return (out[: p.num_carry], state), out[p.num_carry :]

    has_rows = any(isinstance(x, Cell) for x in xs)
    if has_rows and not p.length:  # There are no rows to trace the body with.
        return [*init, *(_jax.zeros_like_aval(v.aval) for v in eqn.outvars[p.num_carry :])]
    index = jnp.arange(p.length, dtype=jnp.int32) if has_rows else None
    scanned = (index, split(xs))
    (carry, state), ys = _jax.scan(
        step,
        (init, scope.state),
        scanned,
        length=None if jax.tree.leaves(scanned) else p.length,  # It may be a symbol.
        reverse=p.reverse,
        unroll=p.unroll,
    )
    scope.update(state)
    return [*carry, *ys]
