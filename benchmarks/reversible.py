"""The memory and the time of `refs.reversible`, and what it restores.

    python benchmarks/reversible.py [--rounds N] [--layers N ...] [--steps N]

Programs are written by hand as scans: as they are; with each layer, or about √n of them together,
under `jax.checkpoint`, or both; and over refs, as one reversible function. Compared are what XLA
allocates beside arguments and results, and the time of a gradient as a multiple of the forward
pass's, by hand; all take turns in one process. A Hessian-vector product is forward over reverse.

`reversible` is exact if the backward pass comes back to the initial state to the bit. So it is
asked which state that is, and whether the gradient is NaN if no difference is tolerated. Where
arrays grow, what is restored is far off: the error of the gradient is shown, and whether it is NaN
with the tolerance that is the default.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from results import Section, add_option, record
from reversible_programs import (
    BY_HAND,
    FORWARD,
    OURS,
    PLAIN,
    Coupling,
    Loss,
    expanding,
    for_steps,
    leaving_the_range,
    orbits,
    revnet,
    until,
)
from rich.console import Console
from rich.table import Table
from stopwatch import Timing, calls_a_turn, in_turns, microseconds

import refs

KiB, MiB = 2**10, 2**20
# What a gradient may differ from that by hand, as a part of the largest number in it. `Fixed`
# rounds what is added, 10,000 times.
ROUNDING = 5e-3
ALL = 0, 1, 2


# --- Memory and time -----------------------------------------------------------------------------


def gradient(way: str, loss: Loss) -> Any:
    if way.startswith(OURS):
        return refs.jit(refs.grad(loss, ALL))
    return jax.jit(jax.grad(loss, ALL))


def hessian_vector_product(way: str, loss: Loss) -> Any:
    """In the direction of the arguments themselves."""
    grad, jvp, jit = (
        (refs.grad, refs.jvp, refs.jit) if way.startswith(OURS) else (jax.grad, jax.jvp, jax.jit)
    )
    return jit(lambda *arguments: jvp(grad(loss, ALL), arguments, arguments)[1])


def temporaries(jitted: Any, arguments: Iterable[Any]) -> int:
    """Bytes that XLA allocates for a call, beside arguments and results."""
    return jitted.lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def error(found: Any, right: Any) -> float:
    """As a part of the largest number of each array; NaN if any is."""
    pairs = zip(*map(jax.tree.leaves, (found, right)), strict=True)
    return float(jnp.max(jnp.stack([jnp.max(abs(x - y)) / jnp.max(abs(y)) for x, y in pairs])))


def measured(
    program: Coupling,
    losses: Mapping[str, Loss],
    derivative: Callable[[str, Loss], Any],
    unit: int,
    rounds: int,
) -> tuple[dict[str, Timing], dict[str, Timing]]:
    """The temporaries of each way, in `unit` bytes; and its ms, after those of a forward pass."""
    jitted = {way: derivative(way, loss) for way, loss in losses.items()}
    memory, right = {}, jitted[PLAIN](*program.arguments)
    for way, f in jitted.items():
        memory[way] = Timing(temporaries(f, program.arguments) / unit)
        wrong = error(f(*program.arguments), right)
        if not wrong <= ROUNDING:
            raise AssertionError(f"{program.title}, {way}: the derivative is off by {wrong:.1e}")
    del right
    jitted = {FORWARD: jax.jit(program.by_hand), **jitted}
    calls = [functools.partial(waited_for, f, program.arguments) for f in jitted.values()]
    for call in calls:
        call()
    measures = [functools.partial(microseconds, call, calls_a_turn(call)) for call in calls]
    times = zip(jitted, in_turns(measures, rounds), strict=True)
    return memory, {way: time / 1e3 for way, time in times}


def waited_for(f: Callable[..., Any], arguments: Iterable[Any]) -> None:
    jax.block_until_ready(f(*arguments))


def memory_and_time(layers: list[int], steps: list[int], rounds: int) -> dict[str, Section]:
    first_order = [
        ("revnet", [revnet(n) for n in layers], MiB, gradient, None),
        ("hessian", [revnet(n) for n in layers], MiB, hessian_vector_product, (*BY_HAND, OURS)),
        ("orbits", [orbits(n) for n in steps], KiB, gradient, None),
    ]
    sections = {}
    for name, programs, unit, derivative, ways in first_order:
        memory, times = {}, {}
        for program in programs:
            losses = program.losses()
            losses = {way: losses[way] for way in ways or losses}
            found = measured(program, losses, derivative, unit, rounds)
            memory[program.title], times[program.title] = found
        sections[name] = Section("MiB" if unit == MiB else "KiB", memory)
        sections[f"{name}-times"] = Section("ms", times, FORWARD)
    return sections


def while_loops(steps: list[int]) -> Section:
    """The temporaries of a gradient of a loop whose number of steps is found while it runs."""
    arguments = jnp.float32(1.0), jnp.array([1.0, 0.0]), jnp.array([0.0, 1.1])
    over_refs = refs.jit(refs.grad(until, ALL))
    rows = {}
    for n in steps:
        by_hand, end = jax.jit(jax.grad(for_steps(n), ALL)), jnp.float32(n / 1024)
        wrong = error(over_refs(*arguments, end), by_hand(*arguments))
        if not wrong <= ROUNDING:
            raise AssertionError(f"while, {n} steps: the gradient is off by {wrong:.1e}")
        rows[f"{n:,} steps"] = {
            "scan by hand": Timing(temporaries(by_hand, arguments) / KiB),
            OURS: Timing(temporaries(over_refs, (*arguments, end)) / KiB),
        }
    try:
        jax.grad(lambda x: lax.while_loop(lambda x: x < 9, lambda x: 2 * x, x))(1.0)
    except ValueError:
        return Section("KiB", rows)
    raise AssertionError("JAX has this derivative now: it belongs into the table")


# --- What is restored ----------------------------------------------------------------------------


def kept_in(program: Coupling) -> dict[str, dict[str, Any]]:
    """The ways that differ in how the state is kept."""
    others = {f"{OURS}, {name}": how for name, how in program.modes.items() if "mode" in how}
    return {OURS: {}, **others}


def exactness(steps: int) -> dict[str, Section]:
    """How far the restored state is off; and if it can't be restored, nothing of that."""
    small = revnet(steps, width=16, hidden=32, batch=8, scale=0.03)
    programs = {
        f"leapfrog, {steps:,} steps": orbits(steps),
        f"RevNet, {steps:,} layers": small,
        f"beyond the range, {steps:,} steps": leaving_the_range(steps),
    }
    bits, drift, refused = {}, {}, {}
    for title, program in programs.items():
        state = program.first, program.second
        title = f"{title}, {sum(8 * x.nbytes for x in state):,} bits"
        for way, how in kept_in(program).items():
            found = program.restored(tolerance=None, **how)
            strict = program.restored(tolerance=0, **how)
            refused.setdefault(title, {})[way] = Timing(float(has_nan(strict)))
            if not has_nan(found):
                pairs = list(zip(map(np.asarray, found), map(np.asarray, state), strict=True))
                differing = sum(np.bitwise_count(integers(x) ^ integers(y)).sum() for x, y in pairs)
                bits.setdefault(title, {})[way] = Timing(float(differing))
                most = max(float(np.max(abs(x - y))) for x, y in pairs)
                drift.setdefault(title, {})[way] = Timing(most)
    return {
        "bits": Section("bits that differ", bits),
        "drift": Section("largest difference", drift),
        "refused": Section("NaN with tolerance=0", refused),
    }


