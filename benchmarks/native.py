"""Programs that should simply run: their results over JAX's own refs, and over `refs`.

    python benchmarks/native.py [--rounds N] [--time-out SECONDS] [--no-times]

The first table has a row for each program of `native_programs_*.py`. The programs run one at a time
in a separate process, which is killed if the program doesn't end by itself. Each result is compared
with that of plain Python.

The second table has times: of a call, of an eager update, and of loops over large arrays. The
columns take turns in one process; a figure is the median of the rounds, a ratio is the ratio of the
medians. The control threads arrays by hand through a `jax.jit`, which donates the state.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import native_programs_gradients
import native_programs_state
import numpy as np
from jax import lax
from native_program import Program
from rich.console import Console
from rich.table import Table
from stopwatch import medians

import refs

PROGRAMS = {
    item.name: item
    for module in (native_programs_state, native_programs_gradients)
    for item in vars(module).values()
    if isinstance(item, Program)
}

# --- Outcomes: right, wrong, an error, or no end --------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The outcome of a program: `right` says whether it is the expected one."""

    right: bool
    text: str


def outcome(program: Program, side: str) -> Outcome:
    """Runs one side of a program: "native" or "ours"."""
    expected = program.expected
    try:
        result = getattr(program, side)()
    except Exception as error:
        text = f"{type(error).__name__}: {first_words(str(error))}"
        as_promised = type(error) is type(expected) and str(expected) in str(error)
        return Outcome(as_promised, text)
    if isinstance(expected, Exception):
        return Outcome(False, "allowed, silently")
    right = expected()
    if equal(result, right):
        return Outcome(True, "right")
    return Outcome(False, f"{shown(result)}, silently; right is {shown(right)}")


def first_words(message: str, length: int = 60) -> str:
    line = message.strip().splitlines()[0] if message.strip() else ""
    return line if len(line) <= length else line[: length - 1].rsplit(" ", 1)[0] + " …"


def equal(result: Any, right: Any) -> bool:
    """Whether arrays equal the numbers, lists and tuples of `right`."""
    if isinstance(right, tuple):
        return len(result) == len(right) and all(map(equal, result, right))
    result, right = np.asarray(result), np.asarray(right)
    return result.shape == right.shape and np.allclose(result, right, rtol=1e-5)


def shown(x: Any) -> str:
    if isinstance(x, tuple):
        return ", ".join(map(shown, x))
    return np.array2string(np.asarray(x), precision=4, separator=", ")


# --- A process that can be killed -----------------------------------------------------------------


