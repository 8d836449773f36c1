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
that can fail while it runs has destroyed what was donated: `_jit.running.carefully` keeps copies
of that, and puts them into `held`.

**Another thread.** Taking is one step, so of two threads that want the same cells, one gets all or
puts back those that it got; it holds no buffer while it waits. So no thread waits for one that
waits. Threads also switch where an array is freed, because XLA frees it without the lock. So the
list `_gone` keeps the old buffers alive until the new ones are in their cells: otherwise a thread
that waits for the cells would always run in between.

**Garbage.** A finalizer may run where an object is allocated (by CPython 3.11; later ones wait for
the places above), and may use refs itself. It finds the cells as they were or empty; if they are
empty it gets an error (`waiting.check_may_wait`), which Python doesn't propagate.

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import starmap
from operator import itemgetter
from typing import Any

from refs._buffers.records import Busy, Cell, mine, readers, wait_for_readers
from refs._buffers.signals import deferred, deliver, exchanges
from refs._types import Buffer, Value

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
        if watching:
            wait_for_readers(cells)
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
    """`exchange` of one buffer, in half the time.

    It has no record, which would take a tenth of the time: who looks for it looks at the stack.
    """
    held = [*cell]  # for an interrupt when `pop` returns
    try:
        try:
            gone = cell.pop()  # kept alive while the cell is empty: see **Another thread**
        except IndexError:
            held = []
            raise Busy from None
        held = [gone]
        if readers:
            wait_for_readers([cell])
        made = starmap(call, ((held, *operands),)) if operands else map(call, (held,))
        [(held[:], rest)] = [*made]
        return rest
    finally:
        cell += held
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


exchanges.update({exchange.__code__, exchange_one.__code__})
