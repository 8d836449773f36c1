"""The operands of a program: which buffers and arrays of a call it takes, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from refs._buffers.stores import store_of
from refs._handles.predicates import is_ref
from refs._handles.ref import Ref
from refs._jit.packing import picker, same_packs
from refs._jit.staged import Staged
from refs._tracing.trace import Call, ref_type
from refs._transactions.transaction import links_of
from refs._types import Aval, RefLike, Value

Leaves = list[Any]


class Operands:
    """The operands `(state, constants, undonated, donated)`, picked from the leaves of a call.

    The state is the buffers that are written, and the constants those that are only read; `packing`
    says of what. The others are the arrays that the user doesn't donate, and does. Of the last
    three a program takes those that there are.

    Attributes:
      ref_places: for each leaf: which of the distinct refs it is, or None for an array.
      ref_leaves: for each distinct ref: the position of its first leaf.
      arrays: the positions of the arrays, in the order in which they are operands.
      packing: where the refs' values are among the operands.
      is_read: whether there are constants.
      donated: the numbers of the operands that a program donates.
      written_of, read_of: functions that pick the refs whose buffers are the state, and those whose
        buffers are the constants. The first returns None for a call that `fits` not.
      arrays_of: functions that pick the arrays: one for each operand.
    """

    written_of: Callable[[Leaves], Any]

    def __init__(self, t: Staged, call: Call, donated: Sequence[bool]):
        """`donated`: for each leaf, whether the user donates it."""
        self.ref_places, self._links, self._outers = call.ref_places, t.links, t.outers
        place: dict[int, int] = {}
        for k, number in enumerate(call.ref_places):
            if number is not None:
                place.setdefault(number, k)
        self.ref_leaves = [place[i] for i in range(len(place))]
        self._check = self._check_of(t, call, place)
        self.packing = t.packing
        self._same_packs = same_packs([*call.refs, *t.outers])
        self._outer_kinds = _kinds_of(t.outers)
        slots = t.written, t.read
        self._refs_of = [*map(self._picker_of_refs, slots)]
        self.written_of, self.read_of = (
            self._picker_of_refs([s for s, ref in zip(some, refs, strict=True) if _is_alone(ref)])
            for some, refs in zip(slots, (t.refs(s, call.refs) for s in slots), strict=True)
        )
        if self.packing.selections:
            self._pick_bases()
        if self._check is not None:
            self.written_of = _if(self._check, self.written_of)
        self.is_read = bool(t.read)
        places = [k for k, number in enumerate(call.ref_places) if number is None]
        kept, given = ([k for k in places if donated[k] == flag] for flag in (False, True))
        self.arrays, self._given = [*kept, *given], given
        self.arrays_of = [picker(some) for some in (kept, given) if some]
        self.donated = (0, len(self.arrays_of) + self.is_read) if given else (0,)

    def of(self, flat: Leaves, state: Sequence[Value], constants: Sequence[Value]) -> Any:
        """All operands, for a call with these leaves."""
        read = [constants] if self.is_read else []
        return (state, *read, *(pick(flat) for pick in self.arrays_of))

    def is_donated(self, k: int) -> bool:
        """Whether the user donates the `k`-th leaf."""
        return k in self._given

    def refs_of(self, flat: Leaves) -> list[RefLike]:
        """The refs that a call with these leaves touches."""
        return [ref for pick in self._refs_of for ref in pick(flat) or ()]

    def fit(self, call: Call) -> bool:
        """Whether a call's refs have the same aliases, and other refs their places, as in this."""
        return (
            self.ref_places == call.ref_places
            and self._outer_kinds == _kinds_of(self._outers)
            and self._same_packs == same_packs([*call.refs, *self._outers])
            and self._links == links_of(call.refs, self._outers)
        )

    def are_alike(self, flat: Leaves) -> bool:
        """Whether a careful call can take refs, whose types are compared by the program alone.

        A ref in two places would be donated to it twice. Others than the commonest are looked up.
        """
        written = self.written_of(flat)
        if written is None:
            return False
        refs = [*written, *self.read_of(flat)]
        return len({*map(id, refs)}) == len(refs) and all(
            type(r) is Ref and r._end is None and hasattr(r, "_cell_alone") for r in refs
        )

    def facts(self) -> Any:
        """What the forms of one program have in common."""
        outers = [*map(id, self._outers)]
        return self.ref_places, self._links, outers, self._idle, self._outer_kinds

    def _check_of(
        self, t: Staged, call: Call, place: dict[int, int]
    ) -> Callable[[Leaves], bool] | None:
        """Whether repeated refs are so in a call, too, and untouched ones of the same types."""
        repeated = [
            (k, place[number])
            for k, number in enumerate(call.ref_places)
            if number is not None and k != place[number]
        ]
        linked = [(place[i], k) for i, k in enumerate(t.links) if k is not None]
        touched = {s.argument for s in (*t.written, *t.read)}
        self._idle = idle = [
            (place[i], ref_type(r)) for i, r in enumerate(call.refs) if i not in touched
        ]
        outers = t.outers

        def check(flat: Leaves) -> bool:
            return (
                all(flat[i] is flat[j] for i, j in repeated)
                and all(flat[i] is outers[k] for i, k in linked)
                and all(_is_like(flat[i], kind) for i, kind in idle)
            )

        return check if repeated or linked or idle else None

    def _picker_of_refs(self, slots: Sequence[Any]) -> Callable[[Leaves], Sequence[RefLike]]:
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

        def written_of(flat: Leaves) -> Sequence[RefLike] | None:
            bases: list[RefLike] = []
            for s in selections:
                if (pack := s.checked_pack(flat)) is None:
                    return None
                bases += [pack.bases[k] for k in s.written]
            return [*bases, *written(flat)]

        def read_of(flat: Leaves) -> list[RefLike]:
            packs = [(s.read, s.pack(flat)) for s in selections]
            return [*(pack.bases[k] for numbers, pack in packs for k in numbers), *read(flat)]

        self.written_of, self.read_of = written_of, read_of


def _is_alone(ref: RefLike) -> bool:
    return not store_of(ref).is_shared


def _kinds_of(refs: Sequence[RefLike]) -> list[Any]:
    """Where refs lie: those that a function closes over may be moved between its calls."""
    return [(ref_type(ref), store_of(ref).layout) for ref in refs]


def _if(check: Callable[[Leaves], bool], pick: Callable[[Leaves], Any]) -> Callable[[Leaves], Any]:
    return lambda flat: pick(flat) if check(flat) else None


def _is_like(x: Value, kind: Aval) -> bool:
    """Whether `x` is a ref of this type; one of ours hasn't ended."""
    if type(x) is Ref:
        return x._aval == kind and x._end is None
    return is_ref(x) and ref_type(x) == kind
