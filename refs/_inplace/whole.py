"""Stage 6: what is read from a buffer that is overwritten as a whole is read before.

In `x = x * 0.5 - x[k]` XLA reads `x[k]` again for each element that it writes. So it writes to
other memory, and copies that back. If `x[k]` has passed through a fence, the kernel runs in place.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from operator import or_
from typing import Any

from refs._inplace.body import (
    Body,
    is_buffer,
    is_read,
    is_update,
    is_var,
    needs_fences,
    size,
    substitute,
    type_of,
)
from refs._inplace.fence import passed
from refs._inplace.order import is_computed_once
from refs._types import Atom, Eqn


def fence_reads_of_whole(body: Body, on_cpu: bool) -> None:
    """Puts fences before the kernels that overwrite a buffer and take what was read from it."""
    users = _users(body)
    if not users:
        return
    constants = body.constants()
    names: dict[Any, Atom] = {}
    waiting: dict[Any, None] = {}
    eqns: list[Eqn] = []
    for k, eqn in enumerate(body.eqns):
        if any(v in waiting and k in users[v] for v in filter(is_var, eqn.invars)):
            # One fence for all that has been read so far: no kernel starts before.
            fence = passed([*waiting], eqn, constants, on_cpu)
            eqns += fence.eqns
            names |= fence.names
            waiting = {}
        eqns.append(substitute(eqn, names))
        waiting |= {v: None for v in eqn.outvars if v in users}
    body.eqns = eqns


def _users(body: Body) -> dict[Any, set[int]]:
    """The small values that kernels take which may overwrite what these were read from.

    For each, the equations of the kernels that take it.
    """
    # XLA computes these where their results are used. They are in order: only loops and branches,
    # which aren't among them, can stand before what they take (see `accumulate`).
    fused = [
        (k, eqn) for k, eqn in enumerate(body.eqns) if not (is_update(eqn) or is_computed_once(eqn))
    ]
    inputs = {v for v in body.jaxpr.invars if is_buffer(v) and needs_fences(v)}
    free = inputs.difference(filter(is_var, body.outvars))
    overwritten = {*map(type_of, free)} & {type_of(v) for v in body.outvars if is_buffer(v)}
    overwritten &= {type_of(eqn.invars[0]) for _, eqn in fused if is_read(eqn)}
    if not overwritten:
        return {}
    # One walk for all types of buffers: a set of types is a number with a bit for each.
    bits: dict[Any, int] = {of_type: 1 << n for n, of_type in enumerate(overwritten)}

    def bit(v: Atom) -> int:
        return bits.get(type_of(v), 0)

    @functools.cache
    def small(size: int) -> int:
        """The types of which a buffer is large, compared with so many elements."""
        return sum(bits[shape, dtype] for shape, dtype in bits if 2 * size <= math.prod(shape))

    made_of: dict[Any, int] = {v: bit(v) for v in free}  # such buffers, and what is made of them
    read: dict[Any, int] = {}  # the values for which XLA would read from one where it uses them
    for _, eqn in fused:
        whole, part = 0, bit(eqn.invars[0]) if is_read(eqn) else 0
        for v in filter(is_var, eqn.invars):
            whole |= made_of.get(v, 0) & ~small(size(v))
            part |= read.get(v, 0) & small(size(v))
        for v in eqn.outvars:
            made_of[v], read[v] = whole, part
    found: defaultdict[Any, set[int]] = defaultdict(set)
    kernels: dict[Any, int] = {v: bit(v) & made_of.get(v, 0) for v in body.outvars if is_buffer(v)}
    for k, eqn in reversed(fused):
        if of_kernel := functools.reduce(or_, (kernels.get(v, 0) for v in eqn.outvars), 0):
            for v in filter(is_var, eqn.invars):
                kernels[v] = kernels.get(v, 0) | of_kernel & ~small(size(v))
                if read.get(v, 0) & of_kernel & small(size(v)):
                    found[v].add(k)
    return found
