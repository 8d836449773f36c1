"""Signals that have to wait."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any


def without_signals(run: Callable[[], Any]) -> Any:
    """`run()`, after which the signals that came meanwhile are handled.

    The first time that JAX runs a program, its Python code has the results in its hands for a
    while: an interrupt there would lose them.
    """
    if threading.current_thread() is not threading.main_thread():
        return run()  # Python handles signals in the main thread only.
    came: list[tuple[int, Any]] = []
    # The last to be put back is the one that raises, KeyboardInterrupt.
    numbers = sorted(signal.valid_signals(), key=signal.SIGINT.__eq__)
    handlers: dict[int, Any] = {n: signal.getsignal(n) for n in filter(_is_handled, numbers)}
    try:
        for number in handlers:
            signal.signal(number, lambda *args: came.append(args))
        return run()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in came:
            handlers[number](number, frame)


def _is_handled(number: int) -> bool:
    return callable(signal.getsignal(number))
