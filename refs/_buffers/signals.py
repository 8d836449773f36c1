"""Signals that wait until an exchange has put its buffers back.

JAX's C++ code runs most programs, and no signal is handled before it returns. Where JAX's Python
code runs a program, it holds the results for a while: an interrupt there would lose them. So it
calls `defer` first (`without_interrupts`), and the exchange calls `deliver` when it has ended.
"""

from __future__ import annotations

import signal
import threading
from typing import Any, NamedTuple

from refs import _jax
from refs._buffers.records import mine


class _Deferral(NamedTuple):
    """Signals that wait.

    Attributes:
      depth: how many exchanges of this thread were under way when it began.
      handlers: the handlers of the signals that wait, by their numbers.
      replaced: those of them that aren't put back yet; SIGINT's is the first.
      came: the arguments of the handlers that must be called.
    """

    depth: int
    handlers: dict[int, Any]
    replaced: list[int]
    came: list[tuple[int, Any]]


# The main thread's: Python handles signals there only.
deferred: list[_Deferral] = []


def defer() -> None:
    """Makes signals wait until the exchange that is under way has ended."""
    if threading.current_thread() is not threading.main_thread():
        return
    depth = max(len(mine.records), 1)
    if deferred and deferred[-1].depth == depth:
        return
    # SIGINT's handler, which raises KeyboardInterrupt, is replaced first and put back last.
    numbers = filter(_is_handled, sorted(signal.valid_signals(), key=signal.SIGINT.__ne__))
    handlers: dict[int, Any] = {n: signal.getsignal(n) for n in numbers}
    d = _Deferral(depth, handlers, [], [])
    deferred.append(d)
    for number in handlers:
        d.replaced.append(number)
        signal.signal(number, lambda *args: d.came.append(args))


def _is_handled(number: int) -> bool:
    return callable(signal.getsignal(number))


def deliver(before_the_end: bool = False) -> None:
    """Handles the signals that came during an exchange that has ended.

    Those of an exchange around it go on waiting. `before_the_end`: the exchange under way, whose
    buffers are all in its list, counts as ended.

    Raises:
      BaseException: what a handler raises. The others are called nevertheless.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if not deferred or len(mine.records) - before_the_end >= deferred[-1].depth:
        return
    d = deferred[-1]
    try:
        while True:
            if not d.replaced:
                break
            # `signal` handles what has come, and then puts the handler back.
            signal.signal(d.replaced[-1], d.handlers[d.replaced[-1]])
            d.replaced.pop()
        while True:
            if not d.came:
                break
            number, frame = d.came.pop(0)
            d.handlers[number](number, frame)
        deferred.remove(d)
    except BaseException:
        deliver(before_the_end)
        raise


def without_interrupts(compiled: Any) -> Any:
    """A `jax.jit` function, to be called in an exchange, that no interrupt takes the results of."""
    return _jax.before_python(compiled, defer)
