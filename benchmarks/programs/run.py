"""Loops that touch a few cells of a large buffer: what a step costs, as the buffer grows.

    python benchmarks/programs/run.py                            # the tables
    python benchmarks/programs/run.py --plot docs/in_place.png   # and the plot of the docs, anew
    python benchmarks/programs/run.py --only union --json union.json

From the top of the checkout, with `refs` and rich installed. numba, if it is there, compiles the
bound, which is otherwise Python over NumPy; the plot needs matplotlib.

Each program of the suite runs in five ways: over refs under `refs.jit`; over `jax.Ref` under
`jax.jit`; by hand, under a `jax.jit` that donates the state; the same through `refs.in_place`; and
as a loop over plain memory, the bound. Before any is timed, all have
run once from the same inputs, and hold what the bound holds.

A time is that of a call of 2K steps less that of a call of K steps, over K, so that what a call
does once, such as to zero a gradient or to copy the buffer, doesn't count. K is `--steps`; 20 times
that for a way that takes less than 10 ms for so many, and a tenth for one that takes more than
100 ms. The ways take turns in one process, each with untimed calls first, and a figure is the
median of the rounds: `--rounds`, or as many as fit into `--budget` seconds of a way, but at least
three. A difference that noise makes negative is shown as 0.00; ratios and the plot take what is
less than 0.001 µs as 0.001 µs.

The copies are those of arrays as large as the state in the optimized HLO, at the smaller size:
those in loops + those made once. A last table has programs that work on whole buffers (`whole.py`).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import jax
import ways
import whole
from branches import BRANCHES
from gradients import DERIVED
from graphs import GRAPHS
from lists import LISTS
from machines import MACHINES
from programs import FORWARD, Program
from queues import QUEUES
from rich.console import Console
from rich.table import Table
from structures import STRUCTURES
from tables import TABLES
from waves import WAVES

from refs.testing._hlo import Module

SUITE = [
    *FORWARD,
    *(*STRUCTURES, *LISTS, *QUEUES, *GRAPHS, *TABLES, *MACHINES),
    *BRANCHES,
    *(*WAVES, *DERIVED),
]
SIZES = (10**4, 10**6)
PLOTTED = (10**3, 10**4, 10**5, 10**6)
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
    times: dict[str, dict[int, float]]
    copies: dict[str, tuple[int, int]]

    def time(self, way: str, n: int) -> float:
        """For ratios."""
        return max(LEAST, self.times[way][n])


def figures(
    program: Program, sizes: Sequence[int], small: int, steps: int, rounds: int, budget: float
) -> Figures:
    """Times at all sizes, and the copies at the size `small`."""
    times: dict[str, dict[int, float]] = {}
    for n in sizes:
        found = ways.microseconds_a_step(program, n, steps, rounds, budget)
        for way, microseconds in found.items():
            times.setdefault(way, {})[n] = microseconds
    return Figures(program.title, times, copies(program, small, steps))


def copies(program: Program, n: int, steps: int) -> dict[str, tuple[int, int]]:
    state, args = ways.inputs(program, n, steps)
    smallest = min(x.size for x in state if x.size >= 64)  # A counter is no buffer.
    found = {}
    for name, way in ways.ways(program, state).items():
        if way.hlo is not None:
            moves = Module.parse(way.hlo(args)).moves()
            looped = [m.in_loop for m in moves if m.size >= smallest and not m.is_collective]
            found[name] = (sum(looped), len(looped) - sum(looped))
    return found


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
    return " → ".join(shown(row.times[way][n]) for n in (small, large))


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


# -- Plot -----------------------------------------------------------------------------------------

# Lines often lie on each other: the later ones let the earlier ones be seen, without colours too.
STYLES: dict[str, dict[str, Any]] = {
    "jax.Ref": {"color": "#d55e00", "marker": "s", "markersize": 8, "markerfacecolor": "none"},
    "refs": {"color": "#0072b2", "marker": "o", "markersize": 6, "linewidth": 2},
    "by hand": {"color": "#e69f00", "marker": "^", "markersize": 4, "linestyle": "--"},
    "bound": {"color": "#333333", "marker": "x", "markersize": 5, "linestyle": ":"},
}


def plot(rows: Sequence[Figures], sizes: Sequence[int], file: str) -> None:
    """A panel for each program, all with the same axes."""
    from matplotlib.figure import Figure

    across = min(4, len(rows))
    down = -(-len(rows) // across)
    figure = Figure(figsize=(2.9 * across, 2.3 * down + 0.9), dpi=100, layout="constrained")
    panels = list(figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).flat)
    for row, panel in zip(rows, panels, strict=False):
        for way, style in STYLES.items():
            panel.loglog(sizes, [row.time(way, n) for n in sizes], label=way, **style)
        panel.set_title(row.title, fontsize=11)
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.tick_params(labelsize=10)
    for panel in panels[len(rows) :]:
        panel.set_axis_off()
    figure.supxlabel("elements of the buffer", fontsize=11)
    figure.supylabel("µs a step", fontsize=11)
    handles, labels = panels[0].get_legend_handles_labels()
    labels = [f"{label} ({bound_is()})" if label == "bound" else label for label in labels]
    figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=11, frameon=False)
    figure.savefig(file)


# -- All of it ------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500, metavar="K")
    parser.add_argument("--rounds", type=int, default=51)
    parser.add_argument("--budget", type=float, default=1.0, metavar="SECONDS")
    parser.add_argument("--sizes", type=int, nargs=2, default=SIZES, metavar=("SMALL", "LARGE"))
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="programs with TEXT in the title"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="measures 10³ and 10⁵ elements too")
    parser.add_argument("--json", metavar="FILE", help="the figures as measured")
    options = parser.parse_args(arguments)
    small, large = options.sizes
    sizes = sorted({small, large, *(PLOTTED if options.plot else ())})
    suite = [p for p in SUITE if options.only in p.title]
    steps_of_networks = [p for p in whole.PROGRAMS if options.only in p.title]
    if not suite and not steps_of_networks:
        parser.error(f"no program has {options.only!r} in its title")

    if options.plot and find_spec("matplotlib") is None:  # rather now than when all is measured
        parser.error("--plot needs matplotlib")

    console = Console()
    console.width = max(console.width, WIDTH)
    rows = []
    for program in suite:
        print(program.title, "…", file=sys.stderr, flush=True)
        rows.append(figures(program, sizes, small, options.steps, options.rounds, options.budget))
    if rows:
        console.print(table(rows, small, large))
        console.print(verdict(rows, small, large))
    timed = {p.title: whole.microseconds(p, options.rounds) for p in steps_of_networks}
    if timed:
        console.print(whole.table(timed))
    if options.plot and rows:
        plot(rows, sizes, options.plot)
    if options.json:
        record(options.json, {"programs": [asdict(row) for row in rows], "whole": timed})


def record(file: str, found: dict[str, Any]) -> None:
    found = {"jax": jax.__version__, "bound": bound_is(), **found}
    with open(file, "w", encoding="utf-8") as out:
        json.dump(found, out, indent=1, ensure_ascii=False)


if __name__ == "__main__":
    main()
