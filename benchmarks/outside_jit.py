"""What derivatives, operation by operation, and loops cost outside of `jit`.

    python benchmarks/outside_jit.py [--rounds N]

The programs are small, so that the figures show Python's time: what `refs` adds to each operation.
The control is JAX's own function with the state passed in and out by hand. The columns take turns
in one process; a figure is the median of the rounds, a ratio that of the medians.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from results import Section, add_option, record
from rich.console import Console
from rich.table import Table
from stopwatch import medians

import refs

BY_HAND, OURS = "jax, state by hand", "refs"
X = jnp.ones((8, 8))
W = jnp.eye(8)
Ways = tuple[Callable[[], Any], Callable[[], Any]]


def threaded(fun: Callable[..., Any], x: Any, state: Any) -> Callable[[], Any]:
    """Calls of `fun(x, state) -> (result, state)`, each with the state of the previous call."""

    def call() -> Any:
        nonlocal state
        result, state = fun(x, state)
        return result

    return call


def derivatives(by_hand: Any, state: Any, over_ref: Any, x: Any = W, jit: bool = False) -> Ways:
    if jit:
        by_hand, over_ref = jax.jit(by_hand), refs.jit(over_ref)
    gradient = refs.grad(over_ref)
    return threaded(jax.grad(by_hand, has_aux=True), x, state), lambda: gradient(x)


def layers(w: Any, x: Any) -> Any:
    for _ in range(10):
        x = jnp.tanh(x @ w)
    return x


def ref_free() -> Ways:
    def loss(w: Any) -> Any:
        return layers(w, X).sum()

    return lambda: jax.grad(loss)(W), lambda: refs.grad(loss)(W)


def with_a_mean(jit: bool = False) -> Ways:
    mean = refs.new_ref(jnp.zeros(8))

    def by_hand(w: Any, state: Any) -> Any:
        y = layers(w, X)
        state = 0.9 * state + 0.1 * y.mean(0)
        return (y - state).sum(), state

    def over_ref(w: Any) -> Any:
        y = layers(w, X)
        mean[...] = 0.9 * mean[...] + 0.1 * y.mean(0)
        return (y - mean[...]).sum()

    return derivatives(by_hand, jnp.zeros(8), over_ref, jit=jit)


def with_a_branch() -> Ways:
    calls = refs.new_ref(jnp.int32(0))

    def by_hand(w: Any, state: Any) -> Any:
        y = layers(w, X)
        return (y.sum() if state % 2 == 0 and y[0, 0] > 0 else (y * y).sum()), state + 1

    def over_ref(w: Any) -> Any:
        y = layers(w, X)
        loss = y.sum() if calls[...] % 2 == 0 and y[0, 0] > 0 else (y * y).sum()
        calls[...] += 1
        return loss

    return derivatives(by_hand, jnp.int32(0), over_ref)


def scans() -> tuple[Callable[..., Any], Callable[..., Any]]:
    log = refs.new_ref(jnp.zeros(100))

    def by_hand_step(carry: Any, k: Any) -> Any:
        y, state = carry
        y = jnp.sin(y) + y
        return (y, state.at[k].set(y)), None

    def step(y: Any, k: Any) -> Any:
        y = jnp.sin(y) + y
        log[k] = y
        return y, None

    return (
        lambda x, state: lax.scan(by_hand_step, (x, state), jnp.arange(100))[0],
        lambda x: refs.scan(step, x, jnp.arange(100))[0],
    )


def with_a_loop() -> Ways:
    by_hand, over_ref = scans()
    return derivatives(by_hand, jnp.zeros(100), over_ref, jnp.float32(0.1))


def a_loop() -> Ways:
    by_hand, over_ref = scans()
    x = jnp.float32(0.1)
    return threaded(by_hand, x, jnp.zeros(100)), lambda: over_ref(x)


def a_branch() -> Ways:
    calls = refs.new_ref(jnp.int32(0))

    def double(x: Any) -> Any:
        calls[...] += 1
        return 2 * x

    def as_it_is(x: Any) -> Any:
        return x

    def double_by_hand(x: Any, n: Any) -> Any:
        return 2 * x, n + 1

    def both(x: Any, n: Any) -> Any:
        return x, n

    def by_hand(x: Any, state: Any) -> Any:
        return lax.cond(True, double_by_hand, both, x, state)

    return threaded(by_hand, W, jnp.int32(0)), lambda: refs.cond(True, double, as_it_is, W)


def lanes_of_a_jit() -> Ways:
    calls = refs.new_ref(jnp.int32(0))

    @jax.jit
    def by_hand(x: Any, n: Any) -> Any:
        return jnp.tanh(x @ W), n + 1

    @refs.jit
    def lane(x: Any) -> Any:
        calls[...] += 1
        return jnp.tanh(x @ W)

    def mapped(x: Any, state: Any) -> Any:
        y, n = jax.vmap(by_hand, (0, None))(x, state)
        return y, n[0] + len(x) - 1

    return threaded(mapped, X, jnp.int32(0)), lambda: refs.vmap(lane)(X)


PROGRAMS = {
    "gradient: 10 layers": ref_free,
    "gradient: 10 layers and a running mean": with_a_mean,
    "gradient: the same, which is a jit": lambda: with_a_mean(jit=True),
    "gradient: 10 layers, and a branch on a counter": with_a_branch,
    "gradient: a scan of 100 steps that writes a log": with_a_loop,
    "the same scan without a gradient": a_loop,
    "a cond that counts": a_branch,
    "lanes of a jit that counts": lanes_of_a_jit,
}


def measured(rounds: int, repeat: int = 5) -> Section:
    rows = {}
    for title, make in PROGRAMS.items():
        ways = [lambda way=way: jax.block_until_ready(way()) for way in make()]
        for _ in range(3):
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *[w() for w in ways]
            )
        by_hand, ours = medians(ways, rounds, repeat)
        rows[title] = {BY_HAND: by_hand / 1e3, OURS: ours / 1e3}
    return Section("ms a call", rows, BY_HAND)


def table(section: Section) -> Table:
    table = Table(
        title=f"Outside of jit: ms a call (jax {jax.__version__}, {jax.default_backend()})"
    )
    for title in ("program", BY_HAND, OURS, "ratio"):
        table.add_column(title, justify="left" if title == "program" else "right")
    for title, row in section.rows.items():
        by_hand, ours = (time.median for time in row.values())
        table.add_row(title, f"{by_hand:.2f}", f"{ours:.2f}", f"{ours / by_hand:.2f}x")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    add_option(parser)
    options = parser.parse_args()
    section = measured(options.rounds)
    Console(width=110).print(table(section))
    record("outside_jit", {"calls": section}, options)


if __name__ == "__main__":
    main()