def has_nan(tree: Any) -> bool:
    return any(bool(jnp.isnan(x).any()) for x in jax.tree.leaves(tree))


def integers(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32)


def expanding_maps(steps: Iterable[int]) -> dict[str, Section]:
    """The error of a gradient that isn't checked; and whether it is NaN if it is."""
    errors, refused = {}, {}
    for program in map(expanding, steps):
        right = gradient(PLAIN, program.by_hand)(*program.arguments)
        for way, how in kept_in(program).items():
            unchecked, checked = (
                gradient(way, program.over_refs(**how, **check))(*program.arguments)
                for check in ({"tolerance": None}, {})
            )
            wrong = error(unchecked, right)
            if math.isfinite(wrong):
                errors.setdefault(program.title, {})[way] = Timing(wrong)
            refused.setdefault(program.title, {})[way] = Timing(float(has_nan(checked)))
    return {
        "expanding": Section("error of the gradient, unchecked", errors),
        "expanding-refused": Section("NaN with the default tolerance", refused),
    }


def table(title: str, section: Section) -> Table:
    shown = Table(title=f"{title}: {section.unit} (jax {jax.__version__})")
    for k, name in enumerate(["", *section.ways()]):
        shown.add_column(name, justify="right" if k else "left")
    for row_title, row in section.rows.items():
        cells = (f"{row[way].median:,.4g}" if way in row else "–" for way in section.ways())
        shown.add_row(row_title, *cells)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 64, 256])
    parser.add_argument("--steps", type=int, nargs="+", default=[100, 10_000])
    add_option(parser)
    options = parser.parse_args()
    sections = {
        **memory_and_time(options.layers, options.steps, options.rounds),
        "while": while_loops(options.steps),
        **exactness(max(options.steps)),
        **expanding_maps([5, 10, 20, 40]),
    }
    for title, section in sections.items():
        Console(width=160).print(table(title, section))
    record("reversible", sections, options)


if __name__ == "__main__":
    main()
