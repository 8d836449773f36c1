"""A derivative outside of `jit`, operation by operation: `refs.grad` against `jax.grad`.

    python benchmarks/derivatives.py [--rounds N]

The programs are small, so that what is measured is Python: what `refs.grad` adds to each operation.
The control is `jax.grad` of the same function with its state passed in and out by hand. The columns
take turns in one process; a figure is the median of the rounds, a ratio that of the medians.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.table import Table
from stopwatch import medians

import refs

X = jnp.ones((8, 8))
W = jnp.eye(8)


def layers(w: Any, x: Any) -> Any:
    for _ in range(10):
        x = jnp.tanh(x @ w)
    return x


def ref_free() -> tuple[Callable[[], Any], Callable[[], Any]]:
    def loss(w: Any) -> Any:
        return layers(w, X).sum()

    return lambda: jax.grad(loss)(W), lambda: refs.grad(loss)(W)


def with_a_mean() -> tuple[Callable[[], Any], Callable[[], Any]]:
    state, mean = jnp.zeros(8), refs.new_ref(jnp.zeros(8))

    def by_hand(w: Any, state: Any) -> Any:
        y = layers(w, X)
        state = 0.9 * state + 0.1 * y.mean(0)
        return (y - state).sum(), state

    def over_ref(w: Any) -> Any:
        y = layers(w, X)
        mean[...] = 0.9 * mean[...] + 0.1 * y.mean(0)
        return (y - mean[...]).sum()

    def call() -> Any:
        nonlocal state
        gradient, state = jax.grad(by_hand, has_aux=True)(W, state)
        return gradient

    return call, lambda: refs.grad(over_ref)(W)


def with_a_branch() -> tuple[Callable[[], Any], Callable[[], Any]]:
    state, calls = jnp.int32(0), refs.new_ref(jnp.int32(0))

    def by_hand(w: Any, state: Any) -> Any:
        y = layers(w, X)
        return (y.sum() if state % 2 == 0 and y[0, 0] > 0 else (y * y).sum()), state + 1

    def over_ref(w: Any) -> Any:
        y = layers(w, X)
        loss = y.sum() if calls[...] % 2 == 0 and y[0, 0] > 0 else (y * y).sum()
        calls[...] += 1
        return loss

    def call() -> Any:
        nonlocal state
        gradient, state = jax.grad(by_hand, has_aux=True)(W, state)
        return gradient

    return call, lambda: refs.grad(over_ref)(W)


def with_a_loop() -> tuple[Callable[[], Any], Callable[[], Any]]:
    state, log = jnp.zeros(100), refs.new_ref(jnp.zeros(100))

    def by_hand_step(carry: Any, k: Any) -> Any:
        y, state = carry
        y = jnp.sin(y) + y
        return (y, state.at[k].set(y)), None

    def by_hand(x: Any, state: Any) -> Any:
        (y, state), _ = lax.scan(by_hand_step, (x, state), jnp.arange(100))
        return y, state

    def step(y: Any, k: Any) -> Any:
        y = jnp.sin(y) + y
        log[k] = y
        return y, None

    def over_ref(x: Any) -> Any:
        return refs.scan(step, x, jnp.arange(100))[0]

    def call() -> Any:
        nonlocal state
        gradient, state = jax.grad(by_hand, has_aux=True)(0.1, state)
        return gradient

    return call, lambda: refs.grad(over_ref)(0.1)


PROGRAMS = {
    "10 layers": ref_free,
    "10 layers and a running mean": with_a_mean,
    "10 layers, and a branch on a counter": with_a_branch,
    "a scan of 100 steps that writes a log": with_a_loop,
}


def table(rounds: int, repeat: int = 5) -> Table:
    table = Table(
        title=f"A gradient outside of jit: ms a call (jax {jax.__version__}, "
        f"{jax.default_backend()})"
    )
    for title in ("program", "jax.grad, state by hand", "refs.grad", "ratio"):
        table.add_column(title, justify="left" if title == "program" else "right")
    for title, make in PROGRAMS.items():
        ways = [lambda way=way: jax.block_until_ready(way()) for way in make()]
        for _ in range(2):
            np.testing.assert_allclose(ways[0](), ways[1](), rtol=1e-5)
        by_hand, ours = medians(ways, rounds, repeat)
        table.add_row(title, f"{by_hand / 1e3:.2f}", f"{ours / 1e3:.2f}", f"{ours / by_hand:.2f}x")
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    Console(width=110).print(table(parser.parse_args().rounds))
