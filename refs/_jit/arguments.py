"""Where among the leaves of a call everything stands: refs written, refs read, arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from refs._handles.ref import Ref
from refs._tracing.trace import Call, ref_type
from refs._transactions.transaction import Transaction, links_of
from refs._types import Value


class RefsDiffer(Exception):
    """A call's refs are other ones, of one another or of those closed over, than in a program."""


class Arguments:
    """The arguments of a program, and of each call of it, as a flat list of leaves.

    Attributes:
      tree: their structure.
      ref_places: for each leaf: which of the distinct refs it is, or None for an array.
      ref_leaves: for each distinct ref: which leaf is the first that it is.
      kept, donated: which leaves are arrays, donated by the user or not.
      is_bare: whether the leaves are just the refs that are written, each once.
      reads: whether there are refs that a call only reads.
      written_of, read_of: give the refs that a call with these leaves writes, or only reads. The
        first raises RefsDiffer where refs are not the same ones, of one another and of those closed
        over, as in this program.
      undonated_of, donated_of: give those arrays.
    """

    def __init__(self, t: Transaction, call: Call, donated: Sequence[bool]):
        """`donated` says of each leaf whether the user donates it."""
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

            def checked(flat: list[Any]) -> Any:
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

    def _picker_of_refs(self, slots: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """A function from the leaves of a call to the refs that slots stand for: a sequence."""
        outers = [self._outers[s.outer] for s in slots if s.argument is None]
        places = [self.ref_leaves[s.argument] for s in slots if s.argument is not None]
        if not places:
            return lambda flat: outers
        pick = _picker(places)
        return (lambda flat: [*pick(flat), *outers]) if outers else pick

    def refs_of(self, flat: list[Any]) -> list[Any]:
        """The refs that a call with these leaves touches."""
        return [*self.written_of(flat), *self.read_of(flat)]

    def fit(self, call: Call) -> bool:
        """Whether refs of a call are the same ones, of one another and of those closed over."""
        same = self.ref_places == call.ref_places
        return same and self._links == links_of(call.refs, self._outers)

    def check_alike(self, flat: list[Any]) -> None:
        """That a careful call's refs are such as a program is for, by all but their types.

        Those the compiled function compares; but one ref in two places it would be donated twice.
        Handles of JAX's own are left to `Programs.find_or_make`.

        Raises:
          RefsDiffer: if they are not.
        """
        refs = self.refs_of(flat)
        if len({*map(id, refs)}) < len(refs) or not all(
            type(r) is Ref and r._end is None and r._sharding is None for r in refs
        ):
            raise RefsDiffer


def _picker(places: Sequence[int]) -> Callable[[Any], Any]:
    """A function that picks what stands at these places of a list: a list or a tuple."""
    places = list(places)
    if not places:
        return lambda flat: ()
    if places == list(range(places[0], places[-1] + 1)):
        return itemgetter(slice(places[0], places[-1] + 1))
    return itemgetter(*places)


def _is_like(x: Value, kind: Any) -> bool:
    """Whether something is a ref of ours of this type, that has not ended."""
    return isinstance(x, Ref) and x._aval == kind and x._end is None
