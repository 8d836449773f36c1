"""The positions of refs written, refs read and arrays among the leaves of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from refs._handles.ref import Ref
from refs._tracing.trace import Call, ref_type
from refs._transactions.transaction import Transaction, links_of
from refs._types import Aval, RefLike, Value


class RefsDiffer(Exception):
    """A call's refs are of other types than a program's, or have other aliases.

    An alias is a ref that is passed twice, or that the function also closes over.
    """


class Arguments:
    """The arguments of a program, and of each call of it, as a flat list of leaves.

    Attributes:
      tree: their pytree structure.
      ref_places: for each leaf: which of the distinct refs it is, or None for an array.
      ref_leaves: for each distinct ref: the position of its first leaf.
      undonated, donated: the positions of the arrays that the user doesn't donate, and does.
      is_bare: whether the leaves are just the refs that are written, each once, in order.
      reads: whether there are refs that a call only reads.
      written_of, read_of: functions that pick, from the leaves of a call, the refs that it writes,
        and those that it only reads. The first raises RefsDiffer where refs have other aliases than
        in this program, or untouched ones are of other types.
      undonated_of, donated_of: functions that pick those arrays.
    """

    def __init__(self, t: Transaction, call: Call, donated: Sequence[bool]):
        """`donated`: for each leaf, whether the user donates it."""
        self.tree, self.ref_places = call.tree, call.ref_places
        self._links, self._outers = t.links, t.program.refs
        place: dict[int, int] = {}
        for k, number in enumerate(call.ref_places):
            if number is not None:
                place.setdefault(number, k)
        self.ref_leaves = [place[i] for i in range(len(place))]
        repeated = [
            (k, place[number])
            for k, number in enumerate(call.ref_places)
            if number is not None and k != place[number]
        ]
        linked = [(place[i], k) for i, k in enumerate(t.links) if k is not None]
        touched = {s.argument for s in (*t.written, *t.read)}
        idle = [(place[i], ref_type(r)) for i, r in enumerate(call.refs) if i not in touched]
        self.written_of = self._picker_of_refs(t.written)
        if repeated or linked or idle:
            pick, outers = self.written_of, t.program.refs

            def checked(flat: list[Any]) -> Sequence[RefLike]:
                if (
                    all(flat[i] is flat[j] for i, j in repeated)
                    and all(flat[i] is outers[k] for i, k in linked)
                    and all(_is_like(flat[i], kind) for i, kind in idle)
                ):
                    return pick(flat)
                raise RefsDiffer

            self.written_of = checked
        self.read_of, self.reads = self._picker_of_refs(t.read), bool(t.read)
        arrays = [k for k, number in enumerate(call.ref_places) if number is None]
        self.undonated = [k for k in arrays if not donated[k]]
        self.donated = [k for k in arrays if donated[k]]
        self.undonated_of, self.donated_of = _picker(self.undonated), _picker(self.donated)
        self.is_bare = not (repeated or linked or idle or arrays or t.read) and [
            s.argument for s in t.written
        ] == [*range(len(call.ref_places))]

    def _picker_of_refs(self, slots: Sequence[Any]) -> Callable[[list[Any]], Sequence[RefLike]]:
        """A function from the leaves of a call to the sequence of refs that slots stand for."""
        outers = [self._outers[s.outer] for s in slots if s.argument is None]
        places = [self.ref_leaves[s.argument] for s in slots if s.argument is not None]
        if not places:
            return lambda flat: outers
        pick = _picker(places)
        return (lambda flat: [*pick(flat), *outers]) if outers else pick

    def refs_of(self, flat: list[Any]) -> list[RefLike]:
        """The refs that a call with these leaves touches."""
        return [*self.written_of(flat), *self.read_of(flat)]

    def fit(self, call: Call) -> bool:
        """Whether the refs of a call have the same aliases as in this program."""
        same = self.ref_places == call.ref_places
        return same and self._links == links_of(call.refs, self._outers)

    def check_alike(self, flat: list[Any]) -> None:
        """Checks, before a careful call, all of the refs but their types.

        The compiled function compares the types; but a ref in two places would be donated to it
        twice. Handles of JAX's own are left to `Programs.find_or_make`.

        Raises:
          RefsDiffer: if the refs don't fit this program.
        """
        refs = self.refs_of(flat)
        if len({*map(id, refs)}) < len(refs) or not all(
            type(r) is Ref and r._end is None and r._sharding is None for r in refs
        ):
            raise RefsDiffer


def _picker(places: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """A function that picks the items at these positions of a list, as a list or a tuple."""
    places = list(places)
    if not places:
        return lambda flat: ()
    if places == list(range(places[0], places[-1] + 1)):
        return itemgetter(slice(places[0], places[-1] + 1))
    return itemgetter(*places)


def _is_like(x: Value, kind: Aval) -> bool:
    """Whether `x` is a ref of ours, of this type, that has not ended."""
    return isinstance(x, Ref) and x._aval == kind and x._end is None