class Worker:
    """Runs programs in a separate process, which is killed with a program that doesn't end."""

    def __init__(self, time_out: float):
        self.time_out = time_out
        self._context = multiprocessing.get_context("spawn")
        self._start()

    def _start(self) -> None:
        self._pipe, theirs = self._context.Pipe()
        self._process = self._context.Process(target=work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()  # The time-out doesn't include the imports.

    def __call__(self, name: str, side: str) -> Outcome:
        self._pipe.send((name, side))
        try:
            if self._pipe.poll(self.time_out):
                return self._pipe.recv()
            found = Outcome(False, f"no end in {self.time_out:g} s")
        except EOFError:
            found = Outcome(False, "the process died")
        self.close()
        self._start()
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def work(pipe: Any) -> None:
    pipe.send("ready")
    while True:
        try:
            name, side = pipe.recv()
        except EOFError:
            return
        pipe.send(outcome(PROGRAMS[name], side))


def outcomes(names: Sequence[str], time_out: float) -> Iterator[tuple[str, Outcome, Outcome]]:
    """For each program: its name, its outcome with JAX, and with `refs`."""
    worker = Worker(time_out)
    try:
        for name in names:
            yield name, worker(name, "native"), worker(name, "ours")
    finally:
        worker.close()


def table_of_outcomes(rows: Sequence[tuple[str, Outcome, Outcome]]) -> Table:
    table = Table(title=f"Programs over refs (jax {jax.__version__})", show_lines=True)
    for title in ("program", "jax.Ref", "refs"):
        table.add_column(title, overflow="fold")
    for name, native, ours in rows:
        table.add_row(PROGRAMS[name].title, cell(native), cell(ours))
    return table


def cell(found: Outcome) -> str:
    text = found.text.replace("[", r"\[")
    return f"[green]{text}[/]" if found.right else f"[red]{text}[/]"


# --- Times ----------------------------------------------------------------------------------------

SIZE, STEPS = 1_000_000, 1000
Call = Callable[[], Any]


def add_one(r: Any) -> None:
    r[...] += 1


def adding_one(wrap: Any) -> list[Call]:
    """Calls of `wrap(add_one, m)` on a ref of the module `m`, and of the same by hand."""
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros(16)

    def by_hand() -> None:
        nonlocal x
        x = add(x)

    def over(m: Any) -> Call:
        r, step = m.new_ref(jnp.zeros(16)), wrap(add_one, m)
        return lambda: step(r)

    return [by_hand, over(jax), over(refs)]


def add_one_in_a_jit() -> list[Call]:
    return adding_one(lambda f, m: m.jit(f))


def add_one_eagerly() -> list[Call]:
    return adding_one(lambda f, m: f)


def swap_neighbours(r: Any) -> None:
    def step(i: Any, _: Any) -> None:
        left, right = r[i], r[i + 1]
        r[i] = right
        r[i + 1] = left

    lax.fori_loop(0, STEPS, step, None)


def swap_neighbours_of_an_array(x: Any) -> Any:
    def step(i: Any, x: Any) -> Any:
        left, right = x[i], x[i + 1]
        return x.at[i].set(right).at[i + 1].set(left)

    return lax.fori_loop(0, STEPS, step, x)


def over_state(pure: Any, program: Any, wrap: Any, start: Any, *args: Any) -> list[Call]:
    """By hand, native, ours: `pure(x, *args)` returns the new x, `program(r, *args)` mutates r.

    `wrap(m)` transforms either of them, with the functions of the module `m`.
    """
    step = jax.jit(wrap(jax)(pure), donate_argnums=0)
    x = jnp.copy(start)

    def by_hand() -> None:
        nonlocal x
        x = step(x, *args).block_until_ready()

    def over(m: Any) -> Call:
        r = m.new_ref(start)

        @m.jit
        def step(r: Any, *args: Any) -> Any:
            wrap(m)(program)(r, *args)
            return jnp.int32(0)  # to wait for

        return lambda: step(r, *args).block_until_ready()

    return [by_hand, over(jax), over(refs)]


def swap_loop() -> list[Call]:
    start = jnp.arange(SIZE, dtype=jnp.float32)
    return over_state(swap_neighbours_of_an_array, swap_neighbours, lambda m: lambda f: f, start)


def count_in_lane(mine: Any, n: Any) -> None:
    def step(k: Any) -> Any:
        mine[k] += 1
        return k + 1

    lax.while_loop(lambda k: k < n, step, 0)


def count_in_lane_of_an_array(mine: Any, n: Any) -> Any:
    def step(carry: Any) -> Any:
        k, mine = carry
        return k + 1, mine.at[k].add(1)

    return lax.while_loop(lambda carry: carry[0] < n, step, (0, mine))[1]


def lanes_of_while() -> list[Call]:
    start = jnp.zeros((8, SIZE // 10))
    steps = jnp.arange(100, 900, 100)
    return over_state(count_in_lane_of_an_array, count_in_lane, lambda m: m.vmap, start, steps)


def walk(new_ref: Callable[[Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """A loop that reads and writes one array at random indices, over a ref made inside."""

    def loss(x: Any, to: Any, of: Any) -> Any:
        r = new_ref(x)

        def step(k: Any, _: Any) -> None:
            r[to[k]] = jnp.sin(r[of[k]]) * r[to[k]]

        lax.fori_loop(0, STEPS, step, None)
        return jnp.sum(r[...])

    return loss


def walk_by_hand(x: Any, to: Any, of: Any) -> Any:
    def step(k: Any, x: Any) -> Any:
        return x.at[to[k]].set(jnp.sin(x[of[k]]) * x[to[k]])

    return jnp.sum(lax.fori_loop(0, STEPS, step, x))


def gradient_of_walk() -> list[Call]:
    x = jnp.linspace(0, 1, SIZE)
    to, of = np.random.default_rng(0).integers(0, SIZE, (2, STEPS))

    def call(grad: Any) -> Call:
        return lambda: grad(x, to, of).block_until_ready()

    return [
        call(jax.jit(jax.grad(walk_by_hand))),
        call(jax.jit(jax.grad(walk(jax.new_ref)))),
        call(refs.jit(refs.grad(walk(refs.new_ref)))),
    ]


@dataclass(frozen=True)
class Timed:
    title: str
    make: Callable[[], list[Call]]  # by hand, native, ours
    repeat: int  # calls a round
    unit: float = 1  # microseconds


TIMED = [
    Timed("jit over one ref, µs a call", add_one_in_a_jit, 2000),
    Timed("eager r[...] += 1, µs", add_one_eagerly, 500),
    Timed(f"swap neighbours, {STEPS} steps in 10⁶ floats, ms", swap_loop, 1, 1000),
    Timed(f"gradient of {STEPS} random steps in 10⁶ floats, ms", gradient_of_walk, 1, 1000),
    Timed(
        "vmap of while_loop, 8 lanes of 10⁵ floats, 100 to 800 steps, ms", lanes_of_while, 1, 1000
    ),
]


def table_of_times(rounds: int, timed: Sequence[Timed] = TIMED) -> Table:
    table = Table(title=f"Times (jax {jax.__version__}, {jax.default_backend()})")
    table.add_column("program")
    for title in ("by hand", "jax.Ref", "refs", "refs / jax.Ref"):
        table.add_column(title, justify="right")
    for row in timed:
        times = medians(row.make(), rounds, row.repeat)
        table.add_row(
            row.title, *(f"{t / row.unit:,.1f}" for t in times), f"{times[2] / times[1]:.3f}"
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--time-out", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("--no-times", action="store_true", help="print the first table only")
    options = parser.parse_args()

    console = Console()
    console.print(table_of_outcomes(list(outcomes(list(PROGRAMS), options.time_out))))
    if not options.no_times:
        console.print(table_of_times(options.rounds))


if __name__ == "__main__":
    main()
