"""Stage 5: gathers of a few rows of a large array become slices.

XLA on CPU distributes a gather from a large array over its threads, however few elements it reads:
that costs 4 µs for 8 elements of a megabyte. XLA reads slices where it uses them.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from refs._inplace.body import Body, size, splice
from refs._types import Atom, Eqn, Value

# The size in bytes from which XLA uses its threads, and how many rows still make a small program.
LARGE, FEW = 2**19, 32


def slice_small_gathers(body: Body) -> None:
    """Replaces the gathers of one level of a jaxpr that read a few rows of a large array."""
    eqns: list[Eqn] = []
    for eqn in body.eqns:
        if eqn.primitive is lax.gather_p and _is_worth_it(eqn):
            p = eqn.params
            made, [out] = splice(
                _slices, eqn.invars, eqn, dims=p["dimension_numbers"], sizes=p["slice_sizes"]
            )
            eqns += [e.replace(outvars=eqn.outvars) if e.outvars[0] is out else e for e in made]
        else:
            eqns.append(eqn)
    body.eqns = eqns


def _is_worth_it(eqn: Eqn) -> bool:
    operand: Atom
    indices: Atom
    operand, indices = eqn.invars
    dtype = operand.aval.dtype
    return (
        eqn.params["mode"] in (GatherScatterMode.CLIP, GatherScatterMode.PROMISE_IN_BOUNDS)
        and isinstance(dtype, np.dtype)
        and size(operand) * dtype.itemsize >= LARGE
        and 0 < size(eqn.outvars[0]) <= size(operand) // 16
        and int(np.prod(indices.aval.shape[:-1])) <= FEW
    )


def _slices(
    operand: Value, indices: Value, *, dims: lax.GatherDimensionNumbers, sizes: tuple[int, ...]
) -> Value:
    """`lax.gather` by dynamic slices, which clamp their indices as it does.

    `indices`: `[*batch, n_axes]`, the starts of slices of shape `sizes`.
    """
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
