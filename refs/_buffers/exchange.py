"""The atomic exchange of buffers: taken from refs, given to a program, replaced by its results.

Each ref has a *cell* for life: a list that holds its buffer, and is empty while a call has taken
it. An empty cell means that the buffer is in use, whatever the reason: one call names the ref
twice, a call of another thread has the buffer, or a callback touches the very ref that its call
updates. A buffer that one call has taken can't be taken by another, and no lock is held. Only
`exchange` takes buffers, and `exchange_one`, the same function for one cell. Whether they end
normally, by an error or by an interrupt, each cell gets back the item at its position in the list
`held`: the new buffer as soon as there is one, the old one until then. So at every moment a buffer
is in its cell or in `held`, and this is the proof.

**The rule.** CPython handles signals, and switches between threads, when a function begins, when a
loop jumps back and when a call into C has returned; nowhere else in Python code, and never in C
code that keeps the global interpreter lock. (`tests/faults/test_places.py` checks the running
interpreter.) So C code that runs over an iterator is one atomic step, however long:

    held += map(list.pop, cells)                     # taken
    [(held[:], rest)] = [*map(call, (held,))]        # called, and kept
    _ = [*put_back]                                  # put back: an iterator, made in advance

For one cell the first step is `cell.pop()`, and the last one is `cell += held`. An interrupt that
comes when `pop` returns would lose the buffer: so `held` has it before.

**A trace function.** With `sys.settrace`, in a debugger for instance, Python code runs between any
two statements, and if it wants to between any two instructions. Threads switch there, too, and a
few statements aren't one step. So what other threads must not come into is a single instruction:
each of those above is, and so are `[*cell]` and `cell[0]`, with which cells are looked into, where
`cell[0] if cell else None` is two (`records.look`). The paragraphs on threads, garbage and readers
need no more than that. What a trace function raises is no interrupt of the kind below: it can come
between any two lines, and a call that it ends may lose a value.

**An interrupt.** Between the first statement of the `try` and the `finally`, an interrupt can come
only where a function is called, and the code after each call is in the `try`, too. `held` is
complete then. If `call` is a program that JAX runs without its Python code, no interrupt comes
between XLA's return and `held[:]`. Where JAX's Python code takes part, signals wait until the end
(`signals.without_interrupts`). If `call` is a Python function, it must leave in `held`, its
argument, the buffers that the refs are to have if it raises. The `finally` calls nothing before all
buffers are back.

**An error.** If a cell is empty, `list.pop` raises. The buffers taken before that are in `held`,
and `put_back`, which iterates over `cells` and `held` together, ends where `held` does. A program
that can fail while it runs has destroyed what was donated to it: `_jit.ways.carefully` keeps copies
of that, and puts them into `held`.

**Another thread.** Taking is one step, so of two threads that want the same cells, one gets all or
puts back those that it got; it holds no buffer while it waits. So no thread waits for one that
waits. Threads also switch where an array is freed, because XLA frees it without the lock. So the
list `_gone` keeps the old buffers alive until the new ones are in their cells: otherwise a thread
that waits for the cells would always run in between.

**Garbage.** A finalizer may run where an object is allocated (by CPython 3.11; later ones wait for
the places above), and may use refs itself. It finds the cells as they were or empty; if they are
empty it gets an error (`records.check_may_wait`), which Python doesn't propagate.

**Readers.** A reader passes a buffer to XLA that stays in its cell. If another thread donated it
meanwhile, XLA would fail, and print so on the terminal. So a reader first registers itself
(`records.readers`), and then looks into the cell. A thread that has taken buffers looks for
registered readers, and waits until those of its buffers have finished, or puts the buffers back and
begins again: in whatever order the two come, one sees the other. It doesn't leave the waiting to
XLA, since a reader's callback may use the refs that it has taken.
"""

from __future__ import annotations

import operator
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain, starmap
from operator import itemgetter
from typing import Any

from refs._buffers.handles import check_native, is_ours
from refs._buffers.parts import value_of
from refs._buffers.records import (
    Busy,
    Cell,
    check_may_wait,
    check_not_read,
    mine,
    note_callback_waits,
    readers,
    wait_for_readers,
)
from refs._buffers.signals import deferred, deliver
from refs._types import Buffer, RefLike, Value

if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "refs needs Python's global interpreter lock: what makes its updates atomic are the places "
        "where threads can switch, and a free-threaded Python has other ones. Run with "
        "PYTHON_GIL=1, or use a Python with the lock"
    )


def check_taking(take: Callable[[list[Any], Any], Any] = operator.iadd) -> None:
    """Raises if `held += map(...)` loses what it has taken when `map` raises."""
    held: list[Any] = []
    with suppress(IndexError):
        take(held, map(list.pop, [[1], []]))
    if held != [1]:
        raise ImportError(
            "refs needs a Python whose lists keep what they got from an iterator before it raised: "
            "a call that finds a ref in use would lose the values of those before it. CPython does"
        )


check_taking()
_first = itemgetter(0)


