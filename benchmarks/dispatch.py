"""What a call costs: `refs.jit` against a hand-donated jit and native `jax.Ref`.

    python benchmarks/dispatch.py [--rounds N]

The step adds one to each of N small arrays, so that nearly all of the time is the call itself.
The three are interleaved in one process, in rounds; a figure is the median of the rounds, a ratio
is the ratio of the medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import refs


def by_hand(n: int) -> Callable[[], None]:
    step = jax.jit(lambda state: [x + 1 for x in state], donate_argnums=0)
    state = [jnp.zeros(16) for _ in range(n)]

    def call() -> None:
        nonlocal state
        state = step(state)

    return call


def native(n: int) -> Callable[[], None]:
    state = [jax.new_ref(jnp.zeros(16)) for _ in range(n)]
    step = jax.jit(add_one)
    return lambda: step(state)


def ours(n: int) -> Callable[[], None]:
    state = [refs.new_ref(jnp.zeros(16)) for _ in range(n)]
    step = refs.jit(add_one)
    return lambda: step(state)


def add_one(state: list[jax.Ref]) -> None:
    for r in state:
        r[...] += 1


def eager_ours() -> Callable[[], None]:
    r = refs.new_ref(jnp.zeros(16))
    return lambda: r.__setitem__(3, 2.0)


def eager_native() -> Callable[[], None]:
    r = jax.new_ref(jnp.zeros(16))
    return lambda: r.__setitem__(3, 2.0)


def eager_by_hand() -> Callable[[], None]:
    write = jax.jit(lambda x, i, v: x.at[i].set(v), donate_argnums=0)
    x = jnp.zeros(16)

    def call() -> None:
        nonlocal x
        x = write(x, 3, 2.0)

    return call


def microseconds(call: Callable[[], None], repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat * 1e6


def medians(calls: list[Callable[[], None]], rounds: int, repeat: int) -> list[float]:
    for call in calls:
        call()
    times = [[microseconds(call, repeat) for call in calls] for _ in range(rounds)]
    return [median(column) for column in zip(*times, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    rounds = parser.parse_args().rounds

    table = Table(title=f"µs a call, and x of the hand-donated jit (jax {jax.__version__}, CPU)")
    table.add_column("step")
    for name in ("hand-donated jit", "jax.Ref", "refs"):
        table.add_column(name, justify="right")
    for n in (1, 20, 200):
        row = medians([by_hand(n), native(n), ours(n)], rounds, max(20, 2000 // n))
        table.add_row(f"jit over {n} refs", *(f"{t:.1f} ({t / row[0]:.2f}x)" for t in row))
    row = medians([eager_by_hand(), eager_native(), eager_ours()], rounds, 500)
    table.add_row("eager r[3] = 2", *(f"{t:.1f} ({t / row[0]:.2f}x)" for t in row))
    Console().print(table)


if __name__ == "__main__":
    main()
