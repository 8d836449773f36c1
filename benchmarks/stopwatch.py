"""Timing for all benchmarks: calls take turns in one process, and medians are compared."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

TURN, MOST = 20_000, 5_000  # a turn: so many µs, but no more calls than that


@dataclass(frozen=True)
class Timing:
    """A figure: the median of its rounds, and their noise.

    The noise is half the width of the middle half of the rounds. It isn't divided by the root of
    their number: the rounds of one process are more alike than those of two, which are compared.
    """

    median: float
    noise: float = 0.0

    @classmethod
    def of(cls, rounds: Sequence[float]) -> Timing:
        if len(rounds) == 1:
            return cls(rounds[0])
        low, _, high = quantiles(rounds, n=4, method="inclusive")
        return cls(median(rounds), (high - low) / 2)

    def __truediv__(self, by: float) -> Timing:
        return Timing(self.median / by, self.noise / by)


def microseconds(call: Callable[[], Any], repeat: int) -> float:
    """Microseconds a call, the mean of `repeat` calls."""
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat * 1e6


def calls_a_turn(call: Callable[[], Any]) -> int:
    """How often to call in a turn, so that all ways take turns of equal length.

    The first calls of a turn are slow: the caches hold what the way before has used.
    """
    return int(min(MOST, max(1, TURN / microseconds(call, 3))))


def in_turns(measures: Sequence[Callable[[], float]], rounds: int | Sequence[int]) -> list[Timing]:
    """The figure of each measure. All take turns, so that other load on the machine affects all.

    A measure with fewer rounds than the others skips some, evenly from the first to the last.
    """
    each = [rounds] * len(measures) if isinstance(rounds, int) else rounds
    most = max(each)
    found: list[list[float]] = [[] for _ in measures]
    for k in range(most):
        for measure, wanted, mine in zip(measures, each, found, strict=True):
            if k * wanted % most < wanted:
                mine.append(measure())
    return [Timing.of(mine) for mine in found]


def medians(calls: Sequence[Callable[[], Any]], rounds: int, repeat: int) -> list[Timing]:
    """Microseconds a call, of `repeat` a round. Before the rounds, each is called once."""
    for call in calls:
        call()
    return in_turns([functools.partial(microseconds, call, repeat) for call in calls], rounds)