def exchange(
    cells: Sequence[Cell],
    call: Callable[..., tuple[Sequence[Buffer], Any]],
    operands: tuple[Value, ...] = (),
    read_cells: Sequence[Cell] = (),
    read_buffers: list[Buffer] | None = None,
    calls_back: bool = False,
) -> Any:
    """Replaces the buffers in cells by those that `call` makes of them; returns its `rest`.

    Args:
      cells: the cells of distinct refs, which are written.
      call: `call(held, *operands)` returns `(new buffers, rest)`. It may consume the buffers in the
        list `held`. If it raises, the buffers that are in `held` then are put back.
      operands: its other operands.
      read_cells: the cells of refs that are only read.
      read_buffers: an empty list, which gets the buffers in `read_cells`, all of one moment. For
        `call` to see them, `operands` has the same list.
      calls_back: whether `call` runs users' Python code, which may wait for other calls.

    Raises:
      Busy: if a buffer isn't available. Each buffer is where it was.
    """
    held: list[Buffer] = []
    put_back = map(list.append, cells, held)
    records, watching, reads = mine.records, readers, False
    try:
        records += ((cells, (), calls_back),)
        held += map(list.pop, cells)
        if watching and not wait_for_readers(cells):
            raise Busy
        if read_cells:
            # Not before: two that write what the other one reads would wait for each other.
            records[-1] = cells, read_cells, calls_back
            watching += (None,)
            reads = True
            read_buffers += map(_first, read_cells)  # type: ignore[operator]
        _gone = [*held]  # kept alive while the cells are empty: see **Another thread**
        made = starmap(call, ((held, *operands),)) if operands else map(call, (held,))
        [(held[:], rest)] = [*made]
        return rest
    except IndexError:
        if len(held) == len(cells) and len(read_buffers or ()) == len(read_cells):
            raise  # `call` has raised it.
        raise Busy from None
    finally:
        _ = [*put_back]
        if reads:
            del watching[-1]
        del records[-1]
        if deferred:
            deliver()


def exchange_one(
    cell: Cell, call: Callable[..., tuple[Sequence[Buffer], Any]], *operands: Value
) -> Any:
    """`exchange` of one buffer, in half the time."""
    records = mine.records
    records += (cell,)
    held = [*cell]  # for an interrupt when `pop` returns
    try:
        try:
            gone = cell.pop()  # kept alive while the cell is empty: see **Another thread**
        except IndexError:
            held = []
            raise Busy from None
        held = [gone]
        if readers and not wait_for_readers([cell]):
            raise Busy
        made = starmap(call, ((held, *operands),)) if operands else map(call, (held,))
        [(held[:], rest)] = [*made]
        return rest
    finally:
        cell += held
        del records[-1]
        if deferred:
            deliver()


def call_reading(cell: Cell, call: Callable[..., Any], operand: Value) -> Any:
    """`call(buffer, operand)` on the buffer in a cell, which stays there and isn't donated.

    Raises:
      Busy: if the cell is empty.
    """
    records, watching = mine.records, readers
    records += (((), (cell,), False),)
    watching += (None,)
    try:
        try:
            buffer = cell[0]
        except IndexError:
            raise Busy from None
        # Not returned directly: the code after a call must be in the `try`, too.
        found = call(buffer, operand)
        return found
    finally:
        del watching[-1]
        del records[-1]


def patiently(
    attempt: Callable[[], Any], written: Sequence[RefLike] = (), read: Sequence[RefLike] = ()
) -> Any:
    """`attempt()`, retried while it raises Busy: while a buffer of these refs isn't available.

    Raises:
      RefStateError: if one of the refs has ended or is lost, or waiting would never end.
    """
    n = 0
    while True:
        try:
            return attempt()
        except Busy:
            n = wait(n, written, read)


def wait(n: int, written: Sequence[RefLike], read: Sequence[RefLike] = ()) -> int:
    """Waits a moment after the `n`-th attempt; returns the number of the next one.

    Raises:
      RefStateError: as `patiently`.
    """
    for ref in (*written, *read):
        ref._check() if is_ours(ref) else check_native(ref)
    ours = [*filter(is_ours, written)]
    check_not_read(ours)
    note_callback_waits()
    if n > 3:
        for ref in ours:
            check_may_wait(ref, writes=True)
        for ref in filter(_is_empty, read):
            check_may_wait(ref, writes=False)
    # At first this only lets another thread run; in the end it takes a millisecond.
    time.sleep(2.0 ** min(n, 10) * 1e-6 if n else 0)
    return n + 1


def _is_empty(ref: RefLike) -> bool:
    return is_ours(ref) and not ref._cell


def current_buffer(ref: RefLike) -> Buffer:
    """The buffer that a ref holds, for reading: the next call that writes the ref deletes it."""
    return patiently(lambda: call_reading(ref._cell, lambda buffer, _: buffer, None), read=[ref])


def end(ref: RefLike, how: str) -> Buffer:
    """Takes a ref's buffer away for good and returns it. Later uses raise errors that say `how`."""

    def take_away(held: list[Buffer]) -> tuple[list[Buffer], Buffer]:
        if ref._part is not None:  # The others of its pack keep the buffer.
            value = value_of(ref, held[0])
            object.__setattr__(ref, "_end", how)
            ref._part.pack.n_ended += 1
            return held, value
        buffer = held[0]
        # One step in C: no interrupt sees a ref that has ended and still has its buffer.
        changes = (
            map(object.__setattr__, (ref,), ("_end",), (how,)),
            map(list.clear, (held,)),
        )
        _ = [*chain.from_iterable(changes)]
        return held, buffer

    return patiently(lambda: exchange([ref._cell], take_away), [ref])
