"""Loops that touch a few cells of a large buffer: what a step costs, as the buffer grows.

    python benchmarks/programs/run.py
    python benchmarks/programs/run.py --only union LU   # the programs with these in their titles

From the top of the checkout, with `refs` and rich installed. numba, if it is there, compiles the
bound, which is otherwise Python over NumPy.

Each program of the suite runs in five ways: over refs under `refs.jit`; over `jax.Ref` under
`jax.jit`; by hand, under a `jax.jit` that donates the state; the same through `refs.in_place`; and
as a loop over plain memory, the bound. Before any is timed, all have
run once from the same inputs, and hold what the bound holds.

A time is that of a call of 2K steps less that of a call of K steps, over K, so that what a call
does once, such as to zero a gradient or to copy the buffer, doesn't count. K is `--steps`; 20 times
that for a way that takes less than 10 ms for so many, and a tenth for one that takes more than
100 ms. The ways take turns in one process, each with untimed calls first, and a figure is the
median of the rounds: `--rounds`, or as many as fit into `--budget` seconds of a way, but at least
three. A difference that noise makes negative is shown as 0.00; ratios take what is less
than 0.001 µs as 0.001 µs.

The copies are those of arrays as large as the state in the optimized HLO, at the smaller size:
those in loops + those made once. A last table has programs that work on whole buffers (`whole.py`).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import ways
import whole
from catalogue import SUITE
from programs import Program
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))
from results import Row, Section, add_option, record
from stopwatch import Timing

SIZES = (10**4, 10**6)
LEAST = 0.001  # µs: less than that is noise
WIDTH = 170  # of the tables, where no terminal says

# -- Figures --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """What was measured of a program.

    Attributes:
      title: the program's.
      times: way -> number of elements -> µs a step, as measured.
      copies: way -> number of copies in loops, and once.
    """

    title: str
    times: dict[str, dict[int, Timing]]
    copies: dict[str, tuple[int, int]]

    def time(self, way: str, n: int) -> float:
        """For ratios."""
        return max(LEAST, self.times[way][n].median)


def figures(
    program: Program, sizes: Sequence[int], small: int, steps: int, rounds: int, budget: float
) -> Figures:
    """Times at all sizes, and the copies at the size `small`."""
    times: dict[str, dict[int, Timing]] = {}
    for n in sizes:
        found = ways.microseconds_a_step(program, n, steps, rounds, budget)
        for way, time in found.items():
            times.setdefault(way, {})[n] = time
    return Figures(program.title, times, ways.copies(program, small, steps))


# -- Table ----------------------------------------------------------------------------------------


def table(rows: Sequence[Figures], small: int, large: int) -> Table:
    table = Table(
        title=f"µs a step, at {power(small)} → {power(large)} elements "
        f"(jax {jax.__version__}, {jax.default_backend()})"
    )
    table.add_column("program", no_wrap=True)
    titles = (
        *rows[0].times,
        f"refs,\n{power(large)} / {power(small)}",
        f"jax.Ref\n/ refs\nat {power(large)}",
        "copies,\nin loops + once,\nby hand → refs",
    )
    for title in titles:
        table.add_column(
            f"{title}\n({bound_is()})" if title == "bound" else title, justify="right", no_wrap=True
        )
    for row in rows:
        table.add_row(
            row.title,
            *(pair(row, way, small, large) for way in row.times),
            ratio(growth(row, small, large)),
            ratio(row.time("jax.Ref", large) / row.time("refs", large)),
            " → ".join("{} + {}".format(*row.copies[way]) for way in ("by hand", "refs")),
        )
    return table


def pair(row: Figures, way: str, small: int, large: int) -> str:
    return " → ".join(shown(row.times[way][n].median) for n in (small, large))


def shown(x: float) -> str:
    if x <= 0:
        return "0.00"
    return f"{x:.3f}" if x < 1 else f"{x:.2f}" if x < 100 else f"{x:,.0f}"


def ratio(x: float) -> str:
    return f"{x:.1f}x" if x < 100 else f"{x:,.0f}x"


def power(n: int) -> str:
    """`10⁶`, or in digits what is no power of ten."""
    exponent = round(math.log10(n))
    if 10**exponent != n:
        return f"{n:,}"
    return "10" + str(exponent).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def bound_is() -> str:
    return "numba" if ways.numba else "Python"


def growth(row: Figures, small: int, large: int) -> float:
    return row.time("refs", large) / row.time("refs", small)


def verdict(rows: Sequence[Figures], small: int, large: int) -> str:
    """Which programs pay for the size of the buffer."""
    steep = [
        f"  {row.title}: refs {pair(row, 'refs', small, large)} µs, "
        f"bound {pair(row, 'bound', small, large)} µs"
        for row in rows
        if growth(row, small, large) >= 4 and row.time("refs", large) >= 1
    ]
    if not steep:
        return "All programs are flat: less than 4x of the smaller size, or less than 1 µs a step."
    return "\n".join(["Not flat, with 4x or more of the smaller size and 1 µs a step:", *steep])


# -- All of it ------------------------------------------------------------------------------------


def sections(rows: Sequence[Figures], sizes: Sequence[int]) -> dict[str, Section]:
    """By the number of elements; and the copies."""
    found = {
        str(n): Section(
            "µs a step",
            {row.title: {way: times[n] for way, times in row.times.items()} for row in rows},
            "by hand",
        )
        for n in sizes
    }
    for k, title in enumerate(("copies", "copies once")):
        counts = {
            row.title: {way: Timing(copies[k]) for way, copies in row.copies.items()}
            for row in rows
        }
        found[title] = Section("copies", counts)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500, metavar="K")
    parser.add_argument("--rounds", type=int, default=51)
    parser.add_argument("--budget", type=float, default=1.0, metavar="SECONDS")
    parser.add_argument("--sizes", type=int, nargs=2, default=SIZES, metavar=("SMALL", "LARGE"))
    parser.add_argument(
        "--also", type=int, nargs="+", default=(), metavar="N", help="sizes for a plot"
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="programs with TEXT in the title"
    )
    add_option(parser)
    options = parser.parse_args(arguments)
    small, large = options.sizes
    sizes = [small, large, *options.also]
    suite, steps_of_networks = (
        [p for p in programs if any(text in p.title for text in options.only)]
        for programs in (SUITE, whole.PROGRAMS)
    )
    if not suite and not steps_of_networks:
        parser.error(f"no program has {' or '.join(map(repr, options.only))} in its title")

    console = Console()
    console.width = max(console.width, WIDTH)
    rows = []
    for program in suite:
        print(program.title, "…", file=sys.stderr, flush=True)
        rows.append(figures(program, sizes, small, options.steps, options.rounds, options.budget))
    if rows:
        console.print(table(rows, small, large))
        console.print(verdict(rows, small, large))
    timed: dict[str, Row] = {
        p.title: whole.microseconds(p, options.rounds) for p in steps_of_networks
    }
    if timed:
        console.print(whole.table(timed))
    of_networks = Section("µs a call", timed, "by hand")
    record("programs", {**sections(rows, sizes), "whole": of_networks}, options)


if __name__ == "__main__":
    main()
