"""Stage 5: fences between what reads a buffer and its update, where XLA would repeat the reads.

The equations are in order: what is read from a buffer is used before its update if it can be, and
through the fence if not. See `fence` for what one is.
"""

from __future__ import annotations

from typing import Any

from refs._inplace.body import Body, is_small, is_update, is_var, size, substitute
from refs._inplace.fence import fenced
from refs._inplace.order import has_jaxprs, is_computed_once, last_updates, needs
from refs._types import Atom, Eqn

# From how many buffers a value is remembered to have been read. The bound is against the square: a
# sum over a thousand refs would be noted with each of them at each step.
MOST = 64


def put_fences(body: Body, on_cpu: bool) -> None:
    """Adds fences to a body whose equations are in order."""
    fences = _Fences(body, on_cpu)
    for k in range(len(body.eqns)):
        fences.run(k)
    body.eqns = fences.emitted
    body.outvars = [fences.now(v) for v in body.outvars]


class _Fences:
    def __init__(self, body: Body, on_cpu: bool):
        self.eqns = body.eqns
        self.on_cpu = on_cpu
        self.made_by = body.producers()
        self.taken_by = body.consumers()
        self.needs = needs(body)
        self.returned = {v for v in body.outvars if is_var(v)}
        self.constants = body.constants()
        self.update_of = last_updates(body)
        self.emitted: list[Any] = []
        self.passed: dict[Any, Any] = {}  # A value before its fence -> after it.
        # Values read from a buffer that hasn't been updated yet, by buffer.
        self.read: dict[Any, list[Any]] = {v: [] for v in self.update_of}
        self.read_from: dict[Any, list[Any]] = {}

    def now(self, atom: Atom) -> Any:
        """What a value is called after the fences that it has passed."""
        while is_var(atom) and atom in self.passed:
            atom = self.passed[atom]
        return atom

    def run(self, k: int) -> None:
        """Emits an equation as it is now, behind fences for the buffers that it updates."""
        eqn = self.eqns[k]
        now = substitute(eqn, {v: self.now(v) for v in eqn.invars if is_var(v)})
        mine = [v for v in dict.fromkeys(filter(is_var, eqn.invars)) if self.update_of.get(v) == k]
        for buffer in mine:
            if self.taken_by[buffer][-1] > k or sum(v is buffer for v in eqn.invars) > 1:
                continue  # XLA copies it.
            passing, seen = self._cut(k, buffer)
            if passing or seen or self._is_read_back(eqn):
                fence = fenced(
                    now,
                    self.now(buffer),
                    [self.now(v) for v in passing],
                    [self.now(v) for v in seen],
                    self.constants,
                    self.on_cpu,
                )
                self.passed.update(fence.names)
                *before, now = fence.eqns
                self.emitted += before
        self.emitted.append(now)
        self._note_reads(eqn)
        for buffer in mine:
            del self.read[buffer]

    def _note_reads(self, eqn: Eqn) -> None:
        """Remembers which buffers the outputs of an equation have been read from."""
        sources: dict[Any, None] = {}
        for v in filter(is_var, eqn.invars):
            if v in self.read:
                sources[v] = None
            elif v in self.read_from and not self._is_computed_once(v):
                # An equation that XLA computes once from a value that it repeats reads the buffer.
                found, once = self.read_from[v], is_computed_once(eqn)
                sources |= {b: None for b in found if not once or not is_small(v, b)}
        sources = {b: None for b in sources if b in self.read}
        if len(sources) > MOST:
            return
        for v in eqn.outvars:
            if sources and size(v):
                self.read_from[v] = list(sources)
                for buffer in sources:
                    self.read[buffer].append(v)

    def _cut(self, k: int, buffer: Atom) -> tuple[list[Any], list[Any]]:
        """The values read from a buffer that its update must wait for.

        First those that are needed afterwards and would be computed again, then those that only
        have to be there. There are none if all that they are for is the update itself.
        """
        cut = [v for v in self.read[buffer] if v in self.returned or self._last_use(v) >= k]
        if all(self._is_for(v, k) for v in cut):
            return [], []
        once = [v for v in cut if self._is_computed_once(v)]
        if once:
            needed = self._ancestors(k)
            once = [v for v in once if self.made_by[v] not in needed]
            cut = [v for v in cut if not self._is_computed_once(v) or v in once]
            if all(self._is_for(v, k) for v in cut):
                return [], []
        seen = [v for v in once if not is_small(v, buffer)]
        return [v for v in cut if v not in seen], seen

    def _is_for(self, v: Any, k: int) -> bool:
        """Whether nothing needs a value any more but one equation."""
        return v not in self.returned and self._last_use(v) <= k

    def _last_use(self, v: Any) -> int:
        return self.taken_by[v][-1] if v in self.taken_by else -1

    def _ancestors(self, k: int) -> set[int]:
        """All that an equation needs."""
        found: set[int] = set()
        rest = [k]
        while rest:
            new = {*self.needs[rest.pop()]} - found
            found |= new
            rest += new
        return found

    def _is_read_back(self, eqn: Eqn) -> bool:
        """Whether the result of an update is read by what XLA may put the update into.

        XLA may repeat the update there, or find that what is read is what has been written, and
        repeat how that came about.
        """
        if not is_update(eqn) or not self.on_cpu:
            return False
        [out] = eqn.outvars
        return any(
            self.update_of.get(out) != j and not has_jaxprs(self.eqns[j])
            for j in self.taken_by.get(out, ())
        )

    def _is_computed_once(self, v: Any) -> bool:
        return is_computed_once(self.eqns[self.made_by[v]])
