"""Rules of the primitives that make, read, update and end refs."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from refs import _jax
from refs._discharge.cells import Cell
from refs._discharge.interpreter import Context
from refs._discharge.lanes import Accumulator
from refs._discharge.registry import register
from refs._discharge.stored_reads import stored
from refs._indexing.values import neutral_of
from refs._origin import origin_of
from refs._reversible import parts
from refs._tracing.touch import Touch
from refs._types import Eqn, Value


@register(_jax.get_p)
def discharge_get(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    cell, *leaves = args
    if isinstance(cell, Accumulator):
        [out] = eqn.outvars
        return [neutral_of(out.aval, cell.method)]
    value = parts.read(cell.read(), jax.tree.unflatten(eqn.params["tree"], leaves))
    return [stored(ctx, cell, value)]


@register(_jax.swap_p, touch=Touch.WRITE, returns_old=True)
def discharge_swap(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    cell, value, *leaves = args
    transforms = jax.tree.unflatten(eqn.params["tree"], leaves)
    value = _jax.as_array(value)
    if isinstance(cell, Accumulator):
        cell.update(ctx.lanes, transforms, value)
        return [None]
    before = cell.read()
    old = None
    if ctx.is_used(eqn):
        old = stored(ctx, cell, parts.read(before, transforms))
    cell.write(parts.update(before, transforms, "set", value, _mask(ctx)))
    return [old]


@register(_jax.addupdate_p, touch=Touch.ACCUMULATE)
def discharge_addupdate(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    cell, value, *leaves = args
    transforms = jax.tree.unflatten(eqn.params["tree"], leaves)
    value = _jax.as_array(value)
    if isinstance(cell, Accumulator):
        cell.update(ctx.lanes, transforms, value)
    else:
        cell.write(parts.update(cell.read(), transforms, "add", value, _mask(ctx)))
    return []


def _mask(ctx: Context) -> Value | None:
    """Whether a lane of `vmap` takes part in what is discharged; None outside of lanes."""
    return None if ctx.lanes is None else ctx.lanes.mask


@register(_jax.new_ref_p)
def discharge_new_ref(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    cell = _made_by(eqn)
    value = _jax.in_device_memory(_jax.as_array(args[0]))
    cell.write(parts.new_version(value, cell.origin))
    return [cell]


@register(_jax.empty_ref_p)
def discharge_empty_ref(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    cell = _made_by(eqn)
    ty = eqn.params["ty"]
    cell.write(parts.new_version(jnp.zeros(ty.shape, ty.dtype), cell.origin))
    return [cell]


@register(_jax.freeze_p, touch=Touch.READ)
def discharge_freeze(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    [cell] = args
    value = cell.read()
    cell.end("freeze", f"was frozen at {_jax.user_line(eqn)}")
    return [value]


@register(_jax.free_ref_p)
def discharge_free_ref(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    [cell] = args
    cell.end("free_ref", f"was freed at {_jax.user_line(eqn)}")
    return []


@register(_jax.accum_grad_in_ref_p)
def discharge_accum_grad_in_ref(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    return list(args)


def _made_by(eqn: Eqn) -> Cell:
    [var] = eqn.outvars
    cell = Cell(None, origin_of(var.aval))
    cell.made_here = True
    return cell


@register(*_jax.passing_primitives, touch=Touch.NONE)
def discharge_passing(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    return [*args]
