"""Where the values of a program's refs are among its operands, the buffers that it is called with.

A ref that isn't packed has a buffer of its own. The refs of a pack share those of its *bases*:
these are the operands then, and in the program the refs' values are slices of them. A call shows
that its refs are those of a pack by a comparison of two lists, which takes 2 µs for 1,000 refs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from jax import lax

from refs._buffers.lens import Lens
from refs._buffers.stores import ALONE, Pack, Packed, Place, store_of
from refs._origin import origin_of
from refs._types import RefLike, Value

T = TypeVar("T")

# So many separate stretches of a buffer are written one by one, in place. If they are more, they
# are put together with what is between them: one kernel, which copies that.
FEW = 4


class Packing:
    """Where the values of a program's slots are, those written and those that it only reads.

    The operands are, in this order: the bases that are written, the other refs that are written,
    the bases that are only read, the other refs that are only read.

    Attributes:
      selections: the refs of each pack that the program touches.
      bases: the origins of the bases that are written.
      holders: the refs whose buffers the operands are, while the function is traced.
      layouts: of these refs; none if all have the commonest.
      operands: for each slot that is written: the number of the operand that holds its value.
      numbers: the same, but None if that is a base.
    """

    def __init__(
        self, written: Sequence[RefLike], read: Sequence[RefLike], leaf_of: dict[int, int]
    ):
        """`leaf_of` gives for the id of a ref that is an argument the position of its leaf."""
        touched: dict[int, list[RefLike]] = {}
        for ref in (*written, *read):
            if (packed := store_of(ref).packed) is not None:
                touched.setdefault(id(packed.pack), []).append(ref)
        self.selections = [Selection(refs, written, leaf_of) for refs in touched.values()]
        packs = [_packed(refs[0]).pack for refs in touched.values()]
        pairs = [*zip(self.selections, packs, strict=True)]
        bases = [pack.bases[k] for s, pack in pairs for k in s.written]
        bases_read = [pack.bases[k] for s, pack in pairs for k in s.read]
        alone, alone_read = (
            [r for r in refs if not store_of(r).is_shared] for refs in (written, read)
        )
        self.holders: list[RefLike] = [*bases, *alone, *bases_read, *alone_read]
        layouts = [store_of(ref).layout for ref in self.holders]
        self.layouts = [] if all(layout == ALONE for layout in layouts) else layouts
        position = {id(r): k for k, r in enumerate(self.holders)}
        self._written = [_Where.of(ref, position) for ref in written]
        self.bases = [origin_of(base._aval) for base in bases]
        self.operands = [w.operand for w in self._written]
        self.numbers = [None if w.place else w.operand for w in self._written]

    def facts(self) -> Any:
        """What the forms of one program have in common."""
        return self.layouts, self._written, [s.facts() for s in self.selections]

    def per_operand(self, of_bases: Sequence[T], of_slots: Sequence[T]) -> list[T]:
        """An item for each operand that is written, of those for bases and for slots."""
        alone = [x for x, w in zip(of_slots, self._written, strict=True) if w.place is None]
        return [*of_bases, *alone]

    def joined(self, state: Sequence[Value], values: Sequence[Value]) -> list[Value]:
        """The new operands that are written, from the old ones and the slots' new values."""
        of_base: list[list[tuple[Place, Value]]] = [[] for _ in self.bases]
        alone: list[Value] = []
        for w, value in zip(self._written, values, strict=True):
            if w.place is None:
                alone.append(w.lens.put(state[w.operand], value))
            else:
                of_base[w.operand].append((w.place, value))
        return [*map(_overwritten, state[: len(of_base)], of_base), *alone]


