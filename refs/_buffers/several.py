"""Exchanges of the buffers of several handles as one atomic operation.

The refs of a pack share a buffer: what is done with each is done with a copy of its part, which is
put back in the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import jax

from refs import _jax
from refs._buffers.devices import check_devices
from refs._buffers.exchange import Busy, exchange
from refs._buffers.records import Lent, lent_out, readers
from refs._buffers.signals import defer, without_interrupts
from refs._buffers.stores import Store, store_of
from refs._buffers.waiting import patiently
from refs._indexing.locate import EVERYTHING
from refs._types import Buffer, RefLike, Value


def exchange_refs(
    written: Sequence[RefLike],
    read: Sequence[RefLike],
    call: Callable[[list[Buffer], list[Buffer]], tuple[Sequence[Buffer], Any]],
    calls_back: bool = False,
    looked_at: Sequence[RefLike] = (),
    objection: Callable[[Sequence[RefLike], Sequence[Buffer]], Any] | None = None,
) -> Any:
    """An `exchange` over distinct handles, with `call(held, read_buffers)`: the arrays of each.

    It is retried while a buffer isn't available, or if `call` itself raises Busy, because one of
    the refs `looked_at` isn't. If `objection(written, buffers)`, of the buffers in their cells,
    isn't None, `call` isn't called, and that is returned.

    Raises:
      RefStateError: if a ref has ended, or waiting for it would never end.
    """
    refs = [*written, *read]

    def attempt() -> Any:
        stores = [*map(store_of, refs)]
        # Packed refs share cells; for other refs these are just their cells, in order.
        distinct = {id(store.cell): store.cell for store in stores}
        order = {key: k for k, key in enumerate(distinct)}
        places = [order[id(store.cell)] for store in stores]
        cells = [*distinct.values()]
        n = len({*places[: len(written)]})
        before = [[*cell] for cell in cells[:n]]
        run = call
        if any(store.is_shared for store in stores):
            run = _on_parts(stores[: len(written)], stores[len(written) :], places, call)

        def checked(held: list[Buffer], read_buffers: list[Buffer]) -> tuple[Any, Any]:
            if objection is not None:
                found = objection(written, [held[k] for k in places[: len(written)]])
                if found is not None:
                    return held, found
            return run(held, read_buffers)

        read_buffers: list[Buffer] = []
        try:
            return exchange(
                cells[:n], checked, (read_buffers,), cells[n:], read_buffers, calls_back
            )
        finally:
            for store, k in zip(stores, places[: len(written)], strict=False):
                store.settle(before[k])

    return patiently(attempt, written, [*read, *looked_at])


def _on_parts(
    written: Sequence[Store],
    read: Sequence[Store],
    places: Sequence[int],
    call: Callable[[list[Buffer], list[Buffer]], tuple[Sequence[Buffer], Any]],
) -> Callable[[list[Buffer], list[Buffer]], tuple[Sequence[Buffer], Any]]:
    """`call` over what each ref has of a buffer, as a function of the buffers in distinct cells.

    `places` say for each ref, the written ones first, which of these buffers is in its cell.
    """

    def call_on_parts(held: list[Buffer], read_buffers: list[Buffer]) -> tuple[list[Buffer], Any]:
        buffers = [*held, *read_buffers]
        if any(x.is_deleted() for x in buffers):
            raise Busy  # A value is lost: waiting raises the error for it.
        values = [s.bits(buffers[k]) for s, k in zip((*written, *read), places, strict=True)]
        before, read_parts = values[: len(written)], values[len(written) :]
        parts = [*before]
        try:
            _, rest = call(parts, read_parts)
        finally:
            # An interrupt between two of them would leave one new and the other old.
            try:
                defer()
            finally:
                for store, k, old, new in zip(written, places, before, parts, strict=False):
                    if new is not old:
                        _put_back(held, k, store, new)
        return held, rest

    return call_on_parts


def _put_back(held: list[Buffer], k: int, store: Store, bits: Buffer) -> None:
    if store.at is None:
        held[k] = bits
    else:
        with _jax.not_looking_for_nans():  # Others of the pack may have some.
            held[k : k + 1] = _putter(store.lens)(held[k : k + 1], bits, store.at)


@functools.lru_cache(maxsize=4096)
def _putter(lens: Any) -> Callable[..., list[Buffer]]:
    def put(held: list[Buffer], bits: Value, at: Value) -> list[Buffer]:
        return [lens.put(held[0], bits, at)]

    return without_interrupts(jax.jit(put, donate_argnums=0, keep_unused=True))


def replaced(
    written: Sequence[RefLike],
    read: Sequence[RefLike],
    body: Callable[[list[Buffer], list[Buffer]], tuple[Sequence[Value], Any]],
    calls_back: bool,
) -> Any:
    """Gives refs the values that `body(state, constants)` makes, and returns what else it makes.

    `body` is given copies, and returns `(new state, rest)`: it may be run op by op, and do anything
    with its arguments. Either all refs get their new values or none does.
    """

    # The cells of packed refs may be taken for others: their values come with those.
    taken = {id(store_of(ref).cell) for ref in written}
    beside, apart = [], []  # type: ignore[var-annotated]
    for ref in read:
        (beside if id(store_of(ref).cell) in taken else apart).append(ref)

    def copied(held: list[Buffer], read_buffers: list[Buffer]) -> tuple[list[Buffer], list[Buffer]]:
        parts = [store_of(r).bits(x) for r, x in zip(apart, read_buffers, strict=True)]
        return held, _copies(apart, parts)

    def call(held: list[Buffer], values: list[Buffer]) -> tuple[list[Buffer], Any]:
        # A separate exchange, whose record as a reader is gone when `body` runs.
        read_cells = [store_of(ref).cell for ref in apart]
        read_buffers: list[Buffer] = []
        constants = exchange([], copied, (read_buffers,), read_cells, read_buffers)
        known = dict(zip(map(id, [*beside, *apart]), [*values, *constants], strict=False))
        run = functools.partial(body, _copies(written, held), [known[id(ref)] for ref in read])
        new, rest = _jax.finished(run) if calls_back else run()
        _overwrite(written, held, new)
        return held, rest

    given = [*beside, *(apart if calls_back else [])]
    return exchange_refs(written, given, call, calls_back, looked_at=read)


def holding(refs: Sequence[RefLike], call: Callable[[], Any]) -> Any:
    """`call()`, which calls back, while these refs are taken: its callbacks can't use them."""
    return exchange_refs(refs, [], lambda held, _: (held, _jax.finished(call)), True)


