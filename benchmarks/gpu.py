"""On a GPU: what calls and eager operations cost, a step of each program, and what moves.

    python benchmarks/gpu.py --results benchmarks/results
    python benchmarks/gpu.py --only swap         # the programs with that in their title
    python benchmarks/gpu.py --only swap calls   # and all calls

From the top of the checkout, with `refs` and rich installed, on a machine with a GPU (elsewhere it
runs, too, but measures something else). Three things:

- the rows of `dispatch/`, and a training step of many layers, with and without command buffers:
  with them, XLA records the kernels of a program as CUDA graphs, and launches these;
- the programs of `programs/`, at a small and at a large size: µs a step, the time of a call of
  `--steps` steps over their number. Programs are compiled side by side, before any is timed;
- how many buffers change their address in many calls.

As in all benchmarks the ways have computed the same before they are timed, and take turns.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from results import Section, add_option, one_line, record
from stopwatch import Timing, in_turns, microseconds

sys.path.extend(str(Path(__file__).parent / folder) for folder in ("dispatch", "programs"))
import sizes
import ways
from calls import CALLS
from catalogue import SUITE
from eager import EAGER
from programs import Program
from way import BY_HAND, NATIVE, OURS, Row, Ways, keeps, measured, threads

import refs

PLAIN = "by hand"
NAMES = ("refs", "jax.Ref", PLAIN)  # of the ways of a program that are timed
LONG = 300_000  # µs: of a call so long there is one round

# -- Calls ----------------------------------------------------------------------------------------

LAYERS, WIDTH, RATE, MOMENTUM = 24, 256, 0.01, 0.9


def loss(weights: Sequence[Any], x: Any) -> Any:
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def train(state: Any, x: Any) -> None:
    weights, momenta = state
    gradients = jax.grad(loss)([w[...] for w in weights], x)
    for w, m, g in zip(weights, momenta, gradients, strict=True):
        m[...] = MOMENTUM * m[...] + g
        w[...] -= RATE * m[...]


def train_by_hand(state: Any, x: Any) -> Any:
    weights, momenta = state
    gradients = jax.grad(loss)(weights, x)
    momenta = [MOMENTUM * m + g for m, g in zip(momenta, gradients, strict=True)]
    return [w - RATE * m for w, m in zip(weights, momenta, strict=True)], momenta


def layers() -> tuple[list[jax.Array], list[jax.Array]]:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((LAYERS, WIDTH, WIDTH), np.float32) / WIDTH**0.5
    return [jnp.array(w) for w in weights], [jnp.zeros((WIDTH, WIDTH)) for _ in range(LAYERS)]


def training(**options: Any) -> Ways:
    """`options`: the compiler's."""
    inputs = [(jnp.array(np.random.default_rng(1).standard_normal((64, WIDTH), np.float32)),)]
    by_hand = jax.jit(train_by_hand, donate_argnums=0, compiler_options=options)
    found = {BY_HAND: threads(by_hand, layers(), inputs)}
    for name, m in ((NATIVE, jax), (OURS, refs)):
        held = jax.tree.map(m.new_ref, layers())
        found[name] = keeps(m.jit(train, compiler_options=options), held, inputs)
    return found


def packed() -> Ways:
    by_hand = jax.jit(sizes.add_one_by_hand, donate_argnums=0)

    def add_one(state: Any) -> None:  # another function: one in both jits would have two programs
        sizes.add_one(state)

    return {
        BY_HAND: threads(by_hand, sizes.flat(200)),
        OURS: keeps(refs.jit(sizes.add_one), [*map(refs.new_ref, sizes.flat(200))]),
        "refs.pack": keeps(refs.jit(add_one), refs.pack(sizes.flat(200))),
    }


NETWORK = f"training step, {LAYERS} layers"
OF_A_GPU = [
    Row("200 refs in a list, packed", packed),
    Row(NETWORK, training),
    Row(
        f"{NETWORK}, no command buffers",
        functools.partial(training, xla_gpu_graph_min_graph_size=2**20),
    ),
]


# -- Programs -------------------------------------------------------------------------------------