class Selection:
    """The refs of one pack that a program touches.

    Attributes:
      written, read: the numbers of its bases that are written, and of those that are only read.
    """

    def __init__(
        self, refs: Sequence[RefLike], written: Sequence[RefLike], leaf_of: dict[int, int]
    ):
        pack, is_written = _packed(refs[0]).pack, {*map(id, written)}
        changed = {_packed(r).place.base for r in refs if id(r) in is_written}
        self.written = sorted(changed)
        self.read = sorted({_packed(r).place.base for r in refs} - changed)
        given = [r for r in refs if id(r) in leaf_of]
        self._layout, self._numbers = pack.layout, [_packed(r).number for r in given]
        self._places = [leaf_of[id(r)] for r in given]
        self._pick = picker(self._places)
        # A program keeps the refs that its function closes over, and no arguments.
        self._outer = [r for r in refs if id(r) not in leaf_of]
        self._pack = pack if self._outer else None

    def facts(self) -> Any:
        """What the forms of one program have in common."""
        outer = [*map(id, self._outer)]
        return self._layout, self._numbers, self._places, outer, self.written, self.read

    def pack(self, flat: list[Any]) -> Pack:
        """The pack of a call with these leaves, after `checked_pack`."""
        return self._pack or _packed(self._pick(flat)[0]).pack

    def checked_pack(self, flat: list[Any]) -> Pack | None:
        """The pack of a call with these leaves.

        None if its refs aren't those of one pack, laid out as the program has them, or if one of
        them has ended.
        """
        pack = self._pack
        if self._numbers:
            given = self._pick(flat)
            try:
                pack = _packed(given[0]).pack
                is_given = given == self._expected(pack, type(given))
            except (AttributeError, TypeError, ValueError):
                return None  # No ref of ours, or not packed, or arrays in the places of others.
            if not is_given or pack is not (self._pack or pack):
                return None
        assert pack is not None
        if pack.n_ended:
            refs = [*self._outer, *(pack.refs[n] for n in self._numbers)]
            if any(r._end is not None for r in refs):
                return None
        return pack

    def _expected(self, pack: Pack, kind: type) -> Sequence[RefLike] | None:
        """The refs of a pack that a call must give; None if it is laid out in another way."""
        found = pack.selections.get(self)
        if found is None and pack.layout is self._layout:
            found = pack.selections[self] = kind([pack.refs[n] for n in self._numbers])
        return found


class _Where(NamedTuple):
    """Which operand has a slot's value, and how; if that is a base, in which place."""

    operand: int
    lens: Lens
    place: Place | None

    @staticmethod
    def of(ref: RefLike, position: dict[int, int]) -> _Where:
        store = store_of(ref)
        place = store.packed and store.packed.place
        return _Where(position[id(holder_of(ref))], store.lens, place)


def _packed(ref: RefLike) -> Packed:
    """Where a packed ref lies. Raises AttributeError if it is none of ours, or isn't packed."""
    packed = ref._store.packed
    if packed is None:
        raise AttributeError
    return packed


def holder_of(ref: RefLike) -> RefLike:
    """The ref whose buffer holds a ref's value: itself, or the base that it is packed in."""
    packed = store_of(ref).packed
    return ref if packed is None else packed.pack.bases[packed.place.base]


def same_packs(refs: Sequence[RefLike]) -> tuple[int | None, ...]:
    """For each ref the number of its pack among those of the refs; None if it isn't packed."""
    numbers: dict[int, int] = {}
    all_packed = [store_of(ref).packed for ref in refs]
    return tuple(
        None if p is None else numbers.setdefault(id(p.pack), len(numbers)) for p in all_packed
    )


def picker(places: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """A function that picks the items at these positions of a list, as a list or a tuple."""
    places = list(places)
    if not places:
        return lambda flat: ()
    if places == list(range(places[0], places[-1] + 1)):
        return itemgetter(slice(places[0], places[-1] + 1))
    return itemgetter(*places)


def _overwritten(x: Value, parts: Sequence[tuple[Place, Value]]) -> Value:
    """A base with new values for some of its parts."""
    parts = sorted(parts, key=lambda part: part[0].start)
    stretches: list[list[Any]] = []  # each its start, its end, and the values in it
    end = None
    for (_, start, shape), value in parts:
        if start != end:
            stretches.append([start, start, []])
        end = start + math.prod(shape)
        stretches[-1][1] = end
        stretches[-1][2].append(value.reshape(-1))
    if len(stretches) == 1 and stretches[0][:2] == [0, x.size]:
        return lax.concatenate(stretches[0][2], 0)
    if len(stretches) <= FEW:
        for start, _, values in stretches:
            x = lax.dynamic_update_slice(x, lax.concatenate(values, 0), (start,))
        return x
    pieces, end = [], 0
    for start, until, values in [*stretches, [x.size, x.size, []]]:
        if end < start:
            pieces.append(lax.slice(x, (end,), (start,)))
        pieces += values
        end = until
    return lax.concatenate(pieces, 0)
