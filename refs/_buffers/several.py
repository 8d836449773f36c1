"""Exchanges of what several handles hold, ours and JAX's own, at one moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from refs._buffers.exchange import Busy, exchange, patiently
from refs._buffers.handles import buffer_of, is_ours, update_native
from refs._buffers.kernels import reader, skeleton_of, updater
from refs._buffers.signals import without_signals
from refs._indexing.values import fit
from refs._types import Buffer, RefLike, Value


def exchange_refs(
    written: Sequence[Any],
    read: Sequence[Any],
    call: Callable[[list[Any], list[Any]], Any],
    calls_back: bool = False,
) -> Any:
    """An `exchange` over distinct handles, with `call(held, read_buffers)`.

    It is tried again while one isn't free, or if `call` raises Busy itself.

    Raises:
      RefStateError: if a ref has ended, or waiting for it would never end.
    """

    def attempt() -> Any:
        cells, read_cells = [*map(_cell_of, written)], [*map(_cell_of, read)]
        read_buffers: list[Any] = []
        before = [c[0] for r, c in zip(written, cells, strict=True) if not is_ours(r)]
        try:
            return exchange(cells, call, (read_buffers,), read_cells, read_buffers, calls_back)
        finally:
            olds = iter(before)
            for ref, cell in zip(written, cells, strict=True):
                if not is_ours(ref) and cell[0] is not next(olds):
                    update_native(ref, cell[0])

    return patiently(attempt, written, read)


def _cell_of(ref: RefLike) -> list[Any]:
    """A ref's cell; one of JAX's own gets one for the time being."""
    return ref._cell if is_ours(ref) else [buffer_of(ref)]


def replaced(
    written: Sequence[Any],
    read: Sequence[Any],
    body: Callable[[list[Any], list[Any]], Any],
    calls_back: bool,
) -> Any:
    """Gives refs the values that `body(state, constants)` makes, and returns the rest of it.

    `body` is given copies, and gives `(new state, rest)`: it may be run op by op, and use what it
    is given as it likes. The refs get all of it or nothing.
    """

    def copied(held: list[Any], read_buffers: list[Any]) -> Any:
        return held, _copies(read, read_buffers)

    def call(held: list[Any], _: list[Any]) -> Any:
        # As a reader of its own, which has gone when `body` runs.
        read_cells, read_buffers = [*map(_cell_of, read)], []  # type: ignore[var-annotated]
        constants = exchange([], copied, (read_buffers,), read_cells, read_buffers)
        new, rest = body(_copies(written, held), constants)
        if calls_back:
            jax.block_until_ready((new, rest))
        _overwrite(written, held, new)
        return held, rest

    return exchange_refs(written, read if calls_back else [], call, calls_back)


def holding(refs: Sequence[RefLike], call: Callable[[], Any]) -> Any:
    """`call()`, which calls back, while these refs are taken: its callbacks can't have them."""
    return exchange_refs(refs, [], lambda held, _: (held, jax.block_until_ready(call())), True)


def replace(
    refs: Sequence[RefLike],
    values: Sequence[Value],
    objection: Callable[[Sequence[Any], Sequence[Any]], Any],
) -> Any:
    """Gives distinct refs new values: all of them or none.

    They get none if `objection(refs, buffers)`, of what they hold until then, gives anything, which
    is returned.
    """

    def call(held: list[Any], _: list[Any]) -> Any:
        found = objection(refs, held)
        if found is None:
            _overwrite(refs, held, values)
        return held, found

    return exchange_refs(refs, [], call) if refs else None


def _overwrite(refs: Sequence[RefLike], held: list[Any], values: Sequence[Value]) -> None:
    """Puts values into buffers, which are donated."""

    def write() -> None:
        for k, (ref, value) in enumerate(zip(refs, values, strict=True)):
            run = updater(ref, "set", skeleton_of(ref.shape, ())).compiled
            held[k : k + 1], _ = run(held[k : k + 1], [], fit(value, ref.shape, ref.dtype))

    without_signals(write)


def _copies(refs: Sequence[RefLike], buffers: Sequence[Buffer]) -> list[Any]:
    try:
        return [
            reader(skeleton_of(ref.shape, ()), ref.dtype)(buffer, [])
            for ref, buffer in zip(refs, buffers, strict=True)
        ]
    except (RuntimeError, ValueError):
        if any(buffer.is_deleted() for buffer in buffers):
            raise Busy from None  # and lost, which waiting says
        raise
