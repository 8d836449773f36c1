"""Signals that wait until an exchange has put its buffers back.

JAX's C++ code runs most programs, and no signal is handled before it returns. Where JAX's Python
code runs a program, it holds the results for a while: an interrupt there would lose them. So it
calls `defer` first (`without_interrupts`), and the exchange calls `deliver` when it has ended.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import CodeType, FrameType
from typing import Any, NamedTuple

from refs import _jax


class _Deferral(NamedTuple):
    """Signals that wait.

    Attributes:
      exchange: the innermost exchange that was under way when it began: the `id` of its frame.
      handlers: the handlers of the signals that wait, by their numbers.
      replaced: those of them that aren't put back yet; SIGINT's is the first.
      came: the arguments of the handlers that must be called.
    """

    exchange: int
    handlers: dict[int, Any]
    replaced: list[int]
    came: list[tuple[int, Any]]


exchanges: set[CodeType] = set()  # the code of the functions that exchange buffers

# The main thread's: Python handles signals there only.
deferred: list[_Deferral] = []


def defer() -> None:
    """Makes signals wait until the exchange that is under way has ended."""
    if threading.current_thread() is not threading.main_thread():
        return
    exchange = _under_way()
    if deferred and deferred[-1].exchange == exchange:
        return
    # SIGINT's handler, which raises KeyboardInterrupt, is replaced first and put back last.
    numbers = filter(_is_handled, sorted(signal.valid_signals(), key=signal.SIGINT.__ne__))
    handlers: dict[int, Any] = {n: signal.getsignal(n) for n in numbers}
    d = _Deferral(exchange, handlers, [], [])
    deferred.append(d)
    for number in handlers:
        d.replaced.append(number)
        signal.signal(number, lambda *args: d.came.append(args))


def _under_way() -> int:
    """The innermost exchange on the stack: the `id` of its frame, which lives as long. Or 0."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in exchanges:
        frame = frame.f_back
    return 0 if frame is None else id(frame)


def _is_handled(number: int) -> bool:
    return callable(signal.getsignal(number))


def deliver() -> None:
    """Handles the signals that came during the innermost exchange on the stack.

    Its buffers are back in their cells, or all in its list. Those that came during an exchange
    around it go on waiting.

    Raises:
      BaseException: what a handler raises. The others are called nevertheless.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if not deferred or deferred[-1].exchange != _under_way():
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
        deliver()
        raise


def without_interrupts(compiled: Any) -> Any:
    """A `jax.jit` function, to be called in an exchange, that no interrupt takes the results of."""
    return _jax.before_python(compiled, defer)
