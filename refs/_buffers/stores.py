"""Stores: where the value of a ref is, whatever kind of ref it is.

A ref of ours has a buffer of its own, or a part of a pack's; it holds PRNG keys, lies in the host's
memory or over a mesh; it may stand for a ref that isn't there; or it is a ref of JAX's own. Its
store says where its buffer is, and how its value is seen in that. So nobody else asks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax

from refs import _jax
from refs._buffers.kernels import Kernels, kernels_of
from refs._buffers.lens import WHOLE, Lens, Part, lens_of
from refs._buffers.records import Cell, look
from refs._indexing.sharded import mesh_sharding
from refs._types import Buffer, RefLike, Sharding, Value
from refs.errors import RefStateError


class Store:
    """Where the value of a ref is: in the buffer in a cell, seen through a lens.

    Attributes:
      cell: the list that holds the buffer, and is empty while that is taken; see `exchange.py`.
      lens: how the value is seen in the buffer.
      sharding: that over a mesh, which the buffer keeps; None on a single device.
      at: where the value begins in the buffer, as a kernel takes it; None if it has all of it.
      packed: of a packed ref: where it lies in its pack.
      layout: what programs for refs of one type are told apart by.
      kernels: those of all refs alike.
      base: of a packed ref: the store of the ref that the buffer is made for.
      lost: why the value was lost, if that is known.
      is_placed: whether somebody has said where it lies; see `_handles.resharding.go_along`.
      may_donate: whether the buffer is ours to give away: not if the ref is one of JAX's own.
    """

    __slots__ = (
        "at", "base", "cell", "is_placed", "kernels", "layout", "lens", "lost", "packed",
        "sharding",
    )  # fmt: skip
    may_donate = True

    def __init__(self, cell: Cell, is_placed: bool = True):
        self.cell, self.is_placed = cell, is_placed
        self.at: Any = None
        self.packed: Packed | None = None
        self.lost: str | None = None
        self.base: Store | None = None

    @staticmethod
    def of(value: Value, is_placed: bool = True) -> Store:
        """The store of a ref that is to hold an array, or a `ShapeDtypeStruct` for none."""
        store = Store([_bits_of(value)], is_placed)
        store.see(value)
        return store

    def see(self, value: Value) -> None:
        """Sets what depends on where a value lies that has come into the cell."""
        self._set(value.shape, value.dtype, lens_of(value), mesh_sharding(value.sharding))

    def _set(self, shape: Any, dtype: Any, lens: Lens, sharding: Sharding | None) -> None:
        self.lens, self.sharding = lens, sharding
        self.kernels: Kernels = kernels_of(shape, dtype, lens, sharding)
        self.layout: Any = (lens, sharding, self.may_donate)

    def part(self, packed: Packed, dtype: Any, at: jax.Array) -> Store:
        """The store of a packed ref, of whose pack this is the base."""
        store = Store(self.cell, self.is_placed)
        store.base, store.at, store.packed = self, at, packed
        shape = packed.place.shape
        store._set(shape, dtype, Part(shape), None)
        store.layout = packed.pack.layout, packed.number
        return store

    @property
    def cell_alone(self) -> Cell | None:
        """The cell, if its buffer is the value itself and lies on one device."""
        return self.cell if self.layout == ALONE else None

    @property
    def start(self) -> int:
        """The number of the value's first element in the buffer."""
        return 0 if self.packed is None else self.packed.place.start

    @property
    def is_shared(self) -> bool:
        """Whether other refs have their values in the same buffer."""
        return self.base is not None

    @property
    def is_lost(self) -> bool:
        """Whether the buffer has been deleted, and nobody is about to put back another one."""
        buffer = look(self.cell)  # None: a call is running.
        is_deleted = isinstance(buffer, jax.Array) and buffer.is_deleted()
        return is_deleted and look(self.cell) is buffer

    @property
    def is_movable(self) -> bool:
        """Whether the ref may be given another buffer, on other devices."""
        has_array = not isinstance(look(self.cell), jax.ShapeDtypeStruct)
        return self.may_donate and not self.is_shared and has_array

    def bits(self, buffer: Buffer) -> Buffer:
        """What the ref has of a buffer: the buffer itself, or a copy of a part."""
        return self.lens.bits(buffer, self.at)

    def note_loss(self, cause: str) -> None:
        """Remembers why the value was lost, if it was."""
        if self.is_lost:
            self.lost = cause

    def settle(self, before: Sequence[Buffer] = ()) -> None:
        """Ends an exchange; `before` it the cell held this."""


class _Native(Store):
    """The store of a ref of JAX's own, for one operation: its cell is a copy of JAX's."""

    __slots__ = ("_ref",)
    may_donate = False

    def __init__(self, ref: RefLike):
        value = _jax.native_buffer(ref)
        super().__init__([_jax.unwrap_keys(value)])
        self.see(value)
        self._ref = ref

    def note_loss(self, cause: str) -> None:
        pass

    def settle(self, before: Sequence[Buffer] = ()) -> None:
        # JAX's refs aren't thread-safe: they get their new buffers when the exchange has ended.
        [buffer] = self.cell
        if not any(buffer is x for x in before):
            # Nothing else may hold it.
            _jax.set_native_buffer(self._ref, _jax.wrap_keys(_jax.commit(buffer), self._ref.dtype))


ALONE = WHOLE, None, True  # the commonest layout


def store_of(ref: RefLike) -> Store:
    """The store of a concrete ref."""
    try:
        return ref._store
    except AttributeError:
        return _Native(ref)


def check_usable(ref: RefLike) -> None:
    """Refuses a concrete ref that has no value.

    Raises:
      RefStateError: if a ref of ours has ended, or the value was lost.
      ValueError: JAX's own, if a ref of JAX's has ended.
    """
    if hasattr(ref, "_store"):
        ref._check()
    elif _jax.native_buffer(ref).is_deleted():
        raise RefStateError(
            "use of a jax.Ref whose value was lost: its array was donated or deleted"
        )


def _bits_of(value: Value) -> Value:
    if isinstance(value, jax.Array):
        return _jax.unwrap_keys(value)
    return jax.eval_shape(_jax.unwrap_keys, value) if _jax.is_key(value.dtype) else value


# -- packs -----------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a packed ref lies: in which base of its pack, from which element on, and its shape."""

    base: int
    start: int
    shape: tuple[int, ...]


class Layout:
    """The places of the refs of a pack. Equal layouts are one object: see `layout_of`."""

    def __init__(self, places: tuple[Place, ...]):
        self.places = places


@functools.lru_cache(maxsize=1024)
def layout_of(places: tuple[Place, ...]) -> Layout:
    return Layout(places)


class Pack:
    """Refs that share buffers.

    What a call takes is a cell. So the refs of a pack are taken together, and the proof of
    `exchange` holds for them as it is.

    Attributes:
      layout: where each ref lies.
      bases: the refs whose buffers they share, one for each dtype and device.
      refs: the refs themselves.
      n_ended: how many of them have ended.
      selections: for programs: the refs of this pack that a call of them is given, in its order.
    """

    def __init__(self, layout: Layout, bases: Sequence[RefLike]):
        self.layout, self.bases = layout, bases
        self.refs: list[RefLike] = []
        self.n_ended = 0
        self.selections: WeakKeyDictionary[Any, Sequence[RefLike]] = WeakKeyDictionary()


class Packed(NamedTuple):
    """A packed ref: the `number`-th of its pack."""

    pack: Pack
    number: int

    @property
    def place(self) -> Place:
        return self.pack.layout.places[self.number]
