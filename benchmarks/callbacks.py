"""What a callback costs: a compiled program calls a NumPy function that updates a large array.

    python benchmarks/callbacks.py                 # 4 B, 1 MiB and 256 MiB: some minutes
    python benchmarks/callbacks.py --quick
    python benchmarks/callbacks.py --sizes 4 4096  # bytes

From the top of the checkout, with `refs` and rich installed.

The function adds to one element, or overwrites the whole array from a NumPy array. Over a ref,
`refs.io_callback` gives it the ref's own memory. JAX's `pure_callback` and `io_callback` take a
value and return a new one; `buffer_callback`, with the alias declared, gives it the argument's
memory too. These run under a `jax.jit` that donates the state, and so does the lower bound, without
a callback: `x.at[i].add(1)`, or `x.at[...].set(...)` of an array on the device.

Before the timing, all ways have made some steps and hold the values that plain NumPy holds. Then
they take turns in one process; a figure is the median of the rounds, `--rounds` of them, or as many
as fit into `--budget` seconds of a way, but at least three. A turn is as many calls as take 20 ms;
in the loop, one call with as many steps. Each call is waited for before the next.

Memory is measured for states of 16 MiB and more: malloc takes each of these from the system, and
gives it back, by itself. A fresh process runs one way, first on up to three elements, so that the
compiler's own memory is allocated; the peak is the most memory that the process has then needed
(`VmHWM`), less its memory without the state, less the state. So a copy counts whether it is kept or
only made. Measuring needs Linux.

The pointers are those that the function gets, and those of the state before and after.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from callbacks_ways import BUFFERS, BY_HAND, OURS, PROGRAMS, PURE, WAYS, Way, checked, pointers
from results import Row, Section, add_option, record
from rich.console import Console
from rich.table import Table
from stopwatch import Timing, in_turns, microseconds

import refs

KIB, MIB = 2**10, 2**20
SIZES = (4, MIB, 256 * MIB)
LEAST_MEASURED = 16 * MIB
FEWEST = 3  # rounds
WIDTH = 150  # of the tables, where no terminal gives one
PLACES = ("top level", "in a loop")

# -- Time -----------------------------------------------------------------------------------------


def timed(program: Any, n: int, rounds: int, budget: float, turn: float) -> tuple[Row, Row]:
    """Microseconds of each way: a call at top level, and a step in a loop."""
    ways = checked(program, n)
    looped = {name: way for name, way in ways.items() if way.loop is not None}
    found = []
    for chosen, measure in ((ways, calls), (looped, steps)):
        measures = [measure(way, turn) for way in chosen.values()]
        took = [seconds(m) for m in measures]
        most = [min(rounds, max(FEWEST, int(budget / t))) for t in took]
        found.append(dict(zip(chosen, in_turns(measures, most), strict=True)))
    return found[0], found[1]


def seconds(call: Callable[[], Any]) -> float:
    return microseconds(call, 1) / 1e6


def calls(way: Way, turn: float) -> Callable[[], float]:
    step = numbered(lambda k, _: way.step(k))
    repeat = max(1, int(turn * 1e6 / microseconds(partial(step, 1), 3)))
    return partial(microseconds, partial(step, 1), repeat)


def steps(way: Way, turn: float) -> Callable[[], float]:
    loop = numbered(way.loop)  # type: ignore[arg-type]
    n = 3
    while (took := microseconds(partial(loop, n), 1) / 1e6) < turn / 4:
        n *= 4
    n = max(3, int(n * turn / took))
    return lambda: microseconds(partial(loop, n), 1) / n


def numbered(call: Callable[[int, int], Any]) -> Callable[[int], None]:
    """Makes of `call(k, n)` a function of `n`, whose steps `k` go on from one call to the next."""
    k = 0

    def called(n: int) -> None:
        nonlocal k
        call(k, n)
        k = (k + n) % 10_000

    return called


# -- Memory ---------------------------------------------------------------------------------------


def peak(way: str, program: str, n: int) -> dict[str, float]:
    """Bytes needed beside the state, in a fresh process: by a call, and by a loop."""
    command = [sys.executable, __file__, "--child", json.dumps([way, program, n])]
    paths = [str(Path(refs.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    child = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    return json.loads(child.stdout)


def measure_peak(way: str, title: str, n: int) -> dict[str, float]:
    """The measurement of `peak`, run in the fresh process."""
    program = PROGRAMS[title](n)
    for small in (1, 2, 3):
        run_once(WAYS[way](PROGRAMS[title](small), small))
    gc.collect()
    without = memory("VmRSS") + 4 * n
    found = WAYS[way](program, n)
    run_once(found)
    result = {}
    for place, call in zip(PLACES, (found.step, found.loop), strict=True):
        if call is not None:
            forget_peak()
            call(*(1, 3)[: 1 + (call is found.loop)])
            result[place] = max(0, memory("VmHWM") - without)
    return result


def run_once(way: Way) -> None:
    way.step(0)
    if way.loop is not None:
        way.loop(0, 3)


def memory(name: str) -> int:
    """A field of /proc/self/status, in bytes. `ru_maxrss` would start with the parent's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * KIB
    raise OSError(f"/proc/self/status has no {name}")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


# -- Tables ---------------------------------------------------------------------------------------


