"""What a call costs: `refs.jit` and eager operations, against a hand-donated jit and `jax.Ref`.

    python benchmarks/dispatch/run.py                       # all tables
    python benchmarks/dispatch/run.py --only eager          # one: sizes, calls, eager or draws
    python benchmarks/dispatch/run.py --only "closed over"  # the rows with that in their title

From the top of the checkout, with `refs` and rich installed. If Equinox and Flax are installed too,
the first table has columns for them.

Four tables: a jit over more and more refs (`sizes.py`), the ways in which refs get into a jit and
out (`calls.py`), single operations, eagerly (`eager.py`), and random numbers (`draws.py`). The
steps add to arrays of 16 floats (eagerly 500), so that nearly all of the time is the call:
arguments are taken apart, the program is looked up, and results are put where they belong. By hand,
the state is threaded through a `jax.jit` that donates it. A dash says that JAX's refs can't do it.

Before any is timed, all ways of a row have made some calls and hold the same values. Then they take
turns in one process, of 20 ms; a figure is the median of the rounds, a ratio that of the medians.
The garbage collector is on, as it is in a program. Results are waited for at the end of a turn, but
not within it.

What isn't measured: tracing and compilation (`lowering.py`), unless each call needs one anew; what
a step costs on the device (`programs/`); and what the caller does between two calls.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from calls import CALLS
from draws import DRAWS
from eager import EAGER
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from sizes import SIZES
from way import BY_HAND, NATIVE, OURS, Row, measured

sys.path.insert(0, str(Path(__file__).parent.parent))
import results

SECTIONS = {"sizes": SIZES, "calls": CALLS, "eager": EAGER, "draws": DRAWS}
TITLES = {
    "sizes": "jit: one added to each",
    "calls": "jit: 20 refs, and how they get in and out",
    "eager": "eager operations on one ref",
    "draws": "random numbers",
}
WIDTH = 140  # of the tables, where no terminal says


def chosen(text: str) -> dict[str, list[Row]]:
    """The sections of that name, or of each the rows with `text` in the title."""
    if text in SECTIONS:
        return {text: SECTIONS[text]}
    found = {name: [row for row in rows if text in row.title] for name, rows in SECTIONS.items()}
    return {name: rows for name, rows in found.items() if rows}


def table(name: str, section: results.Section) -> Table:
    columns = list(dict.fromkeys([BY_HAND, NATIVE, OURS, *section.ways()]))
    table = Table(
        title=f"{TITLES[name]}\nµs a call, x of the hand-donated jit\n"
        f"(jax {jax.__version__}, {jax.default_backend()})"
    )
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for title, times in section.rows.items():
        table.add_row(escape(title), *(cell(times, column) for column in columns))
    return table


def cell(times: results.Row, column: str) -> str:
    if column not in times:
        return "–"
    time = times[column].median
    ratio = time / times[BY_HAND].median
    shown = f"{time:.1f}" if time < 1000 else f"{time:,.0f}"
    if column == BY_HAND:
        return shown
    return f"{shown} ({ratio:.2f}x)" if ratio < 100 else f"{shown} ({ratio:,.0f}x)"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument(
        "--only",
        default="",
        metavar="SECTION",
        help="sizes, calls, eager, draws; or part of a row's title",
    )
    results.add_option(parser)
    options = parser.parse_args(arguments)
    sections = chosen(options.only)
    if not sections:
        parser.error(f"no section is {options.only!r}, and no row has it in its title")

    console = Console()
    console.width = max(console.width, WIDTH)
    found = {}
    for name, rows in sections.items():
        found[name] = measured(name, rows, options.rounds)
        console.print(table(name, found[name]))
    results.record("dispatch", found, options)


if __name__ == "__main__":
    main()
