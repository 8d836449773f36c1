"""Stage 8: what is read from a buffer that is overwritten as a whole is read before.

In `x = x * 0.5 - x[k]` XLA reads `x[k]` again for each element that it writes. So it writes to
other memory, and copies that back. If `x[k]` has passed through a fence, the kernel runs in place.
"""

from __future__ import annotations

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
)
from refs._inplace.fence import passed
from refs._inplace.order import is_computed_once
from refs._types import Atom, Eqn


def fence_reads_of_whole(body: Body, on_cpu: bool) -> None:
    """Puts fences before the kernels that overwrite a buffer and take what was read from it."""
    users = _Kernels(body).users()
    if not users:
        return
    constants = body.constants()
    names: dict[Any, Atom] = {}
    waiting: list[Atom] = []
    eqns: list[Eqn] = []
    for k, eqn in enumerate(body.eqns):
        if any(v in waiting and k in users[v] for v in filter(is_var, eqn.invars)):
            # One fence for all that has been read so far: no kernel starts before.
            fence = passed(waiting, eqn, constants, on_cpu)
            eqns += fence.eqns
            names |= fence.names
            waiting = []
        eqns.append(substitute(eqn, names))
        waiting += [v for v in eqn.outvars if v in users]
    body.eqns = eqns


class _Kernels:
    """What XLA fuses into the kernels that compute the results of a body."""

    def __init__(self, body: Body):
        self.body, self.made_by = body, body.producers()
        inputs = {v for v in body.jaxpr.invars if is_buffer(v) and needs_fences(v)}
        self.free = inputs.difference(filter(is_var, body.outvars))

    def users(self) -> dict[Any, set[int]]:
        """The small values that kernels take which may overwrite what these were read from.

        For each, the equations of the kernels that take it.
        """
        found: dict[Any, set[int]] = {}
        for out in filter(is_buffer, self.body.outvars):
            parts: dict[Any, set[int]] = {}
            is_free, rest, seen = False, [out], {out}
            while rest:
                v = rest.pop()
                is_free |= v in self.free and is_like(v, out)
                k = self.fused(v)
                if k is None:
                    continue
                for w in filter(is_var, self.body.eqns[k].invars):
                    if is_small(w, out):
                        parts.setdefault(w, set()).add(k)
                    elif w not in seen:
                        seen.add(w)
                        rest.append(w)
            if is_free:
                for v, equations in parts.items():
                    if self.is_read(v, out):
                        found.setdefault(v, set()).update(equations)
        return found

    def fused(self, v: Atom) -> int | None:
        """The equation that makes a value, if XLA computes that where it is used."""
        k = self.made_by.get(v)
        eqn = None if k is None else self.body.eqns[k]
        return None if eqn is None or is_update(eqn) or is_computed_once(eqn) else k

    def is_read(self, v: Atom, whole: Atom) -> bool:
        """Whether XLA would read from such an array as `whole`, where it uses a small value."""
        rest, seen = [v], {v}
        while rest:
            k = self.fused(rest.pop())
            if k is None:
                continue
            eqn = self.body.eqns[k]
            if is_read(eqn) and is_like(eqn.invars[0], whole):
                return True
            new = {w for w in filter(is_var, eqn.invars) if is_small(w, whole)} - seen
            seen |= new
            rest += new
        return False
