"""Timing for all benchmarks: calls take turns in one process, and medians are compared."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any


def microseconds(call: Callable[[], Any], repeat: int) -> float:
    """Microseconds a call, the mean of `repeat` calls."""
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat * 1e6


def in_turns(measures: Sequence[Callable[[], float]], rounds: int | Sequence[int]) -> list[float]:
    """The median of each measure. All take turns, so that other load on the machine affects all.

    A measure with fewer rounds than the others skips some, evenly from the first to the last.
    """
    each = [rounds] * len(measures) if isinstance(rounds, int) else rounds
    most = max(each)
    found: list[list[float]] = [[] for _ in measures]
    for k in range(most):
        for measure, wanted, mine in zip(measures, each, found, strict=True):
            if k * wanted % most < wanted:
                mine.append(measure())
    return [median(mine) for mine in found]


def medians(calls: Sequence[Callable[[], Any]], rounds: int, repeat: int) -> list[float]:
    """Microseconds a call, of `repeat` a round. Before the rounds, each is called once."""
    for call in calls:
        call()
    return in_turns([functools.partial(microseconds, call, repeat) for call in calls], rounds)
