"""Several handles as one: what they hold at one moment, and nothing between that and a write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import jax

from refs import _eager, _holders, _jax, _store
from refs._eager import buffer_of, is_ours, skeleton_of, update_native
from refs._signals import without_signals
from refs._store import get_store
from refs._values import fit


def together(
    written: Sequence[Any], read: Sequence[Any], body: Callable[..., Any], may_call_back: bool
) -> Any:
    """`body(state, constants, lists, indices, leave)` while the refs that it writes are taken.

    Args:
      written: distinct handles, ours or JAX's.
      read: others, distinct too.
      body: is given what those hold, at one moment, and for those of `written` that are ours: in
        which list the buffer is, and where. It runs `leave`, an iterator, when XLA has what it
        reads, or ends. It may return None, to begin again.
      may_call_back: whether it runs Python code, which may wait for others: these don't wait until
        it has read.

    Raises:
      RefStateError: if a ref has ended, or waiting for it would never end.
    """
    ours, ours_read = [*filter(is_ours, written)], [*filter(is_ours, read)]
    if _holders.reading:
        _holders.check_not_read(ours)

    def run(lists: list[Any], indices: list[Any]) -> Any:
        looking: Any = []
        leave = map(list.pop, looking)
        held = dict(zip(map(get_store, ours), lists, strict=True))
        try:
            mine, others = map(getitem, lists, indices), iter(look(held, looking))
            state = [next(mine) if is_ours(r) else buffer_of(r) for r in written]
            constants = [next(others) if is_ours(r) else buffer_of(r) for r in read]
            if any(buffer is None for buffer in (*state, *constants)):
                return None  # A ref has ended, which `wait` says.
            return body(state, constants, lists, indices, leave)
        finally:
            _ = [*leave]
            looking = None

    def look(held: dict[Any, list[Any]], looking: list[Any]) -> list[Any]:
        # What shares a store with what is written is taken with it, and nobody moves it.
        elsewhere = [r for r in ours_read if r._store not in held]
        try:
            if may_call_back:
                found = iter(_store.peek_all(elsewhere))
            else:
                found = iter(_store.look_at_all(elsewhere, looking))
        except IndexError:
            return [None] * len(ours_read)  # Another thread's call has one.
        return [held[r._store][r._index] if r._store in held else next(found) for r in ours_read]

    attempt = 0
    while True:
        found = _store.taken(ours, run)
        if found is not None:
            return found
        attempt = _store.wait(attempt, ours + ours_read)


def alone(written: Sequence[Any]) -> None:
    """Parts refs from others that share their stores: callbacks may use those meanwhile."""
    _store.gather([*filter(is_ours, written)])


def replaced(
    written: Sequence[Any],
    read: Sequence[Any],
    body: Callable[[list[Any], list[Any]], Any],
    may_call_back: bool,
) -> Any:
    """Gives refs the values that `body(state, constants)` makes, and returns the rest of it.

    `body` is given copies, and gives `(new state, rest)`: it may be run op by op, and use what it
    is given as it likes. The refs get all of it or nothing.
    """

    if may_call_back:
        alone(written)

    def run(
        state: list[Any], constants: list[Any], lists: list[Any], indices: list[Any], leave: Any
    ) -> Any:
        calls_back = may_call_back  # noqa: F841  by which `refs._holders` knows us
        try:
            state, constants = _copies(written, state), _copies(read, constants)
        except (RuntimeError, ValueError) as error:
            if not _jax.is_about_deleted(error):
                raise
            for ref in filter(is_ours, (*written, *read)):
                ref._check()  # If none is lost, a call of another thread has come between.
            return None
        _ = [*leave]
        new, rest = body(state, constants)
        if may_call_back:
            jax.block_until_ready((new, rest))

        _overwrite(written, new, lists, indices)
        return (rest,)

    [rest] = together(written, read, run, may_call_back=False)
    return rest


def holding(refs: Sequence[Any], call: Callable[[], Any]) -> Any:
    """`call()`, which calls back, while these refs are taken: its callbacks can't have them."""

    def run(
        state: list[Any], constants: list[Any], lists: list[Any], indices: list[Any], leave: Any
    ) -> Any:
        calls_back = True  # noqa: F841  by which `refs._holders` knows us
        _ = [*leave]
        return (jax.block_until_ready(call()),)

    alone(refs)
    [out] = together(refs, [], run, may_call_back=False)
    return out


def replace(
    refs: Sequence[Any],
    values: Sequence[Any],
    objection: Callable[[Sequence[Any], Sequence[Any]], Any],
) -> Any:
    """Gives distinct refs new values: all of them or none.

    They get none if `objection(refs, buffers)`, of what they hold until then, gives anything, which
    is returned.
    """

    def run(
        state: list[Any], constants: list[Any], lists: list[Any], indices: list[Any], leave: Any
    ) -> Any:
        _ = [*leave]
        found = objection(refs, state)
        if found is None:
            _overwrite(refs, values, lists, indices)
        return (found,)

    return together(refs, [], run, may_call_back=False)[0] if refs else None


def _overwrite(
    refs: Sequence[Any], values: Sequence[Any], lists: list[Any], indices: list[Any]
) -> None:
    def write() -> None:
        places = iter(zip(lists, indices, strict=True))
        for ref, value in zip(refs, values, strict=True):
            if is_ours(ref):
                buffers, k = next(places)
                buffers[k] = _overwritten(ref, buffers[k], value)
            else:
                update_native(ref, _overwritten(ref, buffer_of(ref), value))

    without_signals(write)


def _copies(refs: Sequence[Any], buffers: Sequence[Any]) -> list[Any]:
    return [
        _eager.reader(skeleton_of(ref.shape, ()), ref.dtype)(buffer, [])
        for ref, buffer in zip(refs, buffers, strict=True)
    ]


def _overwritten(ref: Any, buffer: Any, value: Any) -> Any:
    """The buffer, which is donated, with a ref's new value in it."""
    kernel = _eager.updater(ref, "set", skeleton_of(ref.shape, ()))
    return kernel(buffer, [], fit(value, ref.shape, ref.dtype))
