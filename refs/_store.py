"""Who owns a buffer: a call takes those that it updates, and puts new ones in their place.

A `Store` holds the buffers of one ref, or of several that are updated together, in a box: a list
that holds them, or nothing while a call has taken them. So a box that is empty says all that there
is to say: a ref named twice in one call, a call of another thread, a callback that touches the
very ref that its call updates. What is taken by one can't be taken by another, and no lock is held.

Nothing is lost, whenever an interrupt comes, by one rule. CPython handles signals, and switches
between threads, only after calls, at jumps back and at the start of functions. Hence

    buffers = box[0]; del box[0]              # taken: there is no such place between the two
    [out] = [*map(call, (buffers,))]          # called and kept, all of it in C
    box += (out,)                             # put back

and what is to be done in any case is an iterator, made in advance and run by `_ = [*put_back]`.

There is one more place where threads switch: an array that goes lets others run while XLA frees it.
`buffers = box[0]` must not be where the last name of one goes, so whoever puts buffers back forgets
them: another thread may take, donate and replace them before this one tries again.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import chain, count, repeat
from operator import attrgetter, getitem, itemgetter
from typing import Any, NamedTuple

from refs._holders import check_not_held_here, check_not_read, reading

if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "refs needs Python's global interpreter lock: what makes its updates atomic are the places "
        "where threads can switch, and a free-threaded Python has other ones. Run with "
        "PYTHON_GIL=1, or use a Python with the lock"
    )


class Store:
    """The buffers of the refs that `tokens` stand for, in this order.

    A ref has its store, its place in it, and a token that nothing else has, as long as it is there;
    a new one has a store of its own. A call that writes several refs brings them together in one
    (`gather`), so that the next one takes and puts them all at once. A buffer whose ref has died,
    or gone to another store, is None. `moves` is how often one of its refs has been moved.

    Who reads a buffer gives it to XLA while it is still in the box. Meanwhile `readers` has an item
    for it: a buffer that was donated in between would be an error, which XLA also prints. Whoever
    has taken the buffers waits until the readers have gone (`are_left`). They wait for nothing, and
    no new ones come: the box is empty.
    """

    __slots__ = (
        "box", "dropped", "kind", "moves", "readers", "shardings", "size", "tokens", "watchers",
    )  # fmt: skip

    def __init__(self, tokens: list[Any], shardings: Any = None, moves: int = 0):
        self.box: list[list[Any]] = []
        self.readers: list[None] = []
        self.moves = moves
        self.tokens = tokens
        self.size = len(tokens)
        self.shardings = shardings  # None if nothing is on a mesh
        self.kind = self.size, shardings, moves > 0
        self.watchers: Any = ()  # weak references: they free the buffer of a ref that dies
        self.dropped: list[int] = []  # whose refs died while the buffers were taken

    @staticmethod
    def of(buffers: list[Any], shardings: Any = None) -> Store:
        store = Store([None] * len(buffers), shardings)
        store.box.append(buffers)
        return store

    def sweep(self) -> None:
        """Frees the buffers of refs that died while they were taken."""
        while self.dropped:
            _Drop(self.box, self.dropped, self.dropped.pop())()


class Layout(NamedTuple):
    """How the refs of a call lie in several stores, or in one in another order.

    Attributes:
      kinds: those of the stores.
      leaders: picks from the refs one of each store.
      order: picks from the refs, as the call has them, those of the stores one after the other.
      pieces: for each store: picks from new buffers, as the call has them, those that belong there.
      state: picks from the buffers of the stores, one after the other, as the call has them.
    """

    kinds: list[Any]
    leaders: Any
    order: Any
    pieces: list[Any]
    state: Any

    @staticmethod
    def of(refs: Sequence[Any]) -> Layout:
        places: dict[Any, list[int]] = {}
        for k in sorted(range(len(refs)), key=[*map(_get_index, refs)].__getitem__):
            places.setdefault(refs[k]._store, []).append(k)
        order = [*chain.from_iterable(places.values())]
        return Layout(
            [*map(_get_kind, places)],
            picker([ks[0] for ks in places.values()]),
            picker(order),
            [picker(ks) for ks in places.values()],
            picker(sorted(range(len(refs)), key=order.__getitem__)),
        )

    def fits(self, refs: Sequence[Any], stores: Sequence[Store]) -> bool:
        """Whether refs lie so, the leaders being in these stores, which are taken."""
        return [*map(_get_kind, stores)] == self.kinds and [*map(get_token, self.order(refs))] == [
            *chain.from_iterable(map(_get_tokens, stores))
        ]


first = itemgetter(0)
get_box = attrgetter("box")
get_store = attrgetter("_store")
get_token = attrgetter("_token")
_get_box = attrgetter("_store.box")
_get_readers = attrgetter("_store.readers")
_get_index = attrgetter("_index")
_get_kind = attrgetter("kind")
_get_tokens = attrgetter("tokens")

# Refs that were moved so often are wanted in changing company: they stay in the stores they are in.
_MOST_MOVES = 4


def picker(places: Sequence[int]) -> Callable[[Any], Any]:
    """A function that picks what stands at these places of a list: a list or a tuple."""
    places = list(places)
    if not places:
        return lambda flat: ()
    if places == list(range(places[0], places[-1] + 1)):
        return itemgetter(slice(places[0], places[-1] + 1))
    return itemgetter(*places)


def peek(ref: Any) -> Any:
    """The buffer that a ref holds, for reading: the next call that writes the ref deletes it."""
    attempt = 0
    while True:
        store, index = ref._store, ref._index
        try:
            buffer = store.box[0][index]
        except IndexError:
            buffer = None
        if buffer is not None:
            return buffer
        attempt = wait(attempt, [ref])  # it is taken, or has gone to another store


def look_at_all(refs: Sequence[Any], looking: list[Any]) -> list[Any]:
    """`peek_all`, as a reader of each of the stores; `looking` gets their lists of readers."""
    lists = [*map(_get_readers, refs)]
    enter = map(list.append, lists, repeat(None))
    looking += lists
    _ = [*enter]
    return peek_all(refs)


def peek_all(refs: Sequence[Any]) -> list[Any]:
    """The buffers that refs hold at one moment.

    Raises:
      IndexError: if one of them is taken.
    """
    return [*map(getitem, map(first, map(_get_box, refs)), map(_get_index, refs))]


def shardings_of(refs: Sequence[Any]) -> Any:
    """How refs are laid out over meshes, None if each is on a device without one."""
    found = tuple([ref._sharding for ref in refs])
    return found if any(s is not None for s in found) else None


def picker_of(refs: Sequence[Any]) -> tuple[list[Any] | None, Callable[[list[Any]], Any] | None]:
    """The tokens of refs that are in one store, and what picks their buffers from its list.

    Whenever refs have these tokens again, they are at these places of one store.
    """
    store = refs[0]._store
    if store.size == 1 or any(ref._store is not store for ref in refs):
        return None, None
    return [*map(get_token, refs)], picker([ref._index for ref in refs])


def wait(attempt: int, refs: Sequence[Any]) -> int:
    """Lets a moment pass until a box may be full again; returns the number of the next attempt.

    Raises:
      RefStateError: if one of the refs has ended, or is held by what this thread itself is in.
    """
    for ref in refs:
        ref._refs  # noqa: B018  raises if it has ended
    if attempt > 3:
        for ref in refs:
            store = ref._store
            if not store.box or store.readers:
                check_not_held_here(ref, store.readers if store.box else store.box)
    # First only another thread's turn, in the end a millisecond.
    time.sleep(2.0 ** min(attempt, 10) * 1e-6 if attempt else 0)
    return attempt + 1


def taken(refs: Sequence[Any], body: Callable[[list[Any], list[Any]], Any]) -> Any:
    """`body(lists, indices)` while the buffers of distinct refs are taken, wherever they are.

    For each ref: the list that its buffer is in, and where. The lists go back when `body` ends.
    """
    # Not a context manager: an interrupt could come between its methods and the `with`.
    attempt = 0
    while True:
        stores = list(dict.fromkeys(ref._store for ref in refs))
        boxes = [store.box for store in stores]
        held: list[Any] = []
        holding: Any = []  # by which `check_not_held_here` knows us
        put_back = map(list.append, boxes, held)
        try:
            for box in boxes:
                held += (box[0],)
                del box[0]
                holding += (box,)
        except IndexError:
            _ = [*put_back]
            holding = None
            attempt = wait(attempt, refs)
            continue
        except BaseException:
            _ = [*put_back]
            raise
        try:
            position = {id(store): k for k, store in enumerate(stores)}
            found = [position.get(id(ref._store)) for ref in refs]
            if None not in found and are_left(stores):  # None has gone elsewhere meanwhile.
                return body([held[k] for k in found], [ref._index for ref in refs])  # type: ignore
        finally:
            _ = [*put_back]
            holding = None
            for store in stores:
                store.sweep()


def are_left(stores: Sequence[Store]) -> bool:
    """Whether nobody reads any more what was taken from stores: that takes a moment.

    It would last for ever if a reader was interrupted by code that waits for us.
    """
    until = None
    while any(store.readers for store in stores):
        now = time.monotonic()
        until = until or now + 0.1
        if now > until:
            return False
        time.sleep(0)
    return True


def update(ref: Any, kernel: Callable[..., Any], *operands: Any, reader: Any = None) -> Any:
    """Replaces a ref's buffer by `kernel(buffer, *operands)`, which is donated the old one.

    Returns `reader(old buffer, operands[0])`, if there is a `reader`.
    """
    if reading:
        check_not_read([ref])
    attempt = 0
    while True:
        store, index = ref._store, ref._index
        box = store.box
        try:
            buffers = box[0]
            del box[0]
        except IndexError:
            attempt = wait(attempt, [ref])
            continue
        try:
            holding = box
            left = not store.readers or are_left([store])
            if left and ref._store is store and buffers[index] is not None:
                old = reader(buffers[index], operands[0]) if reader is not None else None
                new = map(kernel, (buffers[index],), *[(x,) for x in operands])
                _ = [*map(list.__setitem__, (buffers,), (index,), new)]
                return old
        finally:
            box += (buffers,)
            holding = buffers = None  # noqa: F841
            if store.dropped:
                store.sweep()
        attempt = wait(attempt, [ref])


def gather(refs: Sequence[Any]) -> Layout | None:
    """Brings refs together in a store of their own, in this order; else returns how they lie.

    Two functions that write overlapping sets of refs would take them from each other in each call.
    So refs that were moved before stay in as many stores as there are kinds of company.
    """
    if not refs or _are_a_store(refs):
        return None
    stores = dict.fromkeys(map(get_store, refs))
    if all(store.moves < _MOST_MOVES for store in stores):
        _move(refs, 1 + max(store.moves for store in stores))
        return None
    parts: dict[Any, list[Any]] = {}
    for ref in sorted(refs, key=_get_index):
        # New refs, each in a store of its own, are still to be brought together.
        parts.setdefault(ref._store if ref._store.moves else None, []).append(ref)
    for part in parts.values():
        if not (part[0]._store.moves and _are_a_store(part)):
            _move(part, 1 + part[0]._store.moves)
    return None if _are_a_store(refs) else Layout.of(refs)


def _are_a_store(refs: Sequence[Any]) -> bool:
    store = refs[0]._store
    return store.size == len(refs) == 1 or [*map(get_token, refs)] == store.tokens


def _move(refs: Sequence[Any], moves: int) -> None:
    """Brings refs together in one new store, in this order."""

    def move(lists: list[Any], indices: list[Any]) -> None:
        buffers = [buffers[k] for buffers, k in zip(lists, indices, strict=True)]
        if any(buffer is None for buffer in buffers):
            return  # One has ended; using it says so.
        store = Store([object() for _ in buffers], shardings_of(refs), moves)
        store.watchers = [
            weakref.ref(ref, _Drop(store.box, store.dropped, k)) for k, ref in enumerate(refs)
        ]
        # Not `setattr`, for which a handle has code: an interrupt could come in between.
        changes = (
            map(list.__setitem__, lists, indices, repeat(None)),
            map(object.__setattr__, refs, repeat("_store"), repeat(store)),
            map(object.__setattr__, refs, repeat("_index"), count()),
            map(object.__setattr__, refs, repeat("_token"), store.tokens),
            map(list.append, (store.box,), (buffers,)),
        )
        _ = [*chain.from_iterable(changes)]

    taken(refs, move)


def end(ref: Any, how: str) -> Any:
    """Takes a ref's buffer away for ever; from now on its use is an error that says `how`."""

    def take_away(lists: list[Any], indices: list[Any]) -> Any:
        buffer = lists[0][indices[0]]
        changes = (
            map(object.__setattr__, (ref,), ("_end",), (how,)),
            map(list.__setitem__, lists, indices, (None,)),
        )
        _ = [*chain.from_iterable(changes)]
        return buffer

    return taken([ref], take_away)


class _Drop:
    """What happens when a ref dies that shares a store: its buffer is freed at once.

    It uses nothing of this module, whose names may have gone when the interpreter exits.
    """

    __slots__ = ("box", "dropped", "index")

    def __init__(self, box: list[Any], dropped: list[int], index: int):
        self.box, self.dropped, self.index = box, dropped, index

    def __call__(self, _: Any = None) -> None:
        try:
            self.box[0][self.index] = None
        except IndexError:
            self.dropped.append(self.index)
