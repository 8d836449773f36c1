"""Programs that should simply run: their results over JAX's own refs, and over `refs`.

    python benchmarks/native.py [--time-out SECONDS]

The table has a row for each program of `native_programs_*.py`. The programs run one at a time
in a separate process, which is killed if the program doesn't end by itself. Each result is compared
with that of plain Python.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import native_programs_gradients
import native_programs_state
import numpy as np
from native_program import Program
from rich.console import Console
from rich.table import Table

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--time-out", type=float, default=10.0, metavar="SECONDS")
    options = parser.parse_args()

    Console().print(table_of_outcomes(list(outcomes(list(PROGRAMS), options.time_out))))


if __name__ == "__main__":
    main()
