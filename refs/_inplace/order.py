"""An order in which the readers of a buffer come before its update.

For each buffer the last of its updates is the one that can be in place: from then on the old value
must be dead. So the buffer's readers are put before the update. The users of a small value that was
read are put after the update, so that a fence (see `fences`) can stand between: XLA computes cheap
reads again wherever their value is used. Each such constraint becomes an edge, like an operand. An
edge that would close a cycle is dropped: that is a true second use of the old value, which XLA
copies.

Equations otherwise keep the order of the program.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from refs._inplace.body import Body
from refs._inplace.model import is_small
from refs._types import Atom

# How many equations may be moved for one edge. The search for a cycle looks at no more.
# With 0, 3 and 10 there are copies in 8, 2 and 1 of the programs of `tests/inplace/test_in_place*`,
# from 30 on in none. The bound is for the worst case, that for each equation an edge searches the
# whole program: the time for 10,000 equations of real programs is the same with 30, 300 and 3,000.
FARTHEST = 100

# The room, in bits, between the places of two equations; and how much less a moved one gets.
ROOM, LESS = 2048, 12


def order(body: Body) -> None:
    """Puts the equations of a body in an order for updates in place."""
    body.sort()
    schedule = _Schedule(body)
    for buffer, update in schedule.updates.items():
        schedule.put_readers_first(buffer, update)
        schedule.put_users_last(buffer, update)
    body.eqns = [body.eqns[k] for k in schedule.order()]


class _Schedule:
    """Equations by their numbers in the body, and the order in which they are to run.

    Attributes:
      users: the equations that take each variable.
      is_once: for each equation whether XLA never repeats it.
      updates: each buffer, and its last update.
      before: for each equation those that must come before it: operands, effects, and edges.
      place: numbers in an order that `before` allows: an equation is moved without new numbers for
        those that it passes, which may be very many.
      room: how many numbers before that of each equation are free.
    """

    def __init__(self, body: Body):
        self.eqns = body.eqns
        self.users = body.users
        self.is_once = body.is_once
        self.updates = body.last_updates
        self.before = [[*before] for before in body.needs]
        self.place = [0] * len(self.eqns)
        self.room = [0] * len(self.eqns)
        self._number(range(len(self.eqns)))

    def order(self) -> list[int]:
        """The equations in the order found."""
        return sorted(range(len(self.eqns)), key=self.place.__getitem__)

    def put_readers_first(self, buffer: Atom, update: int) -> None:
        """Puts the equations that take a buffer before its update.

        XLA doesn't keep a large value that is made of the buffer, so its users come first too.
        """
        values = [buffer]
        seen = {update}
        for v in values:  # It grows.
            for k in self.users.get(v, ()):
                if k not in seen and len(seen) <= FARTHEST:
                    seen.add(k)
                    if self._put_first(k, update) and not self.is_once[k]:
                        values += [u for u in self.eqns[k].outvars if not is_small(u, buffer)]

    def put_users_last(self, buffer: Atom, update: int) -> None:
        """Puts the update of a buffer before the users of small values that were read from it.

        A user that the update needs stays where it is, and counts as a reader: XLA may compute its
        result again, and repeat the read for that.
        """
        first, last = update, self.place[update]
        readers = [k for k in self.users[buffer] if self.place[k] < last and not self.is_once[k]]
        if not readers:
            return
        needed, lowest = self._needed(update, min(self.place[k] for k in readers))
        seen = {update, *readers}
        for k in readers:  # It grows.
            once = self.is_once[k]
            for v in self.eqns[k].outvars:
                is_kept = is_small(v, buffer)
                for user in self.users.get(v, ()):
                    if user in seen or self.place[user] > last:
                        continue
                    seen.add(user)
                    if is_kept and user not in needed and self.place[user] >= lowest:
                        first = min(first, user, key=self.place.__getitem__)
                        self.before[user].append(update)
                    elif not once and not (is_kept and self.is_once[user]):
                        readers.append(user)
            if len(seen) > FARTHEST:
                break
        if first != update:
            self._put_before(first, [update, *needed])

    def _put_first(self, k: int, update: int) -> bool:
        """Puts an equation before an update; False if it needs the update."""
        first = self.place[update]
        if first < self.place[k]:
            needed, lowest = self._needed(k, first)
            if update in needed or lowest > first:
                return False
            self._put_before(update, [k, *needed])
        self.before[update].append(k)
        return True

    def _put_before(self, first: int, eqns: Sequence[int]) -> None:
        """Puts those of some equations that stand after `first` right before it, in their order."""
        if not self.room[first] >> LESS:
            self._number(self.order())
        moved = [k for k in eqns if self.place[k] > self.place[first]]
        start, room = self.place[first] - self.room[first], self.room[first] >> LESS
        self.room[first] -= len(moved) * room
        for n, k in enumerate(sorted(moved, key=self.place.__getitem__), 1):
            self.place[k], self.room[k] = start + n * room, room

    def _needed(self, k: int, lowest: int) -> tuple[set[int], int]:
        """The equations that equation `k` needs, if they stand at a place or later; and the place.

        The place is `lowest`, or, if more than FARTHEST stand there, one nearer to `k`.
        """
        found: set[int] = set()
        nearest = [(-self.place[k], k)]
        while nearest:
            place, k = heapq.heappop(nearest)
            if len(found) > FARTHEST:
                return found, 1 - place
            for j in self.before[k]:
                if j not in found and self.place[j] >= lowest:
                    found.add(j)
                    heapq.heappush(nearest, (-self.place[j], j))
        return found, lowest

    def _number(self, order: Sequence[int]) -> None:
        for n, k in enumerate(order, 1):
            self.place[k], self.room[k] = n << ROOM, 1 << ROOM
