"""Exchanges of the buffers of several handles as one atomic operation.

Handles may be ours or JAX's own. JAX's aren't thread-safe: they get their new buffers one after the
other when the exchange has ended.
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
from refs._buffers.exchange import Busy, exchange, patiently
from refs._buffers.handles import buffer_of, is_ours, update_native
from refs._buffers.kernels import reader, skeleton_of, updater
from refs._buffers.parts import on_parts, part_of, value_of
from refs._buffers.records import Lent, lent_out, look, readers
from refs._buffers.signals import defer
from refs._indexing.values import fit
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
    given = [*written, *read]
    has_parts = any(part_of(ref) is not None for ref in given)

    def attempt() -> Any:
        of_refs = [*map(_cell_of, given)]
        # Packed refs share cells; for other refs these are just their cells, in order.
        distinct = {id(cell): cell for cell in of_refs}
        order = {key: k for k, key in enumerate(distinct)}
        places = [order[id(cell)] for cell in of_refs]
        cells = [*distinct.values()]
        n = len({*places[: len(written)]})
        before = [*map(look, cells[:n])]
        run = on_parts(written, read, places, call) if has_parts else call

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
            for ref, k in zip(written, places, strict=False):
                _give_native(ref, cells[k], before[k])

    return patiently(attempt, written, [*read, *looked_at])


def _give_native(ref: RefLike, cell: list[Buffer], old: Buffer | None) -> None:
    """Gives a handle of JAX's own what has come into its temporary cell."""
    if not is_ours(ref) and cell[0] is not old:
        update_native(ref, cell[0])


def _cell_of(ref: RefLike) -> list[Buffer]:
    """A ref's cell; a temporary one for a handle of JAX's own."""
    return ref._cell if is_ours(ref) else [buffer_of(ref)]


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
    taken = {id(ref._cell) for ref in written if is_ours(ref)}
    beside = [ref for ref in read if is_ours(ref) and id(ref._cell) in taken]
    apart = [ref for ref in read if ref not in beside]

    def copied(held: list[Buffer], read_buffers: list[Buffer]) -> tuple[list[Buffer], list[Buffer]]:
        return held, _copies(apart, read_buffers, value_of)

    def call(held: list[Buffer], values: list[Buffer]) -> tuple[list[Buffer], Any]:
        # A separate exchange, whose record as a reader is gone when `body` runs.
        read_cells, read_buffers = [*map(_cell_of, apart)], []  # type: ignore[var-annotated]
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
    cells = [*map(_cell_of, refs)]
    blocks, watching, block = lent_out, readers, Lent(cells)
    blocks += (block,)
    watching += (None,)
    try:
        buffers = patiently(lambda: _in_cells(cells), read=refs)
        values = [value_of(ref, buffer) for ref, buffer in zip(refs, buffers, strict=True)]
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
    values = [fit(v, ref.shape, ref.dtype) for ref, v in zip(refs, values, strict=True)]
    for ref, buffer, value in zip(refs, held, values, strict=True):
        check_devices(ref, buffer, value)
    defer()  # An interrupt between two of them would leave one new and the other old.
    for k, (ref, value) in enumerate(zip(refs, values, strict=True)):
        run = updater(ref, "set", skeleton_of(ref.shape, ()))
        held[k : k + 1], _ = run(held[k : k + 1], [], value)


def _copies(
    refs: Sequence[RefLike],
    buffers: Sequence[Buffer],
    value_of: Callable[[RefLike, Buffer], Buffer] = lambda _, buffer: buffer,
) -> list[Buffer]:
    """Copies of the values of refs, from these buffers."""
    try:
        return [
            reader(skeleton_of(ref.shape, ()), ref.dtype)(value_of(ref, buffer), [])
            for ref, buffer in zip(refs, buffers, strict=True)
        ]
    except (RuntimeError, ValueError):
        if any(buffer.is_deleted() for buffer in buffers):
            raise Busy from None  # A value is lost: `wait` raises the error for it.
        raise  # pragma: no cover, the memory is full, for one
