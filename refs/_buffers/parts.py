"""Packed refs: each has a part of the buffer of another ref, its *base*, and shares its cell.

What a call takes is a cell (see `exchange.py`). So the refs of a pack are taken together, and the
proof of `exchange` holds for them as it is. Kernels are given the place of the part in the buffer;
other exchanges get the parts as arrays, which are put back in the end (`on_parts`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
from jax import lax

from refs import _jax
from refs._buffers.handles import is_ours
from refs._buffers.records import Busy
from refs._buffers.signals import defer, without_interrupts
from refs._types import Buffer, RefLike, Value

Shape = tuple[int, ...]


class Place(NamedTuple):
    """Where a packed ref lies: in which base of its pack, from which element on, and its shape."""

    base: int
    start: int
    shape: Shape


class Layout:
    """The places of the refs of a pack. Equal layouts are one object: see `layout_of`."""

    def __init__(self, places: tuple[Place, ...]):
        self.places = places


@functools.lru_cache(maxsize=1024)
def layout_of(places: tuple[Place, ...]) -> Layout:
    return Layout(places)


class Pack:
    """Refs that share buffers.

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


class Part(NamedTuple):
    """What a packed ref has of a buffer.

    Attributes:
      pack: its pack.
      number: which of the refs of the pack it is.
      base: the ref whose buffer it shares.
      start: its first element there.
      at: the same number on the device, which a kernel takes faster.
    """

    pack: Pack
    number: int
    base: RefLike
    start: int
    at: jax.Array


def part_of(ref: RefLike) -> Part | None:
    """What a ref has of another one's buffer; None for a ref with a buffer of its own."""
    return ref._part if is_ours(ref) else None


def taken(x: Value, start: Value, shape: Shape, is_inside: bool) -> Value:
    """The part of a buffer that begins at `start`.

    `is_inside`: whether what is read of it is known to lie in it. XLA takes two slices, one of the
    other, for one, and before jaxlib 0.11.2 forgets that places outside of the part mean its edge.
    """
    part = lax.dynamic_slice(x, (start,), (math.prod(shape),)).reshape(shape)
    return part if is_inside else lax.optimization_barrier(part)


def put(x: Value, start: Value, part: Value) -> Value:
    """The buffer with a part of it replaced."""
    return lax.dynamic_update_slice(x, part.reshape(-1), (start,))


def start_of(ref: RefLike) -> jax.Array:
    """Where the part of a packed ref begins. Raises a RefStateError if the ref has ended."""
    if ref._end is not None:  # Its cell isn't empty: the others of the pack go on using it.
        ref._check()
    return ref._part.at


def with_start(ref: RefLike, operands: Any) -> Any:
    """The operands of a packed ref's kernel. Raises a RefStateError if the ref has ended."""
    return start_of(ref), operands


def reading_part(
    kernel: Callable[..., Value], shape: Shape, is_inside: bool = False
) -> Callable[..., Value]:
    """A kernel that reads an array, as one that reads a part of a buffer."""

    def read(x: Buffer, operands: tuple[Value, Any]) -> Value:
        start, rest = operands
        return kernel(taken(x, start, shape, is_inside), rest)

    return read


def updating_part(
    kernel: Callable[..., Any], shape: Shape, is_inside: bool = False
) -> Callable[..., Any]:
    """A kernel that updates an array, as one that updates a part of a buffer."""

    def update(held: list[Buffer], operands: tuple[Value, Any], value: Value) -> Any:
        start, rest = operands
        [new], old = kernel([taken(held[0], start, shape, is_inside)], rest, value)
        return [put(held[0], start, new)], old

    return update


def updating_apart(ref: RefLike, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that updates an array, as one that takes it out of a buffer and puts it back.

    The kernel's results are those of this ref alone, where JAX looks for NaNs in them.
    """

    def update(held: list[Buffer], operands: tuple[Value, Any], value: Value) -> Any:
        def call(parts: list[Buffer], _: list[Buffer]) -> tuple[list[Buffer], Any]:
            parts[:], old = kernel(parts, operands[1], value)
            return parts, old

        return on_parts([ref], [], [0], call)(held, [])

    return update


@functools.lru_cache(maxsize=4096)
def taker(shape: Shape) -> Callable[..., Buffer]:
    """A function of a buffer and a start: the part there, as an array of its own."""
    return jax.jit(functools.partial(taken, shape=shape, is_inside=True))


def value_of(ref: RefLike, buffer: Buffer) -> Buffer:
    """What a ref whose cell holds `buffer` has: of a packed ref a copy, else the buffer itself."""
    if part_of(ref) is None:
        return buffer
    with _jax.not_looking_for_nans():  # A NaN that it has is found by what reads it.
        return taker(ref._shape)(buffer, start_of(ref))


def on_parts(
    written: Sequence[RefLike],
    read: Sequence[RefLike],
    places: Sequence[int],
    call: Callable[[list[Buffer], list[Buffer]], tuple[Sequence[Buffer], Any]],
) -> Callable[[list[Buffer], list[Buffer]], tuple[Sequence[Buffer], Any]]:
    """`call` over the values of refs, as a function of the buffers in their distinct cells.

    `places` say for each ref, the written ones first, which of these buffers is in its cell.
    """

    def call_on_parts(held: list[Buffer], read_buffers: list[Buffer]) -> tuple[list[Buffer], Any]:
        buffers = [*held, *read_buffers]
        if any(x.is_deleted() for x in buffers):
            raise Busy  # A value is lost: waiting raises the error for it.
        values = [
            value_of(ref, buffers[k]) for ref, k in zip((*written, *read), places, strict=True)
        ]
        before, read_parts = values[: len(written)], values[len(written) :]
        parts = [*before]
        try:
            _, rest = call(parts, read_parts)
        finally:
            # An interrupt between two of them would leave one new and the other old.
            try:
                defer()
            finally:
                for ref, k, old, new in zip(written, places, before, parts, strict=False):
                    if new is not old:
                        _put_back(held, k, ref, new)
        return held, rest

    return call_on_parts


def _put_back(held: list[Buffer], k: int, ref: RefLike, value: Buffer) -> None:
    part = part_of(ref)
    if part is None:
        held[k] = value
    else:
        with _jax.not_looking_for_nans():  # Others of the pack may have some.
            held[k : k + 1] = _putter()(held[k : k + 1], part.at, value)


@functools.cache
def _putter() -> Callable[..., list[Buffer]]:
    def put_part(held: list[Buffer], start: Value, part: Value) -> list[Buffer]:
        return [put(held[0], start, part)]

    return without_interrupts(jax.jit(put_part, donate_argnums=0, keep_unused=True))
