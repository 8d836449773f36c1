"""How long the use of a ref waits for others, and the errors where it would never end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

from refs import _jax
from refs._buffers.exchange import Busy, call_reading, exchange_one
from refs._buffers.records import (
    CALLBACK,
    READ,
    Cell,
    Record,
    all_records,
    is_lent_here,
    mine,
    my_records,
)
from refs._buffers.stores import check_usable, store_of
from refs._origin import origin_of, user_site
from refs._types import Buffer, RefLike
from refs.errors import RefStateError

# Seconds that the use of a ref waits for one other call. A program that calls back may well run for
# minutes; but one whose callback waits for this very use runs for ever.
LIMIT = 300.0


def patiently(
    attempt: Callable[[], Any], written: Sequence[RefLike] = (), read: Sequence[RefLike] = ()
) -> Any:
    """`attempt()`, retried while it raises Busy: while a buffer of these refs isn't available.

    Raises:
      RefStateError: if one of the refs has ended or is lost, if waiting would never end, or if it
        takes longer than `LIMIT`.
    """
    waiting = Waiting()
    while True:
        try:
            return attempt()
        except Busy as busy:
            waiting.wait(busy, written, read)


class Waiting:
    """The waits between the attempts of one operation."""

    def __init__(self) -> None:
        self._n, self._begun = 0, time.monotonic()

    def wait(self, busy: Busy, written: Sequence[RefLike], read: Sequence[RefLike] = ()) -> None:
        """Waits a moment after an attempt.

        Raises:
          RefStateError: as `patiently`.
        """
        for ref in (*written, *read):
            check_usable(ref)
        for ref in written:
            _check_not_read(ref)
        if self._n > 3:
            for ref in written:
                check_may_wait(ref, writes=True)
            for ref in read:
                if not store_of(ref).cell:
                    check_may_wait(ref, writes=False)
        if time.monotonic() > self._begun + LIMIT:
            _give_up([*written, *read])
        # At first this only lets another thread run; in the end it takes a millisecond. Who reads
        # may wait for what this call has just put back: that gets the time to take it.
        time.sleep(0.01 if READ in busy.args else 2.0 ** min(self._n, 10) * 1e-6 if self._n else 0)
        self._n += 1


def current_buffer(ref: RefLike) -> Buffer:
    """The buffer that a ref holds, for reading: the next call that writes the ref deletes it."""
    cell = store_of(ref).cell
    return patiently(lambda: call_reading(cell, lambda buffer, _: buffer, None), read=[ref])


def check_may_wait(ref: RefLike, writes: bool) -> None:
    """Refuses to wait for a call or a block that waits for the current code, which uses a ref.

    Raises:
      RefStateError: if a call beneath this one on this thread's stack holds the ref, or a block of
        this thread lends it, or if this is a callback and a call with callbacks holds it.
    """
    cell = store_of(ref).cell
    is_read = writes and cell  # Those that read wait for nobody who reads.
    doing, has = ("reading", Record.reads) if is_read else ("updating", Record.takes)
    if is_read and is_lent_here(cell):
        raise RefStateError(
            f"write to {_described(ref)} inside a block `with refs.tree.borrow(...)` that lends "
            "its buffer: it would wait for the block's end. Write it after the block"
        )
    if any(has(r, cell) for r in my_records()) or _takes(sys._getframe(), cell):
        who = "a callback of that call" if _is_callback() else "code that interrupted that call"
    elif _is_callback() and any(r.calls_back and has(r, cell) for _, r in all_records()):
        who = "a callback"
    else:
        return
    raise RefStateError(
        f"use of {_described(ref)}, which a call is {doing} right now, by {who}: the call can't "
        "end before this does. Pass it as an argument of `refs.io_callback`, which is given its "
        "memory, or use it when the call has returned"
    )


def _check_not_read(ref: RefLike) -> None:
    """Refuses a callback's write to a ref that a program with callbacks, perhaps its own, reads."""
    cell = store_of(ref).cell
    if any(r.calls_back and r.reads(cell) for _, r in all_records()) and _is_callback():
        raise RefStateError(
            f"write to {_described(ref)} by a callback, while a call with callbacks reads it: it "
            "would wait for that call, and the call for this. Return the new value from the "
            "callback, or write it when the call has returned"
        )


def _is_callback() -> bool:
    """Whether a running program, JAX's or ours, has called the current code."""
    if any(r is CALLBACK for r in mine.records):
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _jax.is_callback_frame(frame):
        frame = frame.f_back
    return frame is not None


def _takes(frame: FrameType | None, cell: Cell) -> bool:
    """Whether an exchange of one buffer, which has no record, is on a stack, and takes this."""
    while frame is not None:
        if frame.f_code is exchange_one.__code__ and frame.f_locals.get("cell") is cell:
            return True
        frame = frame.f_back
    return False


def _give_up(refs: Sequence[RefLike]) -> NoReturn:
    """Raises the error that names a ref for which others have been waited, and the other call."""
    frames = sys._current_frames()
    for ref in refs:
        cell = store_of(ref).cell
        threads = [k for k, record in all_records() if record.takes(cell) or record.reads(cell)]
        threads += [k for k, frame in frames.items() if _takes(frame, cell)]
        for k in threads:
            names = {t.ident: t.name for t in threading.enumerate()}
            raise RefStateError(
                f"use of {_described(ref)}, after {LIMIT:g} s in which a call in thread "
                f"{names.get(k)!r}, at {user_site(frames.get(k))}, hasn't given it back: perhaps "
                "a callback of that call waits for this one"
            )
    described = ", ".join(map(_described, refs))
    raise RefStateError(f"use of {described}, after {LIMIT:g} s in which others have used it")


def _described(ref: RefLike) -> str:
    return origin_of(ref._aval).describe()
