"""Stage 4, on one CPU: gathers of a few rows become slices.

XLA on CPU distributes a gather from a large array over its threads, however few elements it reads:
that costs 4 µs for 8 elements of a megabyte. With JAX 0.10.2 a gather of 4 rows from a small array
in a loop takes five times as long as slices, too. XLA reads slices where it uses them.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from refs._indexing.places import longest, narrow
from refs._inplace.body import can_pass, replaced, size
from refs._inplace.flatten import map_inner
from refs._types import Atom, Aval, Eqn, Jaxpr, Value

# How many rows still make a small program; and how many if the array is smaller than `LARGE`, the
# size in bytes from which XLA uses its threads.
FEW, FEWER, LARGE = 32, 8, 2**19


def slice_small_gathers(jaxpr: Jaxpr, known: dict[int, tuple[Jaxpr, Jaxpr]]) -> Jaxpr:
    """The jaxpr, and those in it, with slices for gathers that read a few rows of a large array.

    `known` are the jaxprs seen in this pass and their results, by id.
    """
    if id(jaxpr) not in known:
        eqns: list[Eqn] = []
        for eqn in jaxpr.eqns:
            if eqn.primitive is lax.gather_p and _is_worth_it(eqn):
                p = eqn.params
                dims, sizes = p["dimension_numbers"], p["slice_sizes"]
                eqns += replaced(eqn, _slices, eqn.invars, dims=dims, sizes=sizes)
            else:
                eqns.append(map_inner(eqn, lambda inner: slice_small_gathers(inner, known)))
        known[id(jaxpr)] = jaxpr, jaxpr.replace(eqns=eqns)
    return known[id(jaxpr)][1]


def _is_worth_it(eqn: Eqn) -> bool:
    aval: Aval = eqn.invars[0].aval
    return (
        eqn.params["mode"] != GatherScatterMode.FILL_OR_DROP
        and are_few(eqn, eqn.outvars[0])
        and (_n_rows(eqn) <= FEWER or size(eqn.invars[0]) * aval.dtype.itemsize >= LARGE)
    )


def are_few(eqn: Eqn, rows: Atom) -> bool:
    """Whether the rows of a gather or scatter are few, and a small part of its operand."""
    operand = eqn.invars[0]
    return can_pass(operand) and 0 < 16 * size(rows) <= size(operand) and 0 < _n_rows(eqn) <= FEW


def _n_rows(eqn: Eqn) -> int:
    """How many rows a gather or scatter names."""
    indices: Aval = eqn.invars[1].aval
    return int(np.prod(indices.shape[:-1]))


def _slices(
    operand: Value, indices: Value, *, dims: lax.GatherDimensionNumbers, sizes: tuple[int, ...]
) -> Value:
    """`lax.gather` by dynamic slices, which clamp their indices as it does.

    `indices`: `[*batch, n_axes]`, the starts of slices of shape `sizes`.
    """
    indices = narrow(indices, longest(operand.shape))
    batch = indices.shape[:-1]
    gone = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
    kept = [n for d, n in enumerate(sizes) if d not in gone]
    zero = jnp.zeros((), indices.dtype)
    rows = []
    for where in np.ndindex(*batch):
        starts = [zero] * operand.ndim
        for i, d in enumerate(dims.start_index_map):
            starts[d] = lax.index_in_dim(indices[where], i, keepdims=False)
        for d, b in zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True):
            starts[d] = jnp.array(where[b], indices.dtype)
        row = lax.dynamic_slice(operand, starts, sizes, allow_negative_indices=False)
        rows.append(lax.reshape(row, (1, *kept)))
    out = lax.reshape(lax.concatenate(rows, 0), (*batch, *kept))
    # The dimensions of a row go where `offset_dims` says, those of the batch around them.
    order = iter(range(len(batch)))
    rest = iter(range(len(batch), out.ndim))
    permutation = [next(rest) if d in dims.offset_dims else next(order) for d in range(out.ndim)]
    return lax.transpose(out, permutation)
