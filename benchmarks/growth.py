"""How the time to prepare a program for XLA grows with the program.

    python benchmarks/growth.py [--rounds N] [--part X] [--only TITLE ...]

Each program of the table is traced, discharged, ordered and lowered at two sizes: over refs, and by
hand, the same lines over state that is threaded through JAX's own functions. A figure is processor
time, the median of the rounds, without Python's garbage collection, whose time depends on all that
lives. If a program grows by much more over refs than by hand, a stage is slower than linear.
"""

from __future__ import annotations

import argparse
import functools
import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from results import Section, add_option, record
from rich.console import Console
from rich.table import Table
from stopwatch import Timing, in_turns

import refs

LARGE = 2000  # elements: so many that the in-place pass puts fences

Body = Callable[[], None]


class Threaded:
    """State by hand behind the syntax of a ref: a write replaces the value."""

    def __init__(self, value: Any):
        self.value = value

    def __getitem__(self, index: Any) -> Any:
        return self.value[index]

    def __setitem__(self, index: Any, x: Any) -> None:
        self.value = self.value.at[index].set(x)


class OverRefs:
    """Loops, branches and calls of bodies that read and write refs."""

    def loop(self, cells: Sequence[Any], x: Any, body: Body) -> None:
        lax.fori_loop(0, 3, lambda _, c: (body(), c)[1], 0)

    def branch(self, cells: Sequence[Any], x: Any, body: Body) -> None:
        lax.cond(x > 0, body, lambda: None)

    def call(self, cells: Sequence[Any], x: Any, body: Body) -> None:
        """A call of a function that is given the refs, and closes over them."""
        refs.jit(lambda given: body())(cells)

    def twice(self, cells: Sequence[Any], x: Any, body: Body) -> None:
        function = refs.jit(lambda: body())  # noqa: PLW0108, another function each time
        function(), function()


class ByHand:
    """The same, given the values and returning them."""

    def loop(self, cells: Sequence[Threaded], x: Any, body: Body) -> None:
        step = threaded(cells, body)
        put(cells, lax.fori_loop(0, 3, lambda _, values: step(values), values_of(cells)))

    def branch(self, cells: Sequence[Threaded], x: Any, body: Body) -> None:
        new = threaded(cells, body)
        put(cells, lax.cond(x > 0, new, lambda values: values, values_of(cells)))

    def call(self, cells: Sequence[Threaded], x: Any, body: Body) -> None:
        put(cells, jax.jit(threaded(cells, body))(values_of(cells)))

    def twice(self, cells: Sequence[Threaded], x: Any, body: Body) -> None:
        function = jax.jit(threaded(cells, body))
        put(cells, function(function(values_of(cells))))


WAYS = "refs", "by hand"


def values_of(cells: Iterable[Threaded]) -> list[Any]:
    return [cell.value for cell in cells]


def put(cells: Iterable[Threaded], values: Iterable[Any]) -> None:
    for cell, value in zip(cells, values, strict=True):
        cell.value = value


def threaded(cells: Sequence[Threaded], body: Body) -> Callable[[list[Any]], list[Any]]:
    """The body as a function of the values before it, which gives those after it."""

    def new(values: list[Any]) -> list[Any]:
        put(cells, values)
        body()
        return values_of(cells)

    return new


# -- The programs: `run(way, cells, x, n)` ---------------------------------------------------------


def step(cells: Sequence[Any], x: Any) -> None:
    """Changes each ref by the next one."""
    for a, b in pairwise(cells):
        a[0] = a[0] + jnp.sin(b[0]) * x


def inside(kind: str, depth: int | None = None) -> Callable[..., Any]:
    """A step, and in a loop, branch or call the same one level less deep; `depth` is n."""

    def steps(way: Any, cells: Sequence[Any], x: Any, depth: int) -> None:
        step(cells, x)
        if depth:
            getattr(way, kind)(cells, x, lambda: steps(way, cells, x, depth - 1))

    def run(way: Any, cells: Sequence[Any], x: Any, n: int) -> Any:
        steps(way, cells, x, n if depth is None else depth)
        return cells[0][0]

    return run


def shared(way: Any, cells: Sequence[Any], x: Any, n: int) -> Any:
    """A function without refs, which calls another one twice, which calls a third one twice …"""
    fun = jax.jit(lambda y: jnp.sin(y) * 2)
    for _ in range(n):
        fun = jax.jit(lambda y, fun=fun: fun(fun(y)))
    cells[0][0] = fun(cells[0][0] * x)
    return cells[0][0]


def all_read_first(way: Any, cells: Sequence[Any], x: Any, n: int) -> None:
    found = [r[k % 50] for k, r in enumerate(cells)]
    for r, value in zip(reversed(cells), found, strict=True):
        r[0] = value


def overwritten(way: Any, cells: Sequence[Any], x: Any, n: int) -> None:
    for r in cells:
        r[:] = r[:] * 0.5 - r[3] * x


def read_and_written(way: Any, cells: Sequence[Any], x: Any, n: int) -> Any:
    [r] = cells
    for k in range(n):
        r[k % LARGE] = r[k * 7 % 50] * 1.5
    return r[0]


def changed(way: Any, cells: Sequence[Any], x: Any, n: int) -> Any:
    [r] = cells
    for k in range(n):
        r[k] = r[k] * 1.5
    return r[0]


def only_read(way: Any, cells: Sequence[Any], x: Any, n: int) -> Any:
    return sum(cells[0][k] for k in range(n)) * x


