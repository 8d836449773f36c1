"""Fences between the reads of a buffer and its update, where XLA would repeat the reads.

The equations are in order: a value read from a buffer is used before the buffer's update if it can
be, and passes through the fence if not. See `fence` for the fences themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import Any

from refs import _jax
from refs._inplace.atoms import is_var, size
from refs._inplace.body import Body, substitute
from refs._inplace.fence import Fenced, FenceMaker, can_tell
from refs._inplace.model import has_jaxprs, is_small, is_update, needs_fences
from refs._inplace.overlaps import overlapping
from refs._inplace.whole import overwrite_p
from refs._tracing.facts import facts_of
from refs._types import Atom, Eqn

# A value read from more buffers than this isn't noted. Without a bound the time is quadratic, since
# each partial sum of a thousand refs is read from all before it: rewriting a program that adds such
# a sum to each of them takes 4 s with 64 (5 s with 16), 51 s with 256, and 127 s without a bound.
MOST = 64


def put_fences(body: Body, on_cpu: bool) -> None:
    """Adds fences to a body whose equations are in order."""
    update_of = {v: k for v, k in body.last_updates.items() if needs_fences(v, body.in_loop)}
    overlaps = overlapping(body) if on_cpu else set()
    if not update_of and not overlaps:
        return
    fences = _Fences(body, on_cpu, update_of, overlaps)
    for k in range(len(body.eqns)):
        fences.run(k)
    body.eqns = fences.emitted
    body.outvars = [fences.now(v) for v in body.outvars]


class _Fences:
    """Goes through the equations of a body in order, and emits them with the fences they need."""

    def __init__(
        self, body: Body, on_cpu: bool, update_of: dict[Any, int], overlaps: Container[Any]
    ):
        """`update_of`: the last update of each buffer that needs fences."""
        self.body, self.eqns = body, body.eqns
        self.on_cpu = on_cpu
        self.overlaps = overlaps
        self.made_by, self.users = body.made_by, body.users
        self.is_once = [*body.is_once]
        self.returned = {v for v in body.outvars if is_var(v)}
        self.update_of = update_of
        self.updated_by: dict[int, list[Atom]] = {}
        for buffer, k in update_of.items():
            self.updated_by.setdefault(k, []).append(buffer)
        self.emitted: list[Eqn] = []
        self.maker = FenceMaker(body.constants, on_cpu)
        self.passed: dict[Any, Atom] = {}  # A value before its fence -> behind it.
        # The equations that read a buffer that hasn't been updated yet, by buffer; and the reverse.
        self.read: dict[Any, list[int]] = {v: [] for v in self.update_of}
        self.sources: dict[int, list[Atom]] = {}
        self.last: dict[int, int] = {}
        # A bit for each of these equations that is computed once; and those that each one needs.
        self.bit: dict[int, int] = {}
        self.needed = [0] * len(self.eqns)

    def now(self, atom: Atom) -> Atom:
        """The name of a value behind the fences that it has passed."""
        last = atom
        while is_var(last) and last in self.passed:
            last = self.passed[last]
        if last is not atom:
            self.passed[atom] = last  # Many updates may have one operand, which passes all fences.
        return last

    def run(self, k: int) -> None:
        """Emits an equation, with current names, behind fences for the buffers that it updates."""
        eqn = self.eqns[k]
        passed = [v for v in eqn.invars if is_var(v) and v in self.passed]
        now = substitute(eqn, {v: self.now(v) for v in passed}) if passed else eqn
        buffers = self.updated_by.get(k, ())
        for j in self.body.needs[k]:
            self.needed[k] |= self.needed[j]
        if eqn.primitive is overwrite_p:
            self._overwrite(k, now)
        else:
            times = Counter(filter(is_var, eqn.invars)) if buffers else {}
            for buffer in buffers:
                # Otherwise the old value is used again: XLA copies it.
                if self.users[buffer][-1] <= k and times[buffer] == 1:
                    now = self._update(k, now, buffer)
            self.emitted.append(now)
        self._note_reads(k)
        self.needed[k] |= self.bit.get(k, 0)
        for buffer in buffers:
            del self.read[buffer]
        if written := [self.now(v) for v in eqn.outvars if v in self.overlaps]:
            self._emit(self.maker.alone(written, now))

    def _emit(self, fence: Fenced) -> None:
        self.passed.update(fence.names)
        self.emitted += fence.eqns

    def _update(self, k: int, now: Eqn, buffer: Atom) -> Eqn:
        """Emits the fence before an update of a buffer; the update, which may be in the fence."""
        eqn = self.eqns[k]
        passing, seen = self._cut(k, buffer)
        if not (passing or seen or self._is_read_back(eqn)):
            return now
        values, tokens = ([*map(self.now, of)] for of in (passing, seen))
        fence = self.maker.before_update(now, self.now(buffer), values, tokens)
        *before, now = fence.eqns
        self._emit(fence._replace(eqns=before))
        self.is_once[k] |= now.primitive is _jax.cond_p
        return now

    def _overwrite(self, k: int, now: Eqn) -> None:
        """Emits the fence that the kernel which overwrites a buffer needs, if it does."""
        [buffer], [new] = self.eqns[k].invars, self.eqns[k].outvars
        self.passed[new] = self.now(buffer)
        if self.users[buffer][-1] > k:
            return
        passing, seen = self._cut(k, buffer)
        if (passing or seen) and all(is_small(v, buffer) for v in passing):
            values, tokens = ([*map(self.now, of)] for of in (passing, seen))
            self._emit(self.maker.before_overwriting(now, values, tokens))

    def _note_reads(self, k: int) -> None:
        """Notes which buffers an equation has read."""
        once = self.is_once[k]
        sources: dict[Any, None] = {}
        for v in filter(is_var, self.eqns[k].invars):
            if v in self.read:
                sources[v] = None
            elif (j := self.made_by.get(v, -1)) in self.sources and not self.is_once[j]:
                # XLA repeats `v`: an equation that it computes once from `v` counts as reading the
                # buffer, unless `v` is so small that it is kept.
                found = self.sources[j]
                sources |= {b: None for b in found if not once or not is_small(v, b)}
        found = [b for b in sources if b in self.read]
        if 0 < len(found) <= MOST:
            self.sources[k] = found
            for buffer in found:
                self.read[buffer].append(k)
            if once:
                self.bit[k] = 1 << len(self.bit)

    def _cut(self, k: int, buffer: Atom) -> tuple[list[Atom], list[Atom]]:
        """The values read from a buffer that its update must wait for: `(passing, seen)`.

        Those that are `passing` the fence are used after the update, and XLA would compute them
        again. Those that the fence has `seen` are computed once, by equations that the update
        doesn't need: they only have to be computed before it. There are none if only the update
        itself uses such values.
        """
        needed = self.needed[k]
        is_kernel = self.eqns[k].primitive is overwrite_p
        passing: list[Atom] = []
        seen: list[Atom] = []
        for j in self.read[buffer]:
            once = self.is_once[j]
            if needed & self.bit[j] if once else self._last(j) < k:
                continue
            values = [v for v in self.eqns[j].outvars if size(v) and self._last_use(v) >= 0]
            if not once:
                passing += [v for v in values if self._last_use(v) >= k]
            else:
                kept = [v for v in values if is_small(v, buffer) and self._last_use(v) >= k]
                passing += kept
                if is_kernel and not self._is_reduced(j, buffer):
                    # A step of training overwrites a parameter when the products with it have been
                    # used. If it waited for them, XLA would copy the moments instead.
                    values = [v for v in values if self._last_use(v) >= k]
                # One result of an equation tells that all have been computed.
                seen += [] if kept else sorted(values, key=can_tell)[-1:]
        if not seen and all(self._last_use(v) <= k for v in passing):
            return [], []
        return passing, seen

    def _is_reduced(self, k: int, buffer: Atom) -> bool:
        """Whether an equation reduces a buffer, or what is made of its elements."""
        eqn = self.eqns[k]
        return facts_of(eqn).reduces and size(eqn.invars[0]) == size(buffer)

    def _last(self, k: int) -> int:
        """The last equation that uses a result of one."""
        if k not in self.last:
            self.last[k] = max(map(self._last_use, self.eqns[k].outvars), default=-1)
        return self.last[k]

    def _last_use(self, v: Atom) -> int:
        """The last equation that uses a value; one after all for a value that is returned."""
        if v in self.returned:
            return len(self.eqns)
        return self.users[v][-1] if v in self.users else -1

    def _is_read_back(self, eqn: Eqn) -> bool:
        """Whether the result of an update is read by an equation that XLA may fuse the update into.

        XLA may repeat the update there, or find that the value read is the value written, and
        repeat the computation of that.
        """
        if not is_update(eqn) or not self.on_cpu:
            return False
        [out] = eqn.outvars
        readers = {*self.users.get(out, ())}
        readers.discard(self.update_of.get(out, -1))
        return any(not has_jaxprs(self.eqns[j]) for j in readers)
