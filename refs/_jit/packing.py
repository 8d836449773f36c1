"""Where the values of a program's refs are among its operands, the buffers that it is called with.

A ref that isn't packed has a buffer of its own. The refs of a pack share those of its *bases*:
these are the operands then, and in the program the refs' values are slices of them. A call shows
that its refs are those of a pack by a comparison of two lists, which takes 2 µs for 1,000 refs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from jax import lax

from refs._buffers.parts import Pack, Part, Place, part_of
from refs._jit.picking import RefsDiffer, picker
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
      operands: for each slot that is written: the number of the operand that holds its value.
      numbers: the same, but None if that is a base.
    """

    def __init__(
        self, written: Sequence[RefLike], read: Sequence[RefLike], leaf_of: dict[int, int]
    ):
        """`leaf_of` gives for the id of a ref that is an argument the position of its leaf."""
        touched: dict[int, list[RefLike]] = {}
        for ref in (*written, *read):
            if (part := part_of(ref)) is not None:
                touched.setdefault(id(part.pack), []).append(ref)
        self.selections = [Selection(refs, written, leaf_of) for refs in touched.values()]
        packs = [refs[0]._part.pack for refs in touched.values()]
        pairs = [*zip(self.selections, packs, strict=True)]
        bases = [pack.bases[k] for s, pack in pairs for k in s.written]
        bases_read = [pack.bases[k] for s, pack in pairs for k in s.read]
        alone, alone_read = ([r for r in refs if part_of(r) is None] for refs in (written, read))
        self.holders: list[RefLike] = [*bases, *alone, *bases_read, *alone_read]
        position = {id(r): k for k, r in enumerate(self.holders)}
        self._written = [_Where.of(ref, position) for ref in written]
        self.bases = [origin_of(base._aval) for base in bases]
        self.operands = [w.operand for w in self._written]
        self.numbers = [None if w.place else w.operand for w in self._written]

    def per_operand(self, of_bases: Sequence[T], of_slots: Sequence[T]) -> list[T]:
        """An item for each operand that is written, of those for bases and for slots."""
        alone = [x for x, w in zip(of_slots, self._written, strict=True) if w.place is None]
        return [*of_bases, *alone]

    def joined(self, state: Sequence[Value], values: Sequence[Value]) -> list[Value]:
        """The new operands that are written, from the old ones and the slots' new values."""
        of_base: list[list[tuple[Place, Value]]] = [[] for _ in self.bases]
        for w, value in zip(self._written, values, strict=True):
            if w.place is not None:
                of_base[w.operand].append((w.place, value))
        bases = [_overwritten(x, parts) for x, parts in zip(state, of_base, strict=False)]
        return self.per_operand(bases, values)


class Selection:
    """The refs of one pack that a program touches.

    Attributes:
      written, read: the numbers of its bases that are written, and of those that are only read.
    """

    def __init__(
        self, refs: Sequence[RefLike], written: Sequence[RefLike], leaf_of: dict[int, int]
    ):
        pack: Pack = refs[0]._part.pack
        places, is_written = pack.layout.places, {*map(id, written)}
        changed = {places[r._part.number].base for r in refs if id(r) in is_written}
        self.written = sorted(changed)
        self.read = sorted({places[r._part.number].base for r in refs} - changed)
        given = [r for r in refs if id(r) in leaf_of]
        self._layout, self._numbers = pack.layout, [r._part.number for r in given]
        self._pick = picker([leaf_of[id(r)] for r in given])
        # A program keeps the refs that its function closes over, and no arguments.
        self._outer = [r for r in refs if id(r) not in leaf_of]
        self._pack = pack if self._outer else None

    def pack(self, flat: list[Any]) -> Pack:
        """The pack of a call with these leaves, after `checked_pack`."""
        return self._pack or self._pick(flat)[0]._part.pack

    def checked_pack(self, flat: list[Any]) -> Pack:
        """The pack of a call with these leaves.

        Raises:
          RefsDiffer: if its refs aren't those of one pack, laid out as the program has them, or if
            one of them has ended.
        """
        pack = self._pack
        if self._numbers:
            given = self._pick(flat)
            try:
                pack = given[0]._part.pack
                is_given = given == self._expected(pack, type(given))
            except (AttributeError, TypeError, ValueError):
                # No ref of ours, or one that isn't packed, or arrays in the places of others.
                raise RefsDiffer from None
            if not is_given or pack is not (self._pack or pack):
                raise RefsDiffer
        assert pack is not None
        if pack.n_ended:
            refs = [*self._outer, *(pack.refs[n] for n in self._numbers)]
            if any(r._end is not None for r in refs):
                raise RefsDiffer
        return pack

    def _expected(self, pack: Pack, kind: type) -> Sequence[RefLike] | None:
        """The refs of a pack that a call must give; None if it is laid out in another way."""
        found = pack.selections.get(self)
        if found is None and pack.layout is self._layout:
            found = pack.selections[self] = kind([pack.refs[n] for n in self._numbers])
        return found


class _Where(NamedTuple):
    """Which operand has a slot's value, and, if that is a base, in which place."""

    operand: int
    place: Place | None

    @staticmethod
    def of(ref: RefLike, position: dict[int, int]) -> _Where:
        part = part_of(ref)
        return _Where(position[id(holder_of(ref))], part and part.pack.layout.places[part.number])


def holder_of(ref: RefLike) -> RefLike:
    """The ref whose buffer holds a ref's value: itself, or the base that it is packed in."""
    part = part_of(ref)
    return ref if part is None else part.base


def part_in(x: Value, part: Part) -> Value:
    """The value of a packed ref, in the buffer of its base."""
    _, start, shape = part.pack.layout.places[part.number]
    return lax.slice(x, (start,), (start + math.prod(shape),)).reshape(shape)


def same_packs(refs: Sequence[RefLike]) -> tuple[int | None, ...]:
    """For each ref the number of its pack among those of the refs; None if it isn't packed."""
    numbers: dict[int, int] = {}
    parts = [*map(part_of, refs)]
    return tuple(None if p is None else numbers.setdefault(id(p.pack), len(numbers)) for p in parts)


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