# -- The table -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A program at two sizes.

    Attributes:
      run: called with the way, the refs, a number and the size.
      n_refs: how many refs it has; None: as many as the size says.
      under: the transformation, "grad", "vmap" or "reversible", which is the gradient of that.
      longer: by how much each ref is longer than the one before.
    """

    title: str
    sizes: tuple[int, int]
    run: Callable[..., Any]
    n_refs: int | None = None
    under: str = ""
    longer: int = 0


REFS, FEWER, ACCESSES, DEPTH = (100, 400), (25, 100), (250, 1000), (2, 4)
LOOP, BRANCH = inside("loop", 1), inside("branch", 1)
LOOPS, BRANCHES = inside("loop"), inside("branch")

PROGRAMS = [
    Program("refs, first read, then written", REFS, all_read_first),
    Program("refs of as many shapes, overwritten", REFS, overwritten, longer=1),
    Program("refs in a loop", REFS, LOOP),
    Program("refs in a branch", REFS, BRANCH),
    Program("refs in a loop, gradient", FEWER, LOOP, under="grad"),
    Program("refs in a loop, lanes", REFS, LOOP, under="vmap"),
    Program("refs in a branch, lanes", REFS, BRANCH, under="vmap"),
    Program("refs in a loop, reversible", FEWER, LOOP, under="reversible"),
    Program("refs in a branch, reversible", FEWER, BRANCH, under="reversible"),
    Program("accesses", (1000, 4000), read_and_written, 1),
    Program("accesses, gradient", ACCESSES, read_and_written, 1, "grad"),
    Program("reads, reversible", ACCESSES, only_read, 1, "reversible"),
    Program("changes, reversible", ACCESSES, changed, 1, "reversible"),
    Program("nested loops", DEPTH, LOOPS, 5),
    Program("nested loops, gradient", DEPTH, LOOPS, 5, "grad"),
    Program("nested loops, lanes", DEPTH, LOOPS, 5, "vmap"),
    Program("nested loops, reversible", DEPTH, LOOPS, 5, "reversible"),
    Program("nested branches", DEPTH, BRANCHES, 5),
    Program("nested branches, lanes", DEPTH, BRANCHES, 5, "vmap"),
    Program("nested branches, reversible", DEPTH, BRANCHES, 5, "reversible"),
    Program("nested calls, given what they hold", DEPTH, inside("call"), 5),
    Program("nested calls, each twice", DEPTH, inside("twice"), 5),
    Program("nested calls without refs", (5, 10), shared, 1),
    Program("nested calls without refs, gradient", (5, 10), shared, 1, "grad"),
    Program("nested calls without refs, lanes", (5, 10), shared, 1, "vmap"),
]


def lowering(program: Program, way: str, n: int) -> Callable[[], Any]:
    """A function that traces and lowers a program, which JAX hasn't seen before."""
    lengths = [LARGE + program.longer * k for k in range(program.n_refs or n)]
    in_lanes = program.under == "vmap"
    arrays = [jnp.ones((2, length) if in_lanes else length) for length in lengths]
    x = jnp.ones(2) if in_lanes else jnp.float32(1)

    def over_refs(x: Any, cells: Sequence[Any]) -> Any:
        return program.run(OverRefs(), cells, x, n), ()

    def by_hand(x: Any, arrays: Sequence[Any]) -> Any:
        cells = [*map(Threaded, arrays)]
        return program.run(ByHand(), cells, x, n), values_of(cells)

    library: Any = refs if way == "refs" else jax
    state = [*map(refs.new_ref, arrays)] if way == "refs" else arrays

    def lower() -> Any:
        fun: Any = functools.partial(over_refs if way == "refs" else by_hand)
        if program.under == "reversible" and way == "refs":
            fun = refs.reversible(fun)
        if program.under in ("grad", "reversible"):
            fun = library.grad(fun, has_aux=True)
        if in_lanes:
            fun = library.vmap(fun)
        return library.jit(fun).lower(x, state)

    return lower


def seconds(call: Callable[[], Any]) -> float:
    """Seconds of this thread's processor time: other programs on the machine don't count."""
    gc.collect()
    gc.disable()
    try:
        start = time.thread_time()
        call()
        return time.thread_time() - start
    finally:
        gc.enable()


def measured(rounds: int, part: float, only: Sequence[str] | None) -> dict[str, Section]:
    small: dict[str, dict[str, Timing]] = {}
    large: dict[str, dict[str, Timing]] = {}
    for program in PROGRAMS:
        if only and program.title not in only:
            continue
        sizes = [max(1, round(n * part)) for n in program.sizes]
        calls = [lowering(program, way, n) for way in WAYS for n in sizes]
        for call in calls[::2]:  # JAX fills its own caches.
            call()
        times = in_turns([functools.partial(seconds, call) for call in calls], rounds)
        title = "{:,} → {:,} {}".format(*sizes, program.title)
        small[title] = dict(zip(WAYS, times[::2], strict=True))
        large[title] = dict(zip(WAYS, times[1::2], strict=True))
    return {"small": Section("s", small, "by hand"), "large": Section("s", large, "by hand")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", type=float, default=1.0, help="of all sizes")
    parser.add_argument("--only", nargs="+", choices=[p.title for p in PROGRAMS], metavar="TITLE")
    add_option(parser)
    options = parser.parse_args()
    found = measured(options.rounds, options.part, options.only)
    table = Table(title=f"Seconds to trace and lower, and growth (jax {jax.__version__})")
    for head in ("program", *WAYS):
        table.add_column(head, justify="left" if head == "program" else "right")
    for title, row in found["large"].rows.items():
        before = found["small"].rows[title]
        of_ways = [(row[way].median, row[way].median / before[way].median) for way in WAYS]
        table.add_row(title, *("{:.3g} ({:.1f}x)".format(*figures) for figures in of_ways))
    Console().print(table)
    record("growth", found, options)


if __name__ == "__main__":
    main()
