"""Values that a checkpointed function reads from refs, to be stored instead of the refs."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from refs._discharge.cells import Cell
from refs._discharge.interpreter import Context
from refs._tracing.discharged import are_parts_kept
from refs._types import Value

READ = "refs.read"


def stored(ctx: Context, cell: Cell, value: Value) -> Value:
    """`value`, read from `cell`; named, so that it is stored, if that saves storing the ref."""
    is_stored = ctx.keeps_reads and not are_parts_kept()  # Reversible functions undo all reads.
    saves = is_stored and cell.changes and 2 * value.size <= cell.read().size
    if not saves:
        return value
    if jnp.iscomplexobj(value):  # JAX can't store a complex value by its name.
        return lax.complex(*(checkpoint_name(x, READ) for x in (value.real, value.imag)))
    return checkpoint_name(value, READ)
