"""Signals that are deferred while a function runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any


def without_signals(run: Callable[[], Any]) -> Any:
    """`run()`, after which the signals that came meanwhile are handled.

    In a program's first run, JAX's Python code holds the results for a while: an interrupt there
    would lose them.
    """
    if threading.current_thread() is not threading.main_thread():
        return run()  # Python handles signals in the main thread only.
    came: list[tuple[int, Any]] = []
    # SIGINT's handler, which raises KeyboardInterrupt, is put back last.
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