def table(title: str, rows: dict[str, dict[str, str]]) -> Table:
    table = Table(title=f"{title} (jax {jax.__version__}, {jax.default_backend()})")
    table.add_column("", no_wrap=True)
    for way in WAYS:
        table.add_column(way, justify="right", no_wrap=True)
    for name, cells in rows.items():
        table.add_row(name, *(cells.get(way, "–") for way in WAYS))
    return table


def cells(row: Row) -> dict[str, str]:
    times = {way: time.median for way, time in row.items()}
    return {
        way: shown(t) if way == OURS else f"{shown(t)} ({ratio(t / times[OURS])})"
        for way, t in times.items()
    }


def shown(x: float) -> str:
    return f"{x:.3f}" if x < 1 else f"{x:.1f}" if x < 100 else f"{x:,.0f}"


def ratio(x: float) -> str:
    return f"{x:.3f}x" if x < 0.1 else f"{x:.2f}x" if x < 10 else f"{x:,.0f}x"


def bytes_of(n: float) -> str:
    for unit, size in (("MiB", MIB), ("KiB", KIB)):
        if n >= size:
            return f"{n / size:,.0f} {unit}"
    return f"{n:.0f} B"


def verdict(times: dict[tuple[str, int, str], Row], sizes: Sequence[int]) -> str:
    """Compares one element of the largest state with JAX's callback, and with the smallest."""
    lines = []
    for place in PLACES:
        small, large = (
            {way: time.median for way, time in times["one element", size, place].items()}
            for size in (min(sizes), max(sizes))
        )
        lines.append(
            f"One element of {bytes_of(max(sizes))}, {place}: {large[PURE] / large[OURS]:,.0f}x "
            f"faster than jax.pure_callback, {large[OURS] / small[OURS]:.2f}x of "
            f"{bytes_of(min(sizes))}, {large[OURS] / large[BY_HAND]:.1f}x of jnp by hand"
        )
    return "\n".join(lines)


# -- All of it ------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.child:
        print(json.dumps(measure_peak(*json.loads(options.child))))
        return
    console = Console()
    console.width = max(console.width, WIDTH)
    rounds, budget, turn = (5, 2.0, 0.005) if options.quick else (options.rounds, 10.0, 0.02)
    budget = options.budget or budget
    kinds = [(title, size) for title in PROGRAMS for size in options.sizes]
    peaks = {kind: peaks_of(*kind) for kind in kinds if kind[1] >= LEAST_MEASURED}
    times: dict[tuple[str, int, str], Row] = {}
    places = {}
    for title, size in kinds:
        note(f"{title}, {bytes_of(size)}")
        program = PROGRAMS[title](size // 4)
        found = timed(program, size // 4, rounds, budget, turn)
        times |= {(title, size, place): t for place, t in zip(PLACES, found, strict=True)}
        places[title, size] = {w: pointers(make, program, size // 4) for w, make in WAYS.items()}
    console.print(
        table("µs a call, or a step; x of refs.jit", {name(k): cells(t) for k, t in times.items()})
    )
    console.print(table("the state's own memory, top level / in a loop", rows_of(places)))
    if peaks:
        console.print(table("peak memory beside the state, top level / in a loop", by_row(peaks)))
    console.print(verdict(times, options.sizes))
    record("callbacks", sections(times, peaks), options)


def sections(times: dict[tuple[str, int, str], Row], peaks: dict[Any, Any]) -> dict[str, Section]:
    """By place, and the memory of a call."""
    found = {
        place.replace(" ", "-"): Section(
            "µs", {name(kind[:2]): row for kind, row in times.items() if kind[2] == place}, BUFFERS
        )
        for place in PLACES
    }
    memory = {
        name(kind): {way: Timing(peak[PLACES[0]] / MIB) for way, peak in row.items()}
        for kind, row in peaks.items()
    }
    return found | {"memory": Section("MiB", memory)}


def parse(arguments: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="of a way in a row")
    parser.add_argument("--quick", action="store_true", help="few rounds, and short ones")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    add_option(parser)
    options = parser.parse_args(arguments)
    if any(size % 4 or size < 4 for size in options.sizes):
        parser.error("sizes are multiples of 4 bytes, of a float32")
    return options


def peaks_of(title: str, size: int) -> dict[str, dict[str, float]]:
    note(f"{title}, {bytes_of(size)}, memory")
    return {way: peak(way, title, size // 4) for way in WAYS}


def note(what: str) -> None:
    print(what, "…", file=sys.stderr, flush=True)


def name(kind: tuple[Any, ...]) -> str:
    title, size, *place = kind
    return ", ".join([title, bytes_of(size), *place])


def rows_of(places: dict[Any, dict[str, tuple[bool, ...]]]) -> dict[str, dict[str, str]]:
    return {
        name(kind): {w: " / ".join("yes" if x else "no" for x in found) for w, found in row.items()}
        for kind, row in places.items()
    }


def by_row(peaks: dict[Any, dict[str, dict[str, float]]]) -> dict[str, dict[str, str]]:
    return {
        name(kind): {w: " / ".join(map(bytes_of, found.values())) for w, found in row.items()}
        for kind, row in peaks.items()
    }


if __name__ == "__main__":
    main()
