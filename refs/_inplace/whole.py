"""Stage 8: what is read from a buffer that is overwritten as a whole is read before.

In `x = x * 0.5 - x[k]` XLA reads `x[k]` again for each element that it writes. So it writes to
other memory, and copies that back. If `x[k]` has passed through a fence, the kernel runs in place.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from refs._inplace.body import (
    Body,
    is_buffer,
    is_like,
    is_read,
    is_small,
    is_update,
    is_var,
    needs_fences,
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
    outputs = {type_of(v): v for v in body.outvars if is_buffer(v)}
    # A walk for each type takes a while, and there is something to find only for few.
    overwritten = {type_of(v) for v in free}
    overwritten &= {type_of(eqn.invars[0]) for _, eqn in fused if is_read(eqn)}
    found: defaultdict[Any, set[int]] = defaultdict(set)
    for whole in (v for of_type, v in outputs.items() if of_type in overwritten):
        made_of = {v for v in free if is_like(v, whole)}  # such buffers, and what is made of them
        read = set()  # the values for which XLA would read from such an array where it uses them
        for _, eqn in fused:
            small, large = _by_size(eqn, whole)
            if not made_of.isdisjoint(large):
                made_of.update(eqn.outvars)
            if not read.isdisjoint(small) or (is_read(eqn) and is_like(eqn.invars[0], whole)):
                read.update(eqn.outvars)
        kernels = {v for v in filter(is_var, body.outvars) if v in made_of and is_like(v, whole)}
        for k, eqn in reversed(fused):
            if not kernels.isdisjoint(eqn.outvars):
                small, large = _by_size(eqn, whole)
                kernels.update(large)
                for v in small:
                    if v in read:
                        found[v].add(k)
    return found


def _by_size(eqn: Eqn, whole: Atom) -> tuple[list[Atom], list[Atom]]:
    """The variables that an equation takes: the small ones, compared with `whole`; the others."""
    small: list[Atom] = []
    large: list[Atom] = []
    for v in filter(is_var, eqn.invars):
        (small if is_small(v, whole) else large).append(v)
    return small, large
