"""What it costs to prepare a program over refs for XLA: trace, discharge, order, lower.

    python benchmarks/lowering.py [--rounds N] [--first-rounds N] [--steps N] [--layers N ...]

Ways of writing the same program take turns in one process: over refs under `refs.jit`; by hand, the
state threaded through `jax.jit`; over JAX's own refs under `jax.jit`. Training over refs has two:
`refs` differentiates a function of the values that it has read, with `jax.value_and_grad`;
`refs.grad, inside` one that reads the refs itself, with `refs.value_and_grad`. A figure is the
median of the rounds, a ratio that of the medians. Each round traces functions that JAX has never
seen, but keeps JAX's caches of its own small functions, as a long session does. The first table
excludes XLA's compilation, which comes afterwards and takes longer; the second includes it.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from lowering_programs import BY_HAND, NATIVE, Program, programs
from results import Section, add_option, record
from rich.console import Console
from rich.table import Table
from stopwatch import Timing, in_turns, medians

import refs


def fresh(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The same function as a new object, which JAX's caches don't know."""
    return functools.partial(fun)


def lowerings(program: Program) -> dict[str, Callable[[], Any]]:
    native = jax.tree.map(jax.new_ref, program.state)
    state = jax.tree.map(refs.new_ref, program.state)
    kinds = {
        BY_HAND: (functools.partial(jax.jit, donate_argnums=0), program.state),
        NATIVE: (jax.jit, native),
    }

    def lowering(way: str, fun: Callable[..., Any]) -> Callable[[], Any]:
        jit, its_state = kinds.get(way, (refs.jit, state))
        return lambda: jit(fresh(fun)).lower(its_state, *program.args)

    return {way: lowering(way, fun) for way, fun in program.ways.items()}


def seconds_to_compile(lower: Callable[[], Any]) -> float:
    """Seconds from the function to the compiled program."""
    start = time.perf_counter()
    lower().compile()
    return time.perf_counter() - start


def measured(
    rounds: int, first_rounds: int, steps: int, layers: Sequence[int]
) -> dict[str, Section]:
    times, equations, first = {}, {}, {}
    for program in programs(steps, layers):
        closed = jax.make_jaxpr(program.ways[BY_HAND])(program.state, *program.args)
        equations[program.title] = {BY_HAND: Timing(len(closed.jaxpr.eqns))}
        calls = lowerings(program)
        # `medians` calls each once before the rounds, which fills JAX's own caches.
        found = medians(list(calls.values()), rounds, repeat=1)
        times[program.title] = {way: time / 1e3 for way, time in zip(calls, found, strict=True)}
        compiling = [functools.partial(seconds_to_compile, call) for call in calls.values()]
        found = in_turns(compiling, first_rounds)
        first[program.title] = dict(zip(calls, found, strict=True))
    return {
        "times": Section("ms", times, BY_HAND),
        "equations": Section("equations", equations),
        "first": Section("s", first, BY_HAND),
    }


def shown(title: str, section: Section) -> Table:
    table = Table(title=f"{title}, ratio to by hand (jax {jax.__version__})")
    table.add_column("program")
    for way in section.ways():
        table.add_column(way, justify="right")
    for name, times in section.rows.items():
        ratios = {way: t.median / times[BY_HAND].median for way, t in times.items()}
        table.add_row(
            name,
            *(
                f"{times[way].median:,.3g} ({ratios[way]:.2f}x)" if way in times else "–"
                for way in section.ways()
            ),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--first-rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24])
    add_option(parser)
    options = parser.parse_args()
    found = measured(options.rounds, options.first_rounds, options.steps, options.layers)
    for title, of in (("Milliseconds to trace and lower", "times"), ("Seconds with XLA", "first")):
        Console().print(shown(title, found[of]))
    record("lowering", found, options)


if __name__ == "__main__":
    main()
