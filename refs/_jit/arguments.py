"""The positions of refs written, refs read and arrays among the leaves of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from refs._buffers.handles import sharding_of
from refs._buffers.parts import part_of
from refs._handles.ref import Ref
from refs._jit.packing import same_packs
from refs._jit.picking import RefsDiffer, picker
from refs._jit.staged import Staged
from refs._tracing.trace import Call, ref_type
from refs._transactions.transaction import links_of
from refs._types import Aval, RefLike, Value


class Arguments:
    """The arguments of a program, and of each call of it, as a flat list of leaves.

    Attributes:
      tree: their pytree structure.
      ref_places: for each leaf: which of the distinct refs it is, or None for an array.
      ref_leaves: for each distinct ref: the position of its first leaf.
      undonated, donated: the positions of the arrays that the user doesn't donate, and does.
      packing: where the refs' values are among the operands.
      is_bare: whether the leaves are just the refs that are written, each once, in order, and have
        buffers of their own.
      reads: whether there are operands that a call only reads.
      written_of, read_of: functions that pick, from the leaves of a call, the refs whose buffers
        are the operands, those that it writes and those that it only reads. The first raises
        RefsDiffer where refs have other aliases than in this program, or untouched ones are of
        other types.
      undonated_of, donated_of: functions that pick those arrays.
    """

    def __init__(self, t: Staged, call: Call, donated: Sequence[bool]):
        """`donated`: for each leaf, whether the user donates it."""
        self.tree, self.ref_places = call.tree, call.ref_places
        self._links, self._outers = t.links, t.outers
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
        outers = t.outers

        def check(flat: list[Any]) -> None:
            if not (
                all(flat[i] is flat[j] for i, j in repeated)
                and all(flat[i] is outers[k] for i, k in linked)
                and all(_is_like(flat[i], kind) for i, kind in idle)
            ):
                raise RefsDiffer

        has_more = bool(repeated or linked or idle)
        slots = t.written, t.read
        refs = [t.refs(of_kind, call.refs) for of_kind in slots]
        self.packing = t.packing
        self._same_packs = same_packs([*call.refs, *outers])
        self._outer_places = _places_of(outers)
        self._refs_of = [*map(self._picker_of_refs, slots)]
        alone = [
            [s for s, ref in zip(of_kind, found, strict=True) if part_of(ref) is None]
            for of_kind, found in zip(slots, refs, strict=True)
        ]
        self.written_of, self.read_of = map(self._picker_of_refs, alone)
        if self.packing.selections:
            self._pick_bases()
        if has_more:
            self.written_of = _after(check, self.written_of)
        self.reads = bool(t.read)
        arrays = [k for k, number in enumerate(call.ref_places) if number is None]
        self.undonated = [k for k in arrays if not donated[k]]
        self.donated = [k for k in arrays if donated[k]]
        self.undonated_of, self.donated_of = picker(self.undonated), picker(self.donated)
        self.is_bare = not (has_more or arrays or t.read or self.packing.selections) and [
            s.argument for s in t.written
        ] == [*range(len(call.ref_places))]

    def _picker_of_refs(self, slots: Sequence[Any]) -> Callable[[list[Any]], Sequence[RefLike]]:
        """A function from the leaves of a call to the sequence of refs that slots stand for."""
        outers = [self._outers[s.outer] for s in slots if s.argument is None]
        places = [self.ref_leaves[s.argument] for s in slots if s.argument is not None]
        if not places:
            return lambda flat: outers
        pick = picker(places)
        return (lambda flat: [*pick(flat), *outers]) if outers else pick

    def _pick_bases(self) -> None:
        """Makes `written_of` and `read_of` return the bases of packs before the other refs."""
        selections, written, read = self.packing.selections, self.written_of, self.read_of

        def written_of(flat: list[Any]) -> list[RefLike]:
            packs = [(s.written, s.checked_pack(flat)) for s in selections]
            return [*(pack.bases[k] for numbers, pack in packs for k in numbers), *written(flat)]

        def read_of(flat: list[Any]) -> list[RefLike]:
            packs = [(s.read, s.pack(flat)) for s in selections]
            return [*(pack.bases[k] for numbers, pack in packs for k in numbers), *read(flat)]

        self.written_of, self.read_of = written_of, read_of

    def refs_of(self, flat: list[Any]) -> list[RefLike]:
        """The refs that a call with these leaves touches."""
        return [ref for pick in self._refs_of for ref in pick(flat)]

    def fit(self, call: Call) -> bool:
        """Whether a call's refs have the same aliases, and other refs their places, as in this."""
        same = self.ref_places == call.ref_places
        same &= self._outer_places == _places_of(self._outers)
        same &= self._same_packs == same_packs([*call.refs, *self._outers])
        return same and self._links == links_of(call.refs, self._outers)

    def check_alike(self, flat: list[Any]) -> None:
        """Checks, before a careful call, all of the refs but their types.

        The compiled function compares the types; but a ref in two places would be donated to it
        twice. Handles of JAX's own are left to `Programs.find_or_make`.

        Raises:
          RefsDiffer: if the refs don't fit this program.
        """
        refs = [*self.written_of(flat), *self.read_of(flat)]
        if len({*map(id, refs)}) < len(refs) or not all(
            type(r) is Ref and r._end is None and r._sharding is None and r._part is None
            for r in refs
        ):
            raise RefsDiffer


def _places_of(refs: Sequence[RefLike]) -> list[Any]:
    """Where refs lie: those that a function closes over may be moved between its calls."""
    return [(ref_type(ref), sharding_of(ref)) for ref in refs]


def _after(
    check: Callable[[list[Any]], None], pick: Callable[[list[Any]], Sequence[Any]]
) -> Callable[[list[Any]], Sequence[Any]]:
    def checked(flat: list[Any]) -> Sequence[Any]:
        check(flat)
        return pick(flat)

    return checked


def _is_like(x: Value, kind: Aval) -> bool:
    """Whether `x` is a ref of ours, of this type, that has not ended."""
    return isinstance(x, Ref) and x._aval == kind and x._end is None
