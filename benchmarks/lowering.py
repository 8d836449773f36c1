"""What it costs to prepare a program over refs for XLA: trace, discharge, order, lower.

    python benchmarks/lowering.py [--rounds N] [--first-rounds N] [--steps N]

Three ways of writing the same program take turns in one process: over refs under `refs.jit`; by
hand, the state threaded through `jax.jit`; over JAX's own refs under `jax.jit`. A figure is the
median of the rounds, a ratio that of the medians. Each round traces functions that JAX has never
seen, but keeps JAX's caches of its own small functions, as a long session does. The first table
excludes XLA's compilation, which comes afterwards and takes longer; the second includes it.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from results import Section, add_option, record
from rich.console import Console
from rich.table import Table
from stopwatch import Timing, in_turns, medians

import refs

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import _digits_baselines
import digits


@dataclass(frozen=True)
class Program:
    """One program: `over_refs(state, *args)` and `by_hand(state, *args)`, and their arguments."""

    title: str
    state: Any
    args: tuple[Any, ...]
    over_refs: Callable[..., Any]
    by_hand: Callable[..., Any]


def steps_over_refs(r: Any, n: int) -> None:
    for k in range(n):
        x = r[k % 50]
        r[k * 7 % 50] = jnp.sin(x) * x + k


def steps_by_hand(r: Any, n: int) -> Any:
    for k in range(n):
        x = r[k % 50]
        r = r.at[k * 7 % 50].set(jnp.sin(x) * x + k)
    return r


def swaps_over_refs(r: Any, n: int) -> None:
    for k in range(n):
        i = k % 50
        r[i], r[i + 1] = r[i + 1], r[i]


def swaps_by_hand(r: Any, n: int) -> Any:
    for k in range(n):
        i = k % 50
        left, right = r[i], r[i + 1]
        r = r.at[i].set(right).at[i + 1].set(left)
    return r


def programs(steps: int) -> list[Program]:
    images, labels = jnp.zeros((64, 8, 8)), jnp.zeros(64, jnp.int32)
    digits_step = Program(
        "step of the digits example",
        digits.init(0),
        (images, labels),
        digits.train_step.__wrapped__,
        _digits_baselines.hand_threaded_step.__wrapped__,
    )

    def of(n: int, title: str, cells: int, over_refs: Any, by_hand: Any) -> Program:
        over_refs, by_hand = functools.partial(over_refs, n=n), functools.partial(by_hand, n=n)
        return Program(f"{n:,} {title}", jnp.zeros(cells), (), over_refs, by_hand)

    swaps = swaps_over_refs, swaps_by_hand
    return [
        digits_step,
        of(steps, "reads and writes", 1000, steps_over_refs, steps_by_hand),
        of(steps // 4, "swaps", 1000, *swaps),
        of(steps // 4, "swaps in 10⁴ elements, behind fences", 10_000, *swaps),
    ]


def fresh(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The same function as a new object, which JAX's caches don't know."""
    return functools.partial(fun)


def lowerings(program: Program) -> dict[str, Callable[[], Any]]:
    state = jax.tree.map(refs.new_ref, program.state)
    native = jax.tree.map(jax.new_ref, program.state)
    return {
        "refs": lambda: refs.jit(fresh(program.over_refs)).lower(state, *program.args),
        "by hand": lambda: jax.jit(fresh(program.by_hand), donate_argnums=0).lower(
            program.state, *program.args
        ),
        "jax.Ref": lambda: jax.jit(fresh(program.over_refs)).lower(native, *program.args),
    }


def seconds_to_compile(lower: Callable[[], Any]) -> float:
    """Seconds from the function to the compiled program."""
    start = time.perf_counter()
    lower().compile()
    return time.perf_counter() - start


def measured(rounds: int, first_rounds: int, steps: int) -> dict[str, Section]:
    times, equations, first = {}, {}, {}
    for program in programs(steps):
        closed = jax.make_jaxpr(program.by_hand)(program.state, *program.args)
        equations[program.title] = {"by hand": Timing(len(closed.jaxpr.eqns))}
        calls = lowerings(program)
        # `medians` calls each once before the rounds, which fills JAX's own caches.
        found = medians(list(calls.values()), rounds, repeat=1)
        times[program.title] = {way: time / 1e3 for way, time in zip(calls, found, strict=True)}
        compiling = [functools.partial(seconds_to_compile, call) for call in calls.values()]
        found = in_turns(compiling, first_rounds)
        first[program.title] = dict(zip(calls, found, strict=True))
    return {
        "times": Section("ms", times, "by hand"),
        "equations": Section("equations", equations),
        "first": Section("s", first, "by hand"),
    }


def shown(title: str, section: Section) -> Table:
    table = Table(title=f"{title}, ratio to by hand (jax {jax.__version__})")
    table.add_column("program")
    for way in section.ways():
        table.add_column(way, justify="right")
    for name, times in section.rows.items():
        by_hand = times["by hand"].median
        table.add_row(
            name, *(f"{t.median:,.3g} ({t.median / by_hand:.2f}x)" for t in times.values())
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--first-rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    add_option(parser)
    options = parser.parse_args()
    found = measured(options.rounds, options.first_rounds, options.steps)
    for title, of in (("Milliseconds to trace and lower", "times"), ("Seconds with XLA", "first")):
        Console().print(shown(title, found[of]))
    record("lowering", found, options)


if __name__ == "__main__":
    main()
