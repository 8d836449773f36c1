"""The five ways of running a program of the suite, what they must agree on, and a stopwatch."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from programs import Arrays, Program

import refs
from refs._explain.hlo import Module

sys.path.insert(0, str(Path(__file__).parent.parent))
from stopwatch import Timing, in_turns

try:
    import numba
except ImportError:  # an extra
    numba = None

Call = Callable[[], Any]
BOUND = "bound"

# -- Ways -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """One way of running a program, on state of its own.

    Attributes:
      on: args -> a call that runs the program on them, on from where its state is, and waits.
      state: () -> what the state is now.
      hlo: args -> the optimized HLO of such a call. The bound has none.
    """

    on: Callable[[Arrays], Call]
    state: Callable[[], Sequence[np.ndarray]]
    hlo: Callable[[Arrays], str] | None = None


def over(m: Any, function: Callable[..., None], state: Arrays) -> Way:
    """Over the refs of the module `m`, under its `jit`."""

    @m.jit
    def step(state: Any, args: Any) -> Any:
        function(*state, *args)
        # To wait for: that of JAX's refs is all that one can. On a GPU XLA copies the memory of the
        # interpreter in each step if its program returns a constant, too, by hand as well.
        return None if m is refs else jnp.int32(0)

    held = [m.new_ref(jnp.array(x)) for x in state]

    def on(args: Arrays) -> Call:
        on_device = [jnp.asarray(a) for a in args]
        return lambda: jax.block_until_ready((step(held, on_device), held))

    return Way(
        on,
        lambda: [np.asarray(r[...]) for r in held],
        lambda args: step.lower(held, args).compile().as_text(),
    )


def by_hand(function: Callable[..., Any], state: Arrays) -> Way:
    """As a pure function, under a `jax.jit` that donates the state."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, args: Any) -> Any:
        new = function(*state, *args)
        return new if isinstance(new, tuple) else (new,)

    held = tuple(jnp.array(x) for x in state)  # copies, as they will be donated

    def on(args: Arrays) -> Call:
        on_device = [jnp.asarray(a) for a in args]

        def call() -> None:
            nonlocal held
            held = jax.block_until_ready(step(held, on_device))

        return call

    return Way(
        on,
        lambda: [np.asarray(x) for x in held],
        lambda args: step.lower(held, args).compile().as_text(),
    )


def bound(loop: Callable[..., None], state: Arrays) -> Way:
    """As a loop over plain memory, compiled if numba is installed."""
    run, held = compiled(loop), [x.copy() for x in state]
    return Way(lambda args: lambda: run(*held, *args), lambda: held)


@functools.cache  # All sizes run the same machine code.
def compiled(loop: Callable[..., None]) -> Callable[..., None]:
    return loop if numba is None else numba.njit(fastmath=False)(loop)


def ways(program: Program, state: Arrays, names: Sequence[str] | None = None) -> dict[str, Way]:
    """The ways, or those with these names."""
    made = {
        "refs": lambda: over(refs, program.over_refs, state),
        "jax.Ref": lambda: over(jax, program.over_native or program.over_refs, state),
        "by hand": lambda: by_hand(program.by_hand, state),
        "refs.in_place": lambda: by_hand(refs.in_place(program.by_hand), state),
        BOUND: lambda: bound(program.bound, state),
    }
    return {name: make() for name, make in made.items() if names is None or name in names}


def inputs(program: Program, n: int, steps: int) -> tuple[Arrays, Arrays]:
    """State and args, the same every time."""
    return program.inputs(n, steps, np.random.default_rng(0))


def checked(
    program: Program, n: int, steps: int, names: Sequence[str] | None = None
) -> dict[str, Way]:
    """The ways, or those with these names; each has run once and then held what the bound holds."""
    state, args = inputs(program, n, steps)
    found = ways(program, state, names and (*names, BOUND))
    for way in found.values():
        way.on(args)()
    expected = found[BOUND].state()
    for name, way in found.items():
        for got, right in zip(way.state(), expected, strict=True):
            message = f"{program.title}, {name}, {n} elements"
            if np.issubdtype(right.dtype, np.integer):
                np.testing.assert_array_equal(got, right, err_msg=message)
            else:
                np.testing.assert_allclose(got, right, rtol=2e-4, atol=1e-5, err_msg=message)
    return found


def copies(
    program: Program, n: int, steps: int, names: Sequence[str] | None = None
) -> dict[str, tuple[int, int]]:
    """The copies of arrays as large as the state, of the ways or those with these names.

    They are those in the optimized HLO: in loops, and once.
    """
    state, args = inputs(program, n, steps)
    smallest = min(x.size for x in state if x.size >= 64)  # A counter is no buffer.
    found = {}
    for name, way in ways(program, state, names).items():
        if way.hlo is not None:
            moves = Module.parse(way.hlo(args)).moves()
            looped = [m.in_loop for m in moves if m.size >= smallest and not m.is_collective]
            found[name] = (sum(looped), len(looped) - sum(looped))
    return found


# -- Stopwatch ------------------------------------------------------------------------------------


def microseconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


QUICK, SLOW = 10_000, 100_000  # µs a call
FEWEST = 3  # rounds


def microseconds_a_step(
    program: Program, n: int, steps: int, rounds: int, budget: float
) -> dict[str, Timing]:
    """Of each way: (a call of 2K steps − a call of K steps) / K.

    K is `steps`; for a way that is `QUICK` with so many 20 times that, so that the steps tell
    against what a call costs, and a tenth for one that is `SLOW`. A way has `rounds` rounds, or as
    many as fit into `budget` seconds, but no fewer than `FEWEST`.

    Both calls are made once more before they are timed: after another way's turn, the first call
    finds nothing in the caches, and would cost more than twice the steps do.
    """
    args = functools.cache(lambda count: inputs(program, n, count)[1])
    found = checked(program, n, steps)
    measures, turns = [], []
    for way in found.values():
        took = microseconds(way.on(args(steps)))
        k = 20 * steps if took < QUICK else max(1, steps // 10) if took > SLOW else steps
        once, twice = way.on(args(k)), way.on(args(2 * k))
        measure = functools.partial(difference, once, twice, k)
        measure()  # compiles
        measures.append(measure)
        turns.append(min(rounds, max(FEWEST, int(budget * 1e6 / microseconds(measure)))))
    return dict(zip(found, in_turns(measures, turns), strict=True))


def difference(once: Call, twice: Call, k: int) -> float:
    once()
    twice()
    short = microseconds(once)
    return (microseconds(twice) - short) / k
