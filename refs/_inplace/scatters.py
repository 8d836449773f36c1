"""Stage 7, on one CPU: scatters of a few rows become loops that update one row after the other.

That is what lanes write that choose their places. XLA on CPU takes 0.09 µs for a scatter of 4 rows,
and a loop 0.04. Inside other loops and branches it has its threads do a scatter into 512 KiB or
more: 4 µs. JAX 0.10.2 even writes the whole array there.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from refs import _jax
from refs._indexing.places import longest, narrow
from refs._inplace.body import Body, is_set, replaced
from refs._inplace.gathers import FEWER, are_few
from refs._types import Eqn, Value


def loop_over_small_scatters(body: Body) -> None:
    """Replaces the scatters of one level of a jaxpr that write a few rows of a large array."""
    eqns: list[Eqn] = []
    for eqn in body.eqns:
        adds = eqn.primitive is lax.scatter_add_p
        if (adds or is_set(eqn)) and are_few(eqn, eqn.invars[2]):
            eqns += replaced(
                eqn,
                _updates,
                eqn.invars,
                dims=eqn.params["dimension_numbers"],
                # In any other mode XLA decides, and drops them.
                drops=eqn.params["mode"] != GatherScatterMode.CLIP,
                adds=adds,
            )
        else:
            eqns.append(eqn)
    body.eqns = eqns


def _updates(
    operand: Value,
    indices: Value,
    updates: Value,
    *,
    dims: lax.ScatterDimensionNumbers,
    drops: bool,
    adds: bool,
) -> Value:
    """`lax.scatter` or `lax.scatter_add` by a loop that updates one slice after the other.

    `indices`: as those of `_slices`. `drops`: whether rows that are out of bounds are left out.
    """
    indices = narrow(indices, longest(operand.shape))
    batch = indices.shape[:-1]
    n_rows = int(np.prod(batch))
    gone = (*dims.inserted_window_dims, *dims.operand_batching_dims)
    window = iter(updates.shape[d] for d in dims.update_window_dims)
    sizes = [1 if d in gone else next(window) for d in range(operand.ndim)]
    of_batch = [d for d in range(updates.ndim) if d not in dims.update_window_dims]
    rows = lax.transpose(updates, [*of_batch, *dims.update_window_dims])
    rows = lax.reshape(rows, [n_rows, *sizes])
    places = [jnp.zeros(batch, indices.dtype)] * operand.ndim
    for i, d in enumerate(dims.scatter_dims_to_operand_dims):
        places[d] = lax.index_in_dim(indices, i, -1, keepdims=False)
    for d, b in zip(dims.operand_batching_dims, dims.scatter_indices_batching_dims, strict=True):
        places[d] = lax.broadcasted_iota(indices.dtype, batch, b)
    places = [lax.reshape(p, [n_rows]) for p in places]

    def update(k: Value, operand: Value) -> Value:
        starts = [lax.dynamic_index_in_dim(p, k, keepdims=False) for p in places]
        new = lax.dynamic_index_in_dim(rows, k, keepdims=False)
        old = lax.dynamic_slice(operand, starts, sizes, allow_negative_indices=False)
        if adds:
            new = lax.add(old, new)
        if drops:
            inside = True
            for start, n, size in zip(starts, operand.shape, sizes, strict=True):
                inside &= (start >= 0) & (start <= n - size)
            new = lax.select(inside, new, old)
        return lax.dynamic_update_slice(operand, new, starts, allow_negative_indices=False)

    if n_rows > FEWER:
        return _jax.fori_loop(0, n_rows, update, operand)
    # A loop over very few rows costs more, in counters and calls, than the updates one by one. They
    # are equations here, not left to `unroll`: the next stages put fences between them.
    for k in range(n_rows):
        operand = update(np.int32(k), operand)
    return operand
