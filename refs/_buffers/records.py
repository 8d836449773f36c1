"""Records of which calls hold or read a ref's buffer, and whether waiting for them can ever end.

Each exchange of buffers (see `exchange.py`) that is under way has a record, as has each reader and
each callback. A thread's records are a list, the outermost first: a signal handler, a finalizer or
a callback begins an exchange inside another. Blocks that lend buffers end in any order and on any
thread, so all of them are in one list, `lent_out`, and each removes itself.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from types import FrameType
from typing import Any, NamedTuple

from refs import _jax
from refs._types import RefLike
from refs.errors import RefStateError

# The list that holds a ref's buffer; empty while the buffer is taken.
Cell = list[Any]


def look(cell: Cell) -> Any:
    """What is in a cell at this moment, or None, in a single step."""
    return [*cell, None][0]


class Busy(Exception):
    """A buffer isn't available now, and the exchange must be retried: nothing has changed.

    Its cell is empty, since it is taken or its ref has ended; or it is being read; or it is
    deleted.
    """


class Record(NamedTuple):
    """An exchange, a reader or a callback.

    Attributes:
      cells: the cells that it takes buffers from.
      read_cells: the cells that it reads. Their buffers stay there, for others to read.
      calls_back: whether it runs users' Python code, which may wait for other calls.
    """

    cells: Sequence[Cell]
    read_cells: Sequence[Cell]
    calls_back: bool

    def takes(self, cell: Cell) -> bool:
        return any(c is cell for c in self.cells)

    def reads(self, cell: Cell) -> bool:
        return any(c is cell for c in self.read_cells)


class _OfThread(threading.local):
    """The current thread's records: each a plain tuple or a cell, which `_as_records` makes one of.

    A `Record` takes longer to make, and few are ever looked at.
    """

    def __init__(self) -> None:
        self.records: list[tuple[Sequence[Cell], Sequence[Cell], bool] | Cell] = []
        _of_threads[threading.get_ident()] = self.records


_of_threads: dict[int, list[tuple[Sequence[Cell], Sequence[Cell], bool] | Cell]] = {}
mine = _OfThread()


# An item for each reader: an exchange searches the records for readers only if there are any. It is
# a list, and no number, because appending to it is one step.
readers: list[None] = []


class Lent:
    """A reader that lasts as long as a block of the user's, which this thread has begun."""

    calls_back = False

    def __init__(self, cells: Sequence[Cell]):
        self._cells, self._of_thread = cells, mine.records

    def reads(self, cell: Cell) -> bool:
        return any(c is cell for c in self._cells)

    def is_mine(self) -> bool:
        """Whether it is a block of the current thread, which would wait for itself."""
        return self._of_thread is mine.records


lent_out: list[Lent] = []


def _is_lent_here(cell: Cell) -> bool:
    return any(x.is_mine() and x.reads(cell) for x in [*lent_out])


def _all_records() -> Iterator[Record]:
    return chain.from_iterable(map(_as_records, [*_of_threads.values()]))


def _as_records(records: list[Any]) -> list[Record]:
    return [*map(_as_record, [*records])]


def _as_record(r: Any) -> Record:
    if type(r) is list:
        return Record((r,), (), False)
    return r if isinstance(r, Record) else Record(*r)


def wait_for_readers(cells: Sequence[Cell]) -> bool:
    """Waits until the buffers taken from these cells have no readers; False if that takes long.

    No new readers come, because the cells are empty. A reader without callbacks finishes by itself:
    it gets 0.1 s, because one that this very thread has interrupted never finishes. (Nor does a
    block of this thread's.) A reader with callbacks may wait for other calls: a callback doesn't
    wait for it at all, and other code only until some callback waits for a ref, perhaps for one of
    these.
    """
    n, begun = 0, time.monotonic()
    while True:
        reading = [r for r in (*_all_records(), *lent_out) if any(map(r.reads, cells))]
        if not reading:
            return True
        if all(r.calls_back for r in reading):
            if _callback_waited_at[0] > begun or _is_callback():
                return False
        elif time.monotonic() > begun + 0.1 or any(map(_is_lent_here, cells)):
            return False
        time.sleep(2.0 ** min(n, 10) * 1e-6 if n > 10 else 0)
        n += 1


_callback_waited_at = [0.0]  # when a callback has last waited for a ref


def note_callback_waits() -> None:
    """Makes exchanges that wait for readers put their buffers back, if this is a callback."""
    if _is_callback():
        _callback_waited_at[0] = time.monotonic()


def check_may_wait(ref: RefLike, writes: bool) -> None:
    """Refuses to wait for a call or a block that waits for the current code, which uses a ref.

    Raises:
      RefStateError: if a call beneath this one on this thread's stack holds the ref, or a block of
        this thread lends it, or if this is a callback and a call with callbacks holds it.
    """
    cell = ref._cell
    is_read = writes and cell  # Those that read wait for nobody who reads.
    doing, has = ("reading", Record.reads) if is_read else ("updating", Record.takes)
    if is_read and _is_lent_here(cell):
        raise RefStateError(
            f"write to {ref._aval.origin.describe()} inside a block `with refs.tree.borrow(...)` "
            "that lends its buffer: it would wait for the block's end. Write it after the block"
        )
    if any(has(r, cell) for r in _as_records(mine.records)):
        who = "a callback of that call" if _is_callback() else "code that interrupted that call"
    elif _is_callback() and any(r.calls_back and has(r, cell) for r in _all_records()):
        who = "a callback"
    else:
        return
    raise RefStateError(
        f"use of {ref._aval.origin.describe()}, which a call is {doing} right now, by {who}: the "
        "call can't end before this does. Pass it as an argument of `refs.io_callback`, which is "
        "given its memory, or use it when the call has returned"
    )


def check_not_read(refs: Iterable[RefLike]) -> None:
    """Refuses a callback's write to a ref that a program with callbacks, perhaps its own, reads.

    Raises:
      RefStateError: if one of the refs is read by a running program, and this is a callback.
    """
    for ref in refs if readers else ():
        if any(r.calls_back and r.reads(ref._cell) for r in _all_records()) and _is_callback():
            raise RefStateError(
                f"write to {ref._aval.origin.describe()} by a callback, while a call with "
                "callbacks reads it: it would wait for that call, and the call for this. Return "
                "the new value from the callback, or write it when the call has returned"
            )


# A mark in a thread's records: a callback of a running program has begun those after it. It takes
# and reads nothing itself.
_CALLBACK = Record((), (), False)


def called_back(callback: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`callback(*args, **kwargs)`, for a user's function that a running program calls."""
    records = mine.records
    try:
        records += (_CALLBACK,)
        found = callback(*args, **kwargs)  # as in `exchange.call_reading`
        return found
    finally:
        del records[-1]


def _is_callback() -> bool:
    """Whether a running program, JAX's or ours, has called the current code."""
    if any(r is _CALLBACK for r in mine.records):
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _jax.is_callback_frame(frame):
        frame = frame.f_back
    return frame is not None
