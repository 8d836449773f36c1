"""How buffers are taken from refs, given to a program, and others put in their place.

Each ref has a *cell* for life: a list that holds its buffer, or nothing while somebody has taken
it. So an empty cell says all that there is to say: a ref that is named twice in one call, a call of
another thread, a callback that touches the very ref that its call updates. What is taken by one
can't be taken by another, and no lock is held. `exchange` takes buffers, and `exchange_one`, which
is the same for one cell; nothing else does. Whatever ends them, an error, an interrupt, or their
end, each cell gets back what is in its place in the list `held`: the new buffer from the moment
that there is one, the old one until then. There is no moment without either, and the proof is this.

**The rule.** CPython handles signals, and switches between threads, when a function begins, when a
loop turns and when a call into C has returned; nowhere else in Python code, and never in C code
that doesn't give the global lock away. (`tests/faults/test_places.py` asks the interpreter.) So a
few statements without a call are one step, and so is C code over an iterator, however long:

    held += map(list.pop, cells)                     # taken
    [(held[:], rest)] = [*map(call, (held,))]        # called, and kept
    _ = [*put_back]                                  # put back: an iterator, made in advance

For one cell the first is `held = [*cell]; del cell[:]`, and the last `cell += held`.

**An interrupt.** Between the first statement of the `try` and the `finally` it can come only where
a function is called, and what stands after each call is in the `try`, too. `held` is complete then.
If `call` is a program that JAX runs without its Python code, nothing comes between XLA's return and
`held[:]`. The first time JAX runs one with it: then signals wait (`signals.without_signals`). If
`call` is a Python function it must leave in `held`, which it is given, what the refs are to have if
it raises. In `finally` nothing is called before all is back.

**An error.** Where a cell is found empty, `list.pop` raises. What was taken before that is in
`held`, and `put_back`, which goes along `cells` and `held` together, ends where `held` does.

**Another thread.** Taking is one step, so of two threads that want the same cells one gets all or
puts back what it has got; it waits with empty hands. So nobody waits for one who waits. Threads
also switch where an array goes, for XLA frees it without the lock. So the old ones, `_gone`, go
when the new ones are in their cells: a thread that waits for them would else always run in between.

**Garbage.** A finalizer may run wherever memory is allocated, and use refs itself. It finds the
cells empty, and is told that they can't be had (`owners.check_may_wait`). Its errors go nowhere.

**Readers.** Who reads gives a buffer to XLA that stays in its cell. If it was donated meanwhile XLA
would fail, and say so on the terminal. So a reader makes a note first (`owners.readers`), and then
looks into the cell. Who has taken buffers looks for such notes, and waits until their readers have
gone, or puts them back and begins again: in whatever order the two come, one sees the other.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from itertools import chain, starmap
from operator import itemgetter
from typing import Any

from refs import _jax
from refs._buffers.handles import is_ours
from refs._buffers.owners import (
    Cell,
    check_may_wait,
    check_not_read,
    mine,
    readers,
    wait_for_readers,
)
from refs._types import RefLike, Value

if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "refs needs Python's global interpreter lock: what makes its updates atomic are the places "
        "where threads can switch, and a free-threaded Python has other ones. Run with "
        "PYTHON_GIL=1, or use a Python with the lock"
    )

_first = itemgetter(0)


class Busy(Exception):
    """A buffer isn't to be had now, and the exchange must be tried again: nothing has changed.

    Its cell is empty, for it is taken or its ref has ended; or somebody reads it; or it is deleted.
    """


def exchange(
    cells: Sequence[Cell],
    call: Callable[..., Any],
    operands: tuple[Value, ...] = (),
    read_cells: Sequence[Cell] = (),
    read_buffers: list[Any] | None = None,
    calls_back: bool = False,
) -> Any:
    """Replaces the buffers in cells by those that `call` makes of them; the rest of its result.

    Args:
      cells: those of distinct refs, which are written.
      call: `call(held, *operands)` gives `(new buffers, rest)`. It may consume the buffers in the
        list `held`. If it raises, what is in there is put back.
      operands: its others.
      read_cells: cells of what is only read.
      read_buffers: an empty list, which is to hold the buffers in them. All are of one moment.
      calls_back: whether `call` runs code that may wait for others.

    Raises:
      Busy: if a buffer isn't to be had. Each is where it was.
    """
    held: list[Any] = []
    put_back = map(list.append, cells, held)
    records, watching, reads = mine.records, readers, False
    try:
        records += ((cells, read_cells, calls_back),)
        held += map(list.pop, cells)
        if watching and not wait_for_readers(cells):
            raise Busy
        if read_cells:
            watching += (None,)
            reads = True
            read_buffers += map(_first, read_cells)  # type: ignore[operator]
        _gone = [*held]  # for as long as the cells are empty: see **Another thread**
        made = starmap(call, ((held, *operands),)) if operands else map(call, (held,))
        [(held[:], rest)] = [*made]
        return rest
    except IndexError:
        if len(held) == len(cells) and len(read_buffers or ()) == len(read_cells):
            raise  # It is of `call`.
        raise Busy from None
    finally:
        _ = [*put_back]
        if reads:
            del watching[-1]
        del records[-1]


def exchange_one(cell: Cell, call: Callable[..., Any], *operands: Value) -> Any:
    """`exchange` of one buffer, in half the time."""
    records = mine.records
    records += (cell,)
    held = [*cell]
    del cell[:]
    try:
        if not held or (readers and not wait_for_readers([cell])):
            raise Busy
        _gone = [*held]  # for as long as the cells are empty: see **Another thread**
        made = starmap(call, ((held, *operands),)) if operands else map(call, (held,))
        [(held[:], rest)] = [*made]
        return rest
    finally:
        cell += held
        del records[-1]


def call_reading(cell: Cell, call: Callable[..., Any], operand: Value) -> Any:
    """`call(buffer, operand)` of the buffer in a cell, which stays there, and isn't donated.

    Raises:
      Busy: if it is empty.
    """
    records, watching = mine.records, readers
    records += (((), (cell,), False),)
    watching += (None,)
    try:
        if not cell:
            raise Busy
        # Not returned at once: what comes after a call must stand in the `try`.
        found = call(cell[0], operand)
        return found
    finally:
        del watching[-1]
        del records[-1]


def patiently(
    attempt: Callable[[], Any], written: Sequence[Any] = (), read: Sequence[Any] = ()
) -> Any:
    """`attempt()`, again and again while it finds the cell of one of these refs empty.

    Raises:
      RefStateError: if one of the refs has ended or is lost, or waiting would never end.
    """
    n = 0
    while True:
        try:
            return attempt()
        except Busy:
            n = wait(n, written, read)


def wait(n: int, written: Sequence[Any], read: Sequence[Any] = ()) -> int:
    """Lets a moment pass after the `n`-th attempt; returns the number of the next one.

    Raises:
      RefStateError: as `patiently`.
    """
    for ref in (*written, *read):
        ref._check() if is_ours(ref) else _jax.native_buffer(ref)
    ours = [*filter(is_ours, written)]
    check_not_read(ours)
    if n > 3:
        for ref in (*ours, *(r for r in read if is_ours(r) and not r._cell)):
            check_may_wait(ref)
    # First only another thread's turn, in the end a millisecond.
    time.sleep(2.0 ** min(n, 10) * 1e-6 if n else 0)
    return n + 1


def current_buffer(ref: RefLike) -> Any:
    """The buffer that a ref holds, for reading: the next call that writes the ref deletes it."""
    return patiently(lambda: call_reading(ref._cell, lambda buffer, _: buffer, None), read=[ref])


def end(ref: RefLike, how: str) -> Any:
    """Takes a ref's buffer away for ever, and returns it. Later uses are errors that say `how`."""

    def take_away(held: list[Any]) -> Any:
        buffer = held[0]
        changes = (
            map(object.__setattr__, (ref,), ("_end",), (how,)),
            map(list.clear, (held,)),
        )
        _ = [*chain.from_iterable(changes)]
        return held, buffer

    return patiently(lambda: exchange([ref._cell], take_away), [ref])
