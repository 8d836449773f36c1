"""A training step over refs on up to 1,024 devices, compiled and not run; and what a call costs.

    python benchmarks/scale.py [--rounds N] [--devices N ...] [--local N ...]

The step trains a small transformer with Adam: parameters and both moments are refs. It is laid out
in four ways: data-parallel; FSDP, where each device has a part of each parameter, on a mesh with
automatic and with explicit axes; and FSDP with tensor parallelism, on a mesh with two axes. The
control threads the same state through a `jax.jit` that donates it, with the same shardings. Both
are compiled in one process, in turns, for abstract refs and arrays, so that no state exists: the
host pretends to have as many devices. Compared are the collectives of the two programs, one by one,
the buffers that are aliased, the memory beside them, and the time that tracing, lowering and XLA
take.

What one process does for a call depends on its own devices. So calls that add 1 to each of some
refs are run where a process has a few of them, with their program and without it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import NamedSharding, P, lax
from jax.sharding import AxisType
from results import Section, add_option, record
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from scale_programs import BY_HAND, LAYOUTS, OURS, compiled, programs
from stopwatch import Timing, in_turns, microseconds

import refs
from refs._buffers.operations import buffer_of
from refs._explain.hlo import Module
from refs._jit import running

Rows = dict[str, dict[str, Timing]]


# --- Time to compile -----------------------------------------------------------------------------


def seconds(layout: str, layers: int, rounds: int) -> Rows:
    """What JAX takes to trace and lower a step, and XLA to compile it."""
    found: dict[str, list[float]] = {}

    def measure(way: str, lower: Callable[[str], Any]) -> float:
        start = time.perf_counter()
        lowered, _ = lower("cuda")
        middle = time.perf_counter()
        lowered.compile()
        found.setdefault(way, []).append(time.perf_counter() - middle)
        return middle - start

    both = programs(layout, layers)
    lowering = in_turns([functools.partial(measure, *way) for way in both.items()], rounds)
    return {
        "lowering": dict(zip(both, lowering, strict=True)),
        "compiling": {way: Timing.of(found[way]) for way in both},
    }


# --- Accesses to a part of a sharded ref ----------------------------------------------------------

ROWS, COLUMNS = 65536, 128
# Over a ref, and by hand. `rows` are half of as many as the ref has.
ACCESSES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "r[k] = row": (
        lambda r, k, rows: r.__setitem__(k, rows[0]),
        lambda x, k, rows: x.at[k].set(rows[0]),
    ),
    "r.at[k].add(row)": (
        lambda r, k, rows: r.at[k].add(rows[0]),
        lambda x, k, rows: x.at[k].add(rows[0]),
    ),
    "r[ks] = rows": (
        lambda r, k, rows: r.__setitem__(k + jnp.arange(64) ** 2, rows[:64]),
        lambda x, k, rows: x.at[k + jnp.arange(64) ** 2].set(rows[:64]),
    ),
    "r[ds(k, 64)] = rows": (
        lambda r, k, rows: r.__setitem__(jax.ds(k, 64), rows[:64]),
        lambda x, k, rows: lax.dynamic_update_slice(x, rows[:64], (k, 0)),
    ),
    "r[ds(k, n / 2)] = rows": (
        lambda r, k, rows: r.__setitem__(jax.ds(k, len(rows)), rows),
        lambda x, k, rows: lax.dynamic_update_slice(x, rows, (k, 0)),
    ),
    "r[:, k] = 1": (
        lambda r, k, rows: r.__setitem__((slice(None), k), 1.0),
        lambda x, k, rows: x.at[:, k].set(1.0),
    ),
    "r[k]": (lambda r, k, rows: r[k], lambda x, k, rows: x[k]),
}


def accesses() -> dict[str, dict[str, list[float]]]:
    """What collectives bring to a device, in kilobytes, for an access to a ref divided by rows."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    split, whole = (NamedSharding(mesh, P(*axes)) for axes in (("data",), ()))
    of_x = {"shape": (ROWS, COLUMNS), "dtype": jnp.float32, "sharding": split}
    k = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    rows = jax.ShapeDtypeStruct((ROWS // 2, COLUMNS), jnp.float32, sharding=whole)
    found: Rows = {}
    for title, (over_refs, by_hand) in ACCESSES.items():
        reads = title == "r[k]"
        jitted = {
            BY_HAND: jax.jit(
                by_hand,
                donate_argnums=() if reads else 0,
                keep_unused=True,
                out_shardings=whole if reads else split,
            ),
            OURS: refs.jit(over_refs, out_shardings=whole),
        }
        for way, f in jitted.items():
            x = jax.ShapeDtypeStruct(**of_x, is_ref=way == OURS)
            lowered = f.trace(x, k, rows).lower(lowering_platforms=("cuda",))
            module = Module.parse(lowered.compile().as_text())
            moved = sum(m.bytes for m in module.moves() if m.is_collective) / 1e3
            found.setdefault(title, {})[way] = Timing(moved)
    return encoded(found)


# --- Calls ----------------------------------------------------------------------------------------


def calls(n: int, rounds: int) -> Rows:
    """A call that adds 1 to each of `n` refs: until it returns; and `refs`' own part of that.

    Each device has 16 numbers of a ref. The program isn't waited for, but has ended before the next
    call: so it is what Python and JAX take that is measured. For `refs`' own part, a function that
    returns the buffers as they are is in the program's place.
    """
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, P("data"))
    values = [jax.device_put(np.ones(16 * jax.device_count(), np.float32), split)] * n
    arrays = [jnp.copy(x) for x in values]
    held = [refs.new_ref(x) for x in values]

    def add(arrays: Sequence[Any]) -> list[Any]:
        return [x + 1 for x in arrays]

    @refs.jit
    def over_refs(held: Sequence[Any]) -> None:
        for r in held:
            r[...] += 1

    donating = jax.jit(add, donate_argnums=0, out_shardings=[split] * n)

    def by_hand() -> None:
        nonlocal arrays
        arrays = donating(arrays)

    both = {
        BY_HAND: (by_hand, lambda: arrays),
        OURS: (lambda: over_refs(held), lambda: [buffer_of(r) for r in held]),
    }

    def measure(call: Callable[[], Any], state: Callable[[], Any]) -> float:
        total, repeat = 0.0, 20
        for _ in range(repeat):
            start = time.perf_counter()
            call()
            total += time.perf_counter() - start
            jax.block_until_ready(state())
        return total / repeat * 1e6

    for way in both.values():
        measure(*way)
    measures = [functools.partial(measure, *way) for way in both.values()]
    times = dict(zip(both, in_turns(measures, rounds), strict=True))
    for x, r in zip(arrays, held, strict=True):
        np.testing.assert_array_equal(x, r)

    def exchange(cells: Any, program: Any, *_: Any) -> Any:
        return real(cells, lambda buffers: (buffers[:], None))

    real = running.exchange
    with mock.patch.object(running, "exchange", exchange):
        alone = in_turns([lambda: microseconds(lambda: over_refs(held), 200)], rounds)
    return {"calls": times, "own": {OURS: alone[0]}}


# --- A process for each number of devices ---------------------------------------------------------


def with_devices(n: int, what: str, *arguments: Any) -> Any:
    """What a function of `CHILDREN` finds in a process with so many devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={n}"
    done = subprocess.run(
        [sys.executable, __file__, "--child", what, json.dumps(arguments)],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout)


def of_layouts(layers: int, rounds: int) -> dict[str, Any]:
    return {
        layout: {
            "facts": compiled(layout, layers),
            "seconds": encoded(seconds(layout, layers, rounds)),
        }
        for layout in LAYOUTS
    }


def encoded(section: Rows) -> dict[str, dict[str, list[float]]]:
    return {t: {w: [x.median, x.noise] for w, x in row.items()} for t, row in section.items()}


def decoded(rows: dict[str, dict[str, list[float]]]) -> Rows:
    return {title: {way: Timing(*x) for way, x in row.items()} for title, row in rows.items()}


CHILDREN: dict[str, Callable[..., Any]] = {
    "layouts": of_layouts,
    "facts": lambda layers: {layout: compiled(layout, layers) for layout in LAYOUTS},
    "accesses": accesses,
    "calls": lambda n, rounds: encoded(calls(n, rounds)),
}


def programs_on(devices: Sequence[int], layers: int, rounds: int) -> dict[str, Section]:
    sections = {name: Section("s", {}, BY_HAND) for name in ("lowering", "compiling")}
    for n in devices:
        for layout, of_layout in with_devices(n, "layouts", layers, rounds).items():
            title = f"{layout}, {n:,} devices"
            for platform, found in of_layout["facts"].items():
                for fact in found[OURS]:
                    section = sections.setdefault(f"{platform}: {fact}", Section(fact, {}))
                    section.rows[title] = {way: Timing(x[fact]) for way, x in found.items()}
            for name, row in decoded(of_layout["seconds"]).items():
                sections[name].rows[title] = row
    return sections


def accesses_on(devices: int) -> Section:
    return Section(f"KB, {devices:,} devices", decoded(with_devices(devices, "accesses")), BY_HAND)


def calls_on(devices: Sequence[int], rounds: int) -> dict[str, Section]:
    sections = {
        "calls": Section("µs a call", {}, BY_HAND),
        "own": Section("µs a call, without the program", {}),
    }
    for held, n in itertools.product((20, 200), devices):
        title = f"{held} refs, {n} device{'s' * (n > 1)}"
        for name, row in decoded(with_devices(n, "calls", held, rounds)).items():
            sections[name].rows[title] = row
    return sections


def table(title: str, section: Section) -> Table:
    shown = Table(title=f"{title}: {section.unit} (jax {jax.__version__})")
    for k, name in enumerate(["", *section.ways()]):
        shown.add_column(name, justify="right" if k else "left")
    for row_title, row in section.rows.items():
        shown.add_row(escape(row_title), *(f"{t.median:,.4g}" for t in row.values()))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 256, 1024])
    parser.add_argument("--local", type=int, nargs="+", default=[1, 4, 8, 64])
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    add_option(parser)
    options = parser.parse_args()
    if options.child:
        what, arguments = options.child
        print(json.dumps(CHILDREN[what](*json.loads(arguments))))
        return
    sections = {
        **programs_on(options.devices, options.layers, options.rounds),
        "accesses": accesses_on(max(options.devices)),
        **calls_on(options.local, 5 * options.rounds),
    }
    for title, section in sections.items():
        Console(width=120).print(table(title, section))
    record("scale", sections, options)


if __name__ == "__main__":
    main()