def prepared(program: Program, n: int, steps: int) -> dict[str, Callable[[], Any]]:
    """A call of each way, compiled and checked."""
    found = ways.checked(program, n, steps, NAMES)
    _, args = ways.inputs(program, n, steps)
    return {name: found[name].on(args) for name in NAMES}


def steps_of(ready: dict[str, Callable[[], Any]], steps: int, rounds: int) -> dict[str, Timing]:
    """Microseconds a step."""
    measures = [functools.partial(microseconds, call, 1) for call in ready.values()]
    turns = [1 if measure() > LONG else rounds for measure in measures]
    found = in_turns(measures, turns)
    return {name: time / steps for name, time in zip(ready, found, strict=True)}


def loops(
    programs: Sequence[Program], small: int, large: int, steps: int, rounds: int
) -> dict[str, Section]:
    """By the number of elements; and the copies in loops."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = {
            n: {p.title: pool.submit(prepared, p, n, steps) for p in programs}
            for n in (small, large)
        }
        copies = {p.title: pool.submit(ways.copies, p, large, steps, NAMES) for p in programs}
    found = {}
    for n, ready in jobs.items():
        print(f"{n:,} elements …", file=sys.stderr, flush=True)
        rows = {title: steps_of(job.result(), steps, rounds) for title, job in ready.items()}
        found[str(n)] = Section("µs a step", rows, PLAIN)
    counts = {
        title: {name: Timing(in_loops) for name, (in_loops, _) in job.result().items()}
        for title, job in copies.items()
    }
    return {**found, "copies": Section("copies", counts)}


# -- Addresses ------------------------------------------------------------------------------------


def moved(calls: int) -> Section:
    """How many buffers are somewhere else after so many calls, or have been at any time."""
    held, box = jax.tree.map(refs.new_ref, layers()), [layers()]
    ours = refs.jit(train)
    by_hand = jax.jit(train_by_hand, donate_argnums=0)
    x = jnp.ones((64, WIDTH))
    one = refs.new_ref(jnp.zeros(10**6))

    def once() -> None:
        box[0] = by_hand(box[0], x)

    def eagerly() -> None:
        one[3] = 1.0
        one[5:10] += 1.0
        refs.addupdate(one, ..., 1.0)

    def count(call: Callable[[], Any], state: Callable[[], Any]) -> Timing:
        first = addresses(state())
        seen = [set() for _ in first]
        for _ in range(calls):
            call()
            for mine, address in zip(seen, addresses(state()), strict=True):
                mine.add(address)
        return Timing(sum(mine != {a} for mine, a in zip(seen, first, strict=True)))

    rows = {
        f"{NETWORK}, {2 * LAYERS} buffers": {
            "refs": count(lambda: ours(held, x), lambda: held),
            PLAIN: count(once, lambda: box[0]),
        },
        "three eager operations on one ref": {"refs": count(eagerly, lambda: one)},
    }
    return Section("buffers that moved", rows)


def addresses(state: Any) -> list[int]:
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]


# -- All of it ------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs=2, default=(10**5, 10**7), metavar="N")
    parser.add_argument("--steps", type=int, default=200, metavar="K")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument(
        "--watched", type=int, default=1000, metavar="N", help="calls in which buffers could move"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=["", "calls"],
        metavar="TEXT",
        help="programs with TEXT in the title; or `calls`, for the calls",
    )
    add_option(parser)
    options = parser.parse_args(arguments)
    programs = [p for p in SUITE if any(text in p.title for text in options.only)]
    if not programs:
        parser.error(f"no program has {' or '.join(map(repr, options.only))} in its title")
    found = loops(programs, *options.sizes, options.steps, options.rounds)
    if "calls" in options.only:
        found["calls"] = measured("calls", [*sizes.SIZES, *OF_A_GPU, *CALLS], options.rounds)
        found["eager"] = measured("eager", EAGER, options.rounds)
        found["moved"] = moved(options.watched)
    for title, section in found.items():
        print(f"\n{title}, {section.unit} (jax {jax.__version__}, {jax.default_backend()})")
        for row, times in section.rows.items():
            print(f"{row:40}", *(f"{one_line(w)} {t.median:.4g} " for w, t in times.items()))
    record("gpu", found, options)


if __name__ == "__main__":
    main()
