"""What the benchmarks share: calls that are timed in turns, in one process, and medians."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any


def microseconds(call: Callable[[], Any], repeat: int) -> float:
    """Of one of `repeat` calls, on average."""
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat * 1e6


def in_turns(measures: Sequence[Callable[[], float]], rounds: int) -> list[float]:
    """The median of what each measures. They take turns: a busy machine is busy for all."""
    times = [[measure() for measure in measures] for _ in range(rounds)]
    return [median(column) for column in zip(*times, strict=True)]


def medians(calls: Sequence[Callable[[], Any]], rounds: int, repeat: int) -> list[float]:
    """Microseconds a call, of `repeat` a round. Before the rounds, each is called once."""
    for call in calls:
        call()
    return in_turns([functools.partial(microseconds, call, repeat) for call in calls], rounds)
