"""Exchanges of the buffers of several handles as one atomic operation.

Handles may be ours or JAX's own. JAX's aren't thread-safe: they get their new buffers one after the
other when the exchange has ended.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from refs import _jax
from refs._buffers.devices import check_devices
from refs._buffers.exchange import Busy, exchange, patiently
from refs._buffers.handles import buffer_of, is_ours, update_native
from refs._buffers.kernels import reader, skeleton_of, updater
from refs._buffers.signals import defer
from refs._indexing.values import fit
from refs._types import Buffer, RefLike, Value


def exchange_refs(
    written: Sequence[RefLike],
    read: Sequence[RefLike],
    call: Callable[[list[Buffer], list[Buffer]], tuple[Sequence[Buffer], Any]],
    calls_back: bool = False,
    looked_at: Sequence[RefLike] = (),
) -> Any:
    """An `exchange` over distinct handles, with `call(held, read_buffers)`.

    It is retried while a buffer isn't available, or if `call` itself raises Busy, because one of
    the refs `looked_at` isn't.

    Raises:
      RefStateError: if a ref has ended, or waiting for it would never end.
    """

    def attempt() -> Any:
        cells, read_cells = [*map(_cell_of, written)], [*map(_cell_of, read)]
        read_buffers: list[Buffer] = []
        before = [None if is_ours(r) else c[0] for r, c in zip(written, cells, strict=True)]
        try:
            return exchange(cells, call, (read_buffers,), read_cells, read_buffers, calls_back)
        finally:
            for ref, cell, old in zip(written, cells, before, strict=True):
                _give_native(ref, cell, old)

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

    def copied(held: list[Buffer], read_buffers: list[Buffer]) -> tuple[list[Buffer], list[Buffer]]:
        return held, _copies(read, read_buffers)

    def call(held: list[Buffer], _: list[Buffer]) -> tuple[list[Buffer], Any]:
        # A separate exchange, whose record as a reader is gone when `body` runs.
        read_cells, read_buffers = [*map(_cell_of, read)], []  # type: ignore[var-annotated]
        constants = exchange([], copied, (read_buffers,), read_cells, read_buffers)
        run = functools.partial(body, _copies(written, held), constants)
        new, rest = _jax.finished(run) if calls_back else run()
        _overwrite(written, held, new)
        return held, rest

    return exchange_refs(written, read if calls_back else [], call, calls_back, looked_at=read)


def holding(refs: Sequence[RefLike], call: Callable[[], Any]) -> Any:
    """`call()`, which calls back, while these refs are taken: its callbacks can't use them."""
    return exchange_refs(refs, [], lambda held, _: (held, _jax.finished(call)), True)


def replace(
    refs: Sequence[RefLike],
    values: Sequence[Value],
    objection: Callable[[Sequence[RefLike], Sequence[Buffer]], Any],
) -> Any:
    """Gives distinct refs new values: all of them or none.

    They get none if `objection(refs, buffers)`, for their old buffers, doesn't return None; its
    result is returned.
    """

    def call(held: list[Buffer], _: list[Buffer]) -> tuple[list[Buffer], Any]:
        found = objection(refs, held)
        if found is None:
            _overwrite(refs, held, values)
        return held, found

    return exchange_refs(refs, [], call) if refs else None


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


def _copies(refs: Sequence[RefLike], buffers: Sequence[Buffer]) -> list[Buffer]:
    try:
        return [
            reader(skeleton_of(ref.shape, ()), ref.dtype)(buffer, [])
            for ref, buffer in zip(refs, buffers, strict=True)
        ]
    except (RuntimeError, ValueError):
        if any(buffer.is_deleted() for buffer in buffers):
            raise Busy from None  # A value is lost: `wait` raises the error for it.
        raise  # pragma: no cover, the memory is full, for one
