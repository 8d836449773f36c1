"""Many lanes that add to one shared array: `refs.vmap` against a scatter written by hand.

    python benchmarks/lanes.py [--rounds N]

A lane adds to the shared ref once or more often; the control is a `jax.jit` that donates the array
and adds the contributions of all lanes with one `bins.at[idx].add(1.0)`, or if lanes loop, with one
in each step. The very same scatter, by hand but under `refs.jit`, shows the cost of the call alone.
(A lane of 20 statements makes 20 scatters; by hand they are one.)

The columns take turns in one process; a figure is the median of the rounds, a ratio that of the
medians. The temporary memory is the memory that XLA allocates beside arguments and results: a copy
of the array for each lane would show there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from results import Section, add_option, record
from rich.console import Console
from rich.table import Table
from stopwatch import Timing, medians

import refs

SIZE = 1_000_000


def one_each(bins: Any, where: Any) -> None:
    bins[where[0]] += 1.0


def one_each_by_hand(bins: Any, where: Any) -> Any:
    return bins.at[where[:, 0]].add(1.0)


def several_each(bins: Any, where: Any) -> None:
    for k in range(where.shape[0]):
        bins[where[k]] += 1.0


def several_each_by_hand(bins: Any, where: Any) -> Any:
    return bins.at[where.ravel()].add(1.0)


def loop_each(bins: Any, where: Any) -> None:
    def step(k: Any, _: Any) -> None:
        bins[where[k]] += 1.0

    lax.fori_loop(0, where.shape[0], step, None)


def loop_each_by_hand(bins: Any, where: Any) -> Any:
    return lax.fori_loop(0, where.shape[1], lambda k, b: b.at[where[:, k]].add(1.0), bins)


@dataclass(frozen=True)
class Case:
    title: str
    lanes: int
    updates: int  # of each lane
    lane: Callable[[Any, Any], None]
    by_hand: Callable[[Any, Any], Any]


CASES = [
    Case("4096 lanes, 1 update", 4096, 1, one_each, one_each_by_hand),
    Case("128 lanes, 20 updates", 128, 20, several_each, several_each_by_hand),
    Case("128 lanes, 20 updates in a loop", 128, 20, loop_each, loop_each_by_hand),
]


@dataclass(frozen=True)
class Side:
    """One way of writing a case: a call that adds once more, the present value, and its memory."""

    call: Callable[[], Any]
    value: Callable[[], Any]
    temporary: int  # bytes


def by_hand(case: Case, where: Any, size: int) -> Side:
    add = jax.jit(case.by_hand, donate_argnums=0)
    bins = jnp.zeros(size)
    compiled = add.lower(bins, where).compile()

    def call() -> None:
        nonlocal bins
        bins = add(bins, where).block_until_ready()

    return Side(call, lambda: bins, compiled.memory_analysis().temp_size_in_bytes)


def over_ref(program: Callable[[Any, Any], None], where: Any, size: int) -> Side:
    @refs.jit
    def step(bins: Any, where: Any) -> Any:
        program(bins, where)
        return jnp.int32(0)  # to wait for

    bins = refs.new_ref(jnp.zeros(size), name="bins")
    compiled = step.lower(bins, where).compile()
    return Side(
        lambda: step(bins, where).block_until_ready(),
        lambda: bins[...],
        compiled.memory_analysis().temp_size_in_bytes,
    )


def sides(case: Case, size: int = SIZE) -> dict[str, Side]:
    where = np.random.default_rng(0).integers(0, size, (case.lanes, case.updates))
    where = jnp.asarray(where, jnp.int32)

    def whole(bins: Any, where: Any) -> None:
        bins[...] = case.by_hand(bins[...], where)

    return {
        "by hand": by_hand(case, where, size),
        "by hand, refs.jit": over_ref(whole, where, size),
        "refs.vmap": over_ref(refs.vmap(case.lane, in_axes=(None, 0)), where, size),
    }


def measured(rounds: int, repeat: int = 20, size: int = SIZE) -> dict[str, Section]:
    times, memory = {}, {}
    for case in CASES:
        ways = sides(case, size)
        found = medians([way.call for way in ways.values()], rounds, repeat)
        for way in ways.values():
            np.testing.assert_array_equal(way.value(), ways["by hand"].value())
        times[case.title] = dict(zip(ways, found, strict=True))
        memory[case.title] = {title: Timing(way.temporary / 1e3) for title, way in ways.items()}
    return {
        "calls": Section("µs a call", times, "by hand"),
        "memory": Section("KB", memory),
    }


def table(found: dict[str, Section]) -> Table:
    table = Table(
        title=f"Lanes that add to {SIZE:,} bins: µs a call, ratio to by hand, temporary KB "
        f"(jax {jax.__version__}, {jax.default_backend()})"
    )
    table.add_column("program")
    for way in found["calls"].ways():
        table.add_column(way, justify="right")
    for title, row in found["calls"].rows.items():
        memory = found["memory"].rows[title]
        table.add_row(
            title,
            *(
                f"{t.median:,.0f} ({t.median / row['by hand'].median:.2f}x), "
                f"{memory[way].median:,.1f} KB"
                for way, t in row.items()
            ),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    add_option(parser)
    options = parser.parse_args()
    found = measured(options.rounds)
    Console().print(table(found))
    record("lanes", found, options)


if __name__ == "__main__":
    main()
