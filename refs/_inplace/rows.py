"""On one CPU: a few rows of a large array are written one by one; `normal` reads so.

XLA on CPU distributes a gather from a large array, and a scatter into one, over its threads,
however few elements it touches: that costs 4 µs. With JAX 0.10.2 a gather of 4 rows from a small
array in a loop takes five times as long as slices, too, and a scatter in a loop writes the whole
array. Lanes that choose their places read and write such rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from jax import lax

from refs import _jax
from refs._indexing.access import Access, Along, Place
from refs._indexing.accesses import read_p, update_p
from refs._indexing.places import place_dtype
from refs._inplace.atoms import can_pass, size
from refs._inplace.body import Body, replaced
from refs._inplace.model import is_update
from refs._types import Aval, Eqn, Primitive, Value

# How many rows still make a small program; and how many if the array is smaller than `LARGE`, the
# size in bytes from which XLA uses its threads.
FEW, FEWER, LARGE = 32, 8, 2**19

# Only rows that are such a part of an array, or less, are few.
PART = 16


def are_few(eqn: Eqn, access: Access | None = None) -> bool:
    """Whether an access, or a gather or scatter as one, is of a few rows, a small part of all."""
    access = access or eqn.params["access"]
    assert access is not None
    operand = eqn.invars[0]
    aval: Aval = operand.aval
    n = math.prod(access.batch)
    is_part = can_pass(operand) and 0 < PART * math.prod(access.shape) <= size(operand)
    if not is_part or not 0 < n <= FEW:
        return False
    return n <= FEWER or is_update(eqn) or size(operand) * aval.dtype.itemsize >= LARGE


def read_row_by_row(body: Body) -> None:
    """Replaces the reads of one level of a jaxpr of a few rows of a large array."""
    body.eqns = [new for eqn in body.eqns for new in _one_by_one(eqn, read_p, _read)]


def update_row_by_row(body: Body) -> None:
    """Replaces the updates of one level of a jaxpr that write a few rows of a large array."""
    body.eqns = [new for eqn in body.eqns for new in _one_by_one(eqn, update_p, _update)]


def _one_by_one(eqn: Eqn, primitive: Primitive, fun: Callable[..., Value]) -> list[Eqn]:
    if eqn.primitive is not primitive or not eqn.params["access"].batch or not are_few(eqn):
        return [eqn]
    return replaced(eqn, fun, eqn.invars, **eqn.params)


def _read(x: Value, *operands: Value, access: Access) -> Value:
    row, of_rows = _rows(access, operands)
    blocks = []
    for k in range(math.prod(access.batch)):
        places = [lax.index_in_dim(o, k, keepdims=False) for o in of_rows]
        blocks.append(lax.expand_dims(read_p.bind(x, *places, access=row), [0]))
    return lax.reshape(lax.concatenate(blocks, 0), access.shape)


def _update(x: Value, value: Value, *operands: Value, access: Access, method: str) -> Value:
    row, of_rows = _rows(access, operands)
    n = math.prod(access.batch)
    blocks = lax.reshape(value, (n, *row.sizes))

    def update(k: Value, x: Value) -> Value:
        block, *places = (
            lax.dynamic_index_in_dim(o, k, keepdims=False) for o in (blocks, *of_rows)
        )
        return update_p.bind(x, block, *places, access=row, method=method)

    if n > FEWER:
        return _jax.fori_loop(0, n, update, x)
    # A loop over very few rows costs more, in counters and calls, than the updates one by one. They
    # are equations here, not left to `unroll`: the next stages put fences between them.
    for k in range(n):
        x = update(np.int32(k), x)
    return x


def _rows(access: Access, operands: tuple[Value, ...]) -> tuple[Access, list[Value]]:
    """The access to one block, and its operands as `[n_blocks]`."""
    n = math.prod(access.batch)
    rest = iter(operands)
    found: list[Value] = []
    for start in access.starts:
        if isinstance(start, Along):
            dtype = place_dtype(n)
            found.append(lax.broadcasted_iota(dtype, access.batch, start.batch_axis))
        elif isinstance(start, Place):
            found.append(next(rest))
    starts = [Place(wraps=False) if isinstance(s, Along) else s for s in access.starts]
    row = Access(tuple(starts), access.sizes, is_masked=access.is_masked)
    return row, [lax.reshape(o, (n,)) for o in (*found, *rest)]
