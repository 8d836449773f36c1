"""Stage 4: whoever reads a buffer does so before it is updated.

For each buffer the last of its updates is the one that can be in place: from then on the old value
must be dead. So its readers are put first, and a fence (see `_fence`) keeps XLA from repeating
them afterwards.

Equations are emitted on demand, in the order of the program as far as that goes. A value that was
read from a buffer is given to others only once it has passed the fence, so before anyone takes it,
the buffer's update is emitted, if it can be: if it doesn't need who asks. What can't be ordered, a
true second use of the old value, stays as it was, and XLA copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any

from refs import _jax
from refs._inplace.body import (
    Body,
    carries,
    is_buffer,
    is_small,
    is_update,
    is_var,
    size,
    substitute,
)
from refs._inplace.branches import updated_operands
from refs._inplace.fence import fenced
from refs._tracing.facts import facts_of


def order(body: Body, on_cpu: bool) -> bool:
    """Puts a body in an order in which its buffers can be updated in place; False if it can't."""
    schedule = _Schedule(body, on_cpu)
    for k in range(len(body.eqns)):
        if schedule.emit(k) is not None:
            return False
    body.eqns = schedule.emitted
    body.outvars = [schedule.now(v) for v in body.outvars]
    return True


_WAITING, _RUNNING, _DONE = range(3)
# How far out of its turn an update may be emitted, to come before those who use what was read: so
# many equations before it, and so many updates that wait for one another in Python's stack. And how
# often that is tried.
FARTHEST, DEEPEST, TRIES = 300, 30, 4
# How many values a fence is worth.
MOST = 64


