"""Records of which calls hold or read a ref's buffer.

Each exchange of several buffers (see `exchange.py`) that is under way has a record, as has each
reader and each callback. A thread's records are a list, the outermost first: a signal handler, a
finalizer or a callback begins an exchange inside another. Blocks that lend buffers end in any order
and on any thread, so all of them are in one list, `lent_out`, and each removes itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

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
    """The current thread's records, as plain tuples: a `Record` takes longer to make.

    Few are ever looked at.
    """

    def __init__(self) -> None:
        self.records: list[tuple[Sequence[Cell], Sequence[Cell], bool]] = []
        _of_threads[threading.get_ident()] = self.records


_of_threads: dict[int, list[tuple[Sequence[Cell], Sequence[Cell], bool]]] = {}
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


def is_lent_here(cell: Cell) -> bool:
    """Whether a block of the current thread lends the buffer in a cell."""
    return any(x.is_mine() and x.reads(cell) for x in [*lent_out])


def all_records() -> Iterator[tuple[int, Record]]:
    """All records, each after the number of its thread."""
    for thread, records in [*_of_threads.items()]:
        for record in _as_records(records):
            yield thread, record


def my_records() -> list[Record]:
    """Those of the current thread, the outermost first."""
    return _as_records(mine.records)


def _as_records(records: list[Any]) -> list[Record]:
    return [*map(_as_record, [*records])]


def _as_record(r: Any) -> Record:
    return r if isinstance(r, Record) else Record(*r)


def wait_for_readers(cells: Sequence[Cell]) -> None:
    """Waits until the buffers taken from these cells have no readers.

    No new readers come, because the cells are empty. But a reader may wait for what this call has
    taken: one that runs callbacks, one that this very thread has interrupted, or a block of it that
    lends a buffer. So the wait ends after 0.1 s.

    Raises:
      Busy: if there are readers then. The buffers must be put back, for a while.
    """
    end = time.monotonic() + 0.1
    while any(r.reads(cell) for r in _readers() for cell in cells):
        if time.monotonic() > end or any(map(is_lent_here, cells)):
            raise Busy(READ)
        time.sleep(1e-6)


def _readers() -> Iterator[Any]:
    yield from (record for _, record in all_records())
    yield from [*lent_out]


READ = "read"  # what Busy says of a buffer that is being read

# A mark in a thread's records: a callback of a running program has begun those after it. It takes
# and reads nothing itself.
CALLBACK = Record((), (), False)


def called_back(callback: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`callback(*args, **kwargs)`, for a user's function that a running program calls."""
    records = mine.records
    try:
        records += (CALLBACK,)
        found = callback(*args, **kwargs)  # as in `exchange.call_reading`
        return found
    finally:
        del records[-1]
