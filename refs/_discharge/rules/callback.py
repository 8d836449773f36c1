"""Rules of callbacks: `ref_callback` becomes a `host_callback` over the values of the refs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from refs._callbacks.plan import Plan
from refs._callbacks.primitives import host_callback_p, ref_callback_p
from refs._discharge.cells import Row, root
from refs._discharge.interpreter import Context
from refs._discharge.registry import register
from refs._tracing.trace import unique
from refs._types import Eqn, Value
from refs.errors import RefTypeError


@register(ref_callback_p, can_fail=True)
def discharge_ref_callback(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    spec = eqn.params["spec"]
    n = len(spec.origins)
    # A step of a `scan` over a ref has a row of it: the operands are the whole and the row's index.
    roots, places = unique([root(cell) for cell in args[:n]])
    indices = [_row_of(cell) for cell in args[:n]]
    has_mask = ctx.lanes is not None and ctx.lanes.mask is not None
    plan = Plan(
        spec,
        len(roots),
        has_mask,
        tuple((k, len(index)) for k, index in zip(places, indices, strict=True)),
        numbers=tuple(cell.number for cell in roots),
        by_lane=ctx.lanes is not None,
    )
    if spec.is_io and ctx.repeats and ctx.differentiated:
        raise RefTypeError(
            f"{spec.describe()} in a checkpointed function that is differentiated: the backward "
            "pass would call it again. Call it outside of `checkpoint`, or use `pure_callback` if "
            "that does no harm"
        )
    # JAX runs programs that have an effect slower, and refuses to batch some. Without one, the call
    # is kept because it returns state, or by the in-place pass (`must_run` in
    # `_inplace/body.py`); but JAX must not repeat it.
    is_io = spec.is_io and ctx.repeats
    mask = [ctx.lanes.mask] if has_mask else []  # type: ignore[union-attr]
    operands = [*mask, *(i for index in indices for i in index), *args[n:]]
    out = host_callback_p.bind(
        *(cell.read() for cell in roots), *operands, plan=plan, n_kept=0, is_io=is_io
    )
    for cell, value in zip(roots, out, strict=False):
        cell.write(value)
    return list(out[len(roots) :])


def carries(eqn: Eqn) -> tuple[int, int]:
    return 0, eqn.params["plan"].n_roots + eqn.params["n_kept"]


@register(host_callback_p, carries=carries, is_computed_once=True, can_fail=True)
def discharge_host_callback(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    """A callback without refs, in lanes: each calls it; where they diverge, those in the mask."""
    assert ctx.lanes is not None, "outside of lanes it is evaluated as it is"
    plan: Plan = eqn.params["plan"]._replace(by_lane=True)
    if (mask := ctx.lanes.mask) is not None:
        roots, rest = args[: plan.n_roots], args[plan.n_roots :]
        if plan.has_mask:
            mask, rest = jnp.logical_and(mask, rest[0]), rest[1:]
        plan, args = plan.with_mask(), (*roots, mask, *rest)
    return list(host_callback_p.bind(*args, **{**eqn.params, "plan": plan}))


def _row_of(cell: Any) -> list[Value]:
    """The indices of a row in its root, int32 scalars, outermost first; none for any other cell."""
    found: list[Value] = []
    while isinstance(cell, Row):
        found.insert(0, cell.index)
        cell = cell.whole
    return found