class _Schedule:
    def __init__(self, body: Body, on_cpu: bool):
        self.eqns = body.eqns
        self.on_cpu = on_cpu
        self.made_by = body.producers()
        self.taken_by = body.consumers()
        self.returned = {v for v in body.outvars if is_var(v)}
        self.state = [_WAITING] * len(self.eqns)
        self.emitted: list[Any] = []
        self.passed: dict[Any, Any] = {}  # A value before its fence -> after it.
        self.needs = list(self._needs())
        # Buffer -> its last update.
        self.update_of = {
            v: k for k, eqn in enumerate(self.eqns) for v in _updated(eqn) if v not in self.returned
        }
        # Values read from a buffer that hasn't been updated yet, by buffer.
        self.read: dict[Any, list[Any]] = {v: [] for v in self.update_of}
        self.read_from: dict[Any, list[Any]] = {}
        self.tries = dict.fromkeys(self.update_of, TRIES)
        self.stopped_by: dict[int, int] = {}
        self.depth = 0
        self.constants = body.constants()

    def _needs(self) -> Iterator[list[int]]:
        """For each equation those that must come before it: effects keep their order."""
        last: list[int] = []
        for k, eqn in enumerate(self.eqns):
            made = [self.made_by[v] for v in eqn.invars if is_var(v) and v in self.made_by]
            yield made + last if eqn.effects else made
            if eqn.effects:
                last = [k]

    def now(self, atom: Any) -> Any:
        """What a value is called after the fences that it has passed."""
        while is_var(atom) and atom in self.passed:
            atom = self.passed[atom]
        return atom

    def emit(self, k: int, can_wait: bool = False) -> int | None:
        """Emits an equation and all that it needs.

        Returns None, or what it must wait for: an equation that is being emitted. If it `can_wait`
        it also does so where the readers of what it updates would have to.
        """
        if self.state[k] == _DONE:
            return None
        if self.state[k] == _RUNNING:
            return k
        stop = self.stopped_by.get(k)
        if stop is not None and self.state[stop] == _RUNNING:
            return stop
        if can_wait and self.depth == DEEPEST:
            return k
        ancestors = self._ancestors(k, at_most=FARTHEST if can_wait else inf)
        if not ancestors:
            return k
        self.state[k] = _RUNNING
        self.depth += 1
        for j in ancestors:
            stop = j if j != k and self.state[j] == _RUNNING else self._emit_next(j, can_wait)
            if stop is not None:
                self.state[k] = _WAITING
                self.stopped_by[k] = stop
                break
        self.depth -= 1
        return stop

    def _ancestors(self, k: int, done: bool = False, at_most: float = inf) -> list[int]:
        """All that an equation needs (only what isn't `done`), then the equation itself.

        Nothing if they are more than `at_most`.
        """
        found: list[int] = []
        seen = {k}
        path = [(k, iter(self.needs[k]))]
        while path:
            j, rest = path[-1]
            for i in rest:
                if i not in seen and (done or self.state[i] != _DONE):
                    seen.add(i)
                    path.append((i, iter(self.needs[i])))
                    break
            else:
                path.pop()
                found.append(j)
            if len(seen) > at_most:
                return []
        return found

    def _emit_next(self, k: int, can_wait: bool) -> int | None:
        """Emits an equation all of whose operands are there."""
        if self.state[k] == _DONE:
            return None
        before = self.state[k]
        self.state[k] = _RUNNING
        eqn = self.eqns[k]
        fences: list[Any] = []
        for v in filter(is_var, eqn.invars):
            for buffer in self.read_from.get(v, ()):
                if buffer in self.read and is_small(v, buffer) and self.tries[buffer]:
                    stop = self.emit(self.update_of[buffer], can_wait=True)
                    self.tries[buffer] -= stop is not None
        mine = [v for v in dict.fromkeys(filter(is_var, eqn.invars)) if self.update_of.get(v) == k]
        for buffer in mine:
            stop = self._emit_readers(k, buffer)
            if stop is not None and stop != k and can_wait:
                self.state[k] = before
                return stop
            if stop is None:
                fences += [buffer]
        self._append(k, fences)
        self.state[k] = _DONE
        for buffer in mine:
            self.read.pop(buffer, None)
        return None

    def _append(self, k: int, updated: list[Any]) -> None:
        """Emits an equation as it is now, behind fences for the buffers that it updates."""
        eqn = self.eqns[k]
        now = substitute(eqn, {v: self.now(v) for v in eqn.invars if is_var(v)})
        for buffer in updated:
            passing, seen = self._cut(k, buffer)
            if len(passing) <= MOST and (passing or seen or self._is_read_back(eqn)):
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
        self._taint(eqn)

    def _taint(self, eqn: Any) -> None:
        """Remembers which buffers the outputs of an equation have been read from."""
        once = _is_computed_once(eqn)
        sources: dict[Any, None] = {}
        for v in filter(is_var, eqn.invars):
            if v in self.read:
                sources[v] = None
            elif v in self.read_from and not self._is_computed_once(v):
                # Who computes something once from a value that is read again reads the buffer.
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

    def _emit_readers(self, k: int, buffer: Any) -> int | None:
        """Emits the readers of a buffer. Returns None, or what one of them must wait for."""
        if sum(v is buffer for v in self.eqns[k].invars) > 1:
            return k
        for j in self.taken_by[buffer]:
            if j != k and (stop := self.emit(j, can_wait=True)) is not None:
                return stop
        # Large values aren't kept: those who make small ones of them come first too.
        for v in self.read[buffer]:  # It grows.
            if not is_small(v, buffer) and not self._is_computed_once(v):
                for j in self.taken_by.get(v, ()):
                    self.emit(j, can_wait=True)
        return None

    def _cut(self, k: int, buffer: Any) -> tuple[list[Any], list[Any]]:
        """The values read from a buffer that its update must wait for.

        First those that are needed afterwards and would be computed again, then those that only
        have to be there. There are none if all that they are for is the update itself.
        """
        cut = [v for v in self.read[buffer] if self._is_needed_after(v, k)]
        if all(self._is_for(v, k) for v in cut):
            return [], []
        once = [v for v in cut if self._is_computed_once(v)]
        if once:
            needed = {*self._ancestors(k, done=True)}
            once = [v for v in once if self.made_by[v] not in needed]
            cut = [v for v in cut if not self._is_computed_once(v) or v in once]
            if all(self._is_for(v, k) for v in cut):
                return [], []
        seen = [v for v in once if not is_small(v, buffer)]
        return [v for v in cut if v not in seen], seen

    def _is_for(self, v: Any, k: int) -> bool:
        """Whether nobody needs a value any more but one equation."""
        return v not in self.returned and all(
            j == k or self.state[j] == _DONE for j in self.taken_by[v]
        )

    def _is_read_back(self, eqn: Any) -> bool:
        """Whether the result of an update is read by what XLA may put the update into.

        XLA may repeat the update there, or find that what is read is what has been written, and
        repeat how that came about.
        """
        if not is_update(eqn) or not self.on_cpu:
            return False
        [out] = eqn.outvars
        return any(
            self.update_of.get(out) != j and not _has_jaxprs(self.eqns[j])
            for j in self.taken_by.get(out, ())
        )

    def _is_needed_after(self, v: Any, k: int) -> bool:
        return v in self.returned or any(
            self.state[j] != _DONE or j == k for j in self.taken_by.get(v, ())
        )

    def _is_computed_once(self, v: Any) -> bool:
        return _is_computed_once(self.eqns[self.made_by[v]])


def _updated(eqn: Any) -> list[Any]:
    """The buffers that an equation changes, or may return: what is to be done in place."""
    if is_update(eqn):
        atoms = eqn.invars[:1]
    elif (carried := carries(eqn)) is not None:
        first, n = carried
        atoms = eqn.invars[first : first + n]
    elif eqn.primitive is _jax.cond_p:
        atoms = [eqn.invars[k] for k in sorted(updated_operands(eqn))]
    else:
        return []
    return [v for v in atoms if is_buffer(v)]


def _is_computed_once(eqn: Any) -> bool:
    return facts_of(eqn.primitive).is_computed_once or _has_jaxprs(eqn) or bool(eqn.effects)


def _has_jaxprs(eqn: Any) -> bool:
    return any(True for _ in _jax.jaxprs_in(eqn.params))