@contextmanager
def lent(refs: Sequence[RefLike]) -> Iterator[list[jax.Array]]:
    """The arrays that distinct refs hold, not copied (those of packed refs are).

    Calls that would update the refs wait until the block ends.
    """
    stores = [*map(store_of, refs)]
    cells = [store.cell for store in stores]
    blocks, watching, block = lent_out, readers, Lent(cells)
    blocks += (block,)
    watching += (None,)
    try:
        buffers = patiently(lambda: _in_cells(cells), read=refs)
        values = [store.bits(buffer) for store, buffer in zip(stores, buffers, strict=True)]
        yield [_jax.wrap_keys(x, ref.dtype) for ref, x in zip(refs, values, strict=True)]
    finally:
        del watching[-1]
        blocks.remove(block)


def _in_cells(cells: Sequence[list[Buffer]]) -> list[Buffer]:
    """The buffers in cells, all of one moment. Raises Busy if one of the cells is empty."""
    try:
        return [*map(itemgetter(0), cells)]
    except IndexError:
        raise Busy from None


def values_of(refs: Sequence[RefLike]) -> list[jax.Array]:
    """Copies of the values of distinct refs, all of one moment."""
    return exchange_refs([], refs, lambda _, buffers: ([], _copies(refs, buffers)))


def swapped(refs: Sequence[RefLike], values: Sequence[Value]) -> list[jax.Array]:
    """Gives distinct refs new values, all of them or none; returns copies of the old ones."""

    def call(held: list[Buffer], _: list[Buffer]) -> tuple[list[Buffer], list[jax.Array]]:
        old = _copies(refs, held)
        _overwrite(refs, held, values)
        return held, old

    return exchange_refs(refs, [], call)


def replace(
    refs: Sequence[RefLike],
    values: Sequence[Value],
    objection: Callable[[Sequence[RefLike], Sequence[Buffer]], Any] | None = None,
) -> Any:
    """Gives distinct refs new values: all of them or none.

    They get none if there is an `objection`, as for `exchange_refs`; that is returned.
    """

    def call(held: list[Buffer], _: list[Buffer]) -> tuple[list[Buffer], None]:
        _overwrite(refs, held, values)
        return held, None

    return exchange_refs(refs, [], call, objection=objection) if refs else None


def _overwrite(refs: Sequence[RefLike], held: list[Buffer], values: Sequence[Value]) -> None:
    """Writes values into the buffers in `held`, which are donated.

    Raises:
      RefError: if a value doesn't fit its ref; nothing is written.
    """
    kernels = [store_of(ref).kernels.alone for ref in refs]
    values = [k.prepared(value, k.shape) for k, value in zip(kernels, values, strict=True)]
    for ref, buffer, value in zip(refs, held, values, strict=True):
        check_devices("write", ref, buffer, value)
    defer()  # An interrupt between two of them would leave one new and the other old.
    for k, (of_ref, value) in enumerate(zip(kernels, values, strict=True)):
        held[k : k + 1], _ = of_ref.updater(EVERYTHING, "set").run(held[k : k + 1], (), value)


def _copies(refs: Sequence[RefLike], bits: Sequence[Buffer]) -> list[Buffer]:
    """Copies of the values of refs, of what they have of buffers."""
    try:
        return [
            store_of(ref).kernels.alone.reader(EVERYTHING)(x, ())
            for ref, x in zip(refs, bits, strict=True)
        ]
    except (RuntimeError, ValueError):
        if any(x.is_deleted() for x in bits):
            raise Busy from None  # A value is lost: `wait` raises the error for it.
        raise  # pragma: no cover, the memory is full, for one
