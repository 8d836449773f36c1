"""A row of the benchmark, the ways of running it, and what they must agree on."""

from __future__ import annotations

import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import refs

sys.path.insert(0, str(Path(__file__).parent.parent))
from results import Section
from stopwatch import Timing, calls_a_turn, in_turns

BY_HAND, NATIVE, OURS = "by hand,\ndonated", "jax.Ref", "refs"
NOTHING = ((),)  # the inputs of a step that takes its state only
CHECKED = 8  # calls before any is timed


@dataclass(frozen=True)
class Way:
    """One way of running a row, on state of its own.

    Attributes:
      call: runs the step once more, on from where the state is.
      held: () -> a tree of what the state is now and the last call returned: arrays or refs.
    """

    call: Callable[[], Any]
    held: Callable[[], Any]


Ways = dict[str, Way]


@dataclass(frozen=True)
class Row:
    title: str
    ways: Callable[[], Ways]


# -- How state gets from one call to the next ------------------------------------------------------


def keeps(step: Callable[..., Any], state: Any, inputs: Iterable[Any] = NOTHING) -> Way:
    """`step(state, *input) -> result`; the inputs are taken in turn."""
    given, result = itertools.cycle(inputs), None

    def call() -> None:
        nonlocal result
        result = step(state, *next(given))

    return Way(call, lambda: (state, result))


def threads(step: Callable[..., Any], state: Any, inputs: Iterable[Any] = NOTHING) -> Way:
    """`step(state, *input) -> state`."""
    given = itertools.cycle(inputs)

    def call() -> None:
        nonlocal state
        state = step(state, *next(given))

    return Way(call, lambda: (state, None))


def threads_and_returns(
    step: Callable[..., Any], state: Any, inputs: Iterable[Any] = NOTHING
) -> Way:
    """`step(state, *input) -> (state, result)`."""
    given, result = itertools.cycle(inputs), None

    def call() -> None:
        nonlocal state, result
        state, result = step(state, *next(given))

    return Way(call, lambda: (state, result))


# -- State, which each way has for itself ----------------------------------------------------------


def arrays(n: int) -> list[jax.Array]:
    """Small ones, each with another value, so that one taken for another is noticed."""
    return [jnp.full(16, k, jnp.float32) for k in range(n)]


def refs_of(m: Any, n: int) -> list[Any]:
    """The same as refs of the module `m`."""
    return [m.new_ref(x) for x in arrays(n)]


# -- Checked and timed ----------------------------------------------------------------------------


def checked(row: Row) -> Ways:
    """The ways of a row, after some calls of each, which left all of them with the same values."""
    found = row.ways()
    for way in found.values():
        for _ in range(CHECKED):
            way.call()
    expected = values(found[BY_HAND])
    for name, way in found.items():
        for got, right in zip(values(way), expected, strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-5, err_msg=f"{row.title}, {name}")
    return found


def values(way: Way) -> list[np.ndarray]:
    return [np.array(x[...]) for x in jax.tree.leaves(way.held())]


def timed(row: Row, rounds: int) -> dict[str, Timing]:
    """Of each way: microseconds a call."""
    found = checked(row)
    turns = [functools.partial(turn, way, calls_a_turn(way.call)) for way in found.values()]
    return dict(zip(found, in_turns(turns, rounds), strict=True))


def measured(name: str, rows: Sequence[Row], rounds: int) -> Section:
    found = {}
    for row in rows:
        print(f"{name}: {row.title} …", file=sys.stderr, flush=True)
        found[row.title] = timed(row, rounds)
    return Section("µs a call", found, BY_HAND)


def turn(way: Way, repeat: int) -> float:
    """Microseconds a call. The turn ends with a read of some state, for which all must be done."""
    start = time.perf_counter()
    for _ in range(repeat):
        way.call()
    jax.block_until_ready(jax.tree.leaves(way.held())[0][...])
    return (time.perf_counter() - start) / repeat * 1e6


# -- Over both kinds of refs, and by hand ---------------------------------------------------------


def compiled(over_refs: Callable[..., Any], state: Any, inputs: Iterable[Any] = NOTHING) -> Ways:
    """`over_refs(state, *input)` under `jax.jit` and `refs.jit`; `state` has arrays for refs."""
    return {
        name: keeps(m.jit(over_refs), jax.tree.map(m.new_ref, state), inputs)
        for name, m in ((NATIVE, jax), (OURS, refs))
    }
