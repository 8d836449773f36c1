"""Stage 11: fences between the reads of a buffer and its update, where XLA would repeat the reads.

The equations are in order: a value read from a buffer is used before the buffer's update if it can
be, and passes through the fence if not. See `fence` for the fences themselves.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from jax import lax

from refs import _jax
from refs._inplace.body import (
    Body,
    is_small,
    is_update,
    is_var,
    needs_fences,
    size,
    substitute,
    unmasked,
)
from refs._inplace.fence import Predicate, fenced
from refs._inplace.order import has_jaxprs, is_computed_once, last_updates, needs
from refs._types import Atom, Eqn

# A value read from more buffers than this isn't noted. Without a bound the time is quadratic, since
# each partial sum of a thousand refs is read from all before it: rewriting a program that adds such
# a sum to each of them takes 4 s with 64 (5 s with 16), 51 s with 256, and 127 s without a bound.
MOST = 64


def put_fences(body: Body, on_cpu: bool) -> None:
    """Adds fences to a body whose equations are in order."""
    update_of = {v: k for v, k in last_updates(body).items() if needs_fences(v)}
    if not update_of:
        return
    fences = _Fences(body, on_cpu, update_of)
    for k in range(len(body.eqns)):
        fences.run(k)
    body.eqns = fences.emitted
    body.outvars = [fences.now(v) for v in body.outvars]


class _Fences:
    """Goes through the equations of a body in order, and emits them with the fences they need."""

    def __init__(self, body: Body, on_cpu: bool, update_of: dict[Any, int]):
        """`update_of`: the last update of each buffer that needs fences."""
        self.eqns = body.eqns
        self.on_cpu = on_cpu
        self.made_by = body.producers()
        self.users = body.consumers()
        self.is_once = [*map(is_computed_once, body.eqns)]
        self.needs = needs(body)
        self.returned = {v for v in body.outvars if is_var(v)}
        self.constants = body.constants()
        self.update_of = update_of
        self.emitted: list[Eqn] = []
        self.predicate: Predicate | None = None
        self.passed: dict[Any, Atom] = {}  # A value before its fence -> behind it.
        # Values read from a buffer that hasn't been updated yet, by buffer; and the reverse.
        self.read: dict[Any, list[Atom]] = {v: [] for v in self.update_of}
        self.read_from: dict[Any, list[Atom]] = {}

    def now(self, atom: Atom) -> Atom:
        """The name of a value behind the fences that it has passed."""
        while is_var(atom) and atom in self.passed:
            atom = self.passed[atom]
        return atom

    def run(self, k: int) -> None:
        """Emits an equation, with current names, behind fences for the buffers that it updates."""
        eqn = self.eqns[k]
        passed = [v for v in eqn.invars if is_var(v) and v in self.passed]
        now = substitute(eqn, {v: self.now(v) for v in passed})
        times = Counter(filter(is_var, eqn.invars))
        buffers = [v for v in times if self.update_of.get(v) == k]
        for buffer in buffers:
            if self.users[buffer][-1] > k or times[buffer] > 1:
                continue  # The old value is used again: XLA copies it.
            passing, seen = self._cut(k, buffer)
            if passing or seen or self._is_read_back(eqn):
                fence = fenced(
                    now,
                    self.now(buffer),
                    [self.now(v) for v in passing],
                    [self.now(v) for v in seen],
                    self.constants,
                    self.on_cpu,
                    self.predicate,
                )
                self.predicate = self.predicate or fence.predicate
                self.passed.update(fence.names)
                *before, now = fence.eqns
                self.emitted += before
                self.is_once[k] |= now.primitive is _jax.cond_p
        self.emitted.append(now)
        self._note_reads(eqn, self.is_once[k])
        for buffer in buffers:
            del self.read[buffer]

    def _note_reads(self, eqn: Eqn, once: bool) -> None:
        """Notes which buffers the outputs of an equation have been read from."""
        sources: dict[Any, None] = {}
        for v in filter(is_var, eqn.invars):
            if v in self.read:
                sources[v] = None
            elif v in self.read_from and not self._is_computed_once(v):
                # XLA repeats `v`: an equation that it computes once from `v` counts as reading the
                # buffer, unless `v` is so small that it is kept.
                found = self.read_from[v]
                sources |= {b: None for b in found if not once or not is_small(v, b)}
        sources = {b: None for b in sources if b in self.read}
        if len(sources) > MOST:
            return
        for v in eqn.outvars:
            if sources and size(v):
                self.read_from[v] = list(sources)
                for buffer in sources:
                    self.read[buffer].append(v)

    def _cut(self, k: int, buffer: Atom) -> tuple[list[Atom], list[Atom]]:
        """The values read from a buffer that its update must wait for: `(passing, seen)`.

        Those that are `passing` the fence are used after the update, and XLA would compute them
        again. Those that the fence has `seen` are large and computed once: they only have to be
        computed before the update. There are none if only the update itself uses such values.
        """
        cut = [v for v in self.read[buffer] if v in self.returned or self._last_use(v) >= k]
        if all(self._is_dead_after(v, k) for v in cut):
            return [], []  # Also below, but for `_ancestors`, which take time.
        once = [v for v in cut if self._is_computed_once(v)]
        if once:
            needed = self._ancestors(k, min(self.made_by[v] for v in once))
            once = [v for v in once if self.made_by[v] not in needed]
            cut = [v for v in cut if not self._is_computed_once(v) or v in once]
            if all(self._is_dead_after(v, k) for v in cut):
                return [], []
        seen = [v for v in once if not is_small(v, buffer)]
        return [v for v in cut if v not in seen], seen

    def _is_dead_after(self, v: Atom, k: int) -> bool:
        """Whether nothing after equation `k` uses a value."""
        return v not in self.returned and self._last_use(v) <= k

    def _last_use(self, v: Atom) -> int:
        return self.users[v][-1] if v in self.users else -1

    def _ancestors(self, k: int, first: int) -> set[int]:
        """The equations that an equation depends on, from `first` on."""
        found: set[int] = set()
        rest = [k]
        while rest:
            new = {j for j in self.needs[rest.pop()] if j >= first} - found
            found |= new
            rest += new
        return found

    def _is_read_back(self, eqn: Eqn) -> bool:
        """Whether the result of an update is read by an equation that XLA may fuse the update into.

        XLA may repeat the update there, or find that the value read is the value written, and
        repeat the computation of that.
        """
        if not is_update(eqn) or not self.on_cpu:
            return False
        [out] = eqn.outvars
        readers = {*self.users.get(out, ())}
        if (update := self.update_of.get(out)) is not None:
            readers -= {update} | self._own_read(update)
        return any(not has_jaxprs(self.eqns[j]) for j in readers)

    def _own_read(self, update: int) -> set[int]:
        """The equations by which an update reads what it overwrites: XLA fuses them with it."""
        eqn = self.eqns[update]
        if eqn.primitive is not lax.dynamic_update_slice_p:
            return set()
        _, _, own = unmasked(self.eqns, self.made_by, self.users, update)
        is_returned = any(not self.returned.isdisjoint(self.eqns[j].outvars) for j in own)
        return set() if is_returned else own

    def _is_computed_once(self, v: Atom) -> bool:
        return self.is_once[self.made_by[v]]
