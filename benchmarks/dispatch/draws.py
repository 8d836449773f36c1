"""Draws of a random generator: `refs.random.stateful_rng`, against JAX's, and a key and counter.

By hand, a draw is a jit of `jax.random.fold_in(key, n)`, the distribution and `n + 1`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.random
import jax.numpy as jnp
from way import BY_HAND, NATIVE, OURS, Row, Way, Ways, arrays, keeps, threads, threads_and_returns

import refs


def draws(title: str, draw: Callable[[Any], Any], by_hand: Callable[[Any], Any]) -> Row:
    """`draw(generator)` at top level; `by_hand(key)` gives the same numbers."""

    @jax.jit
    def counted(state: Any) -> Any:
        key, n = state
        return (key, n + 1), by_hand(jax.random.fold_in(key, n))

    def ways() -> Ways:
        native, ours = jax.experimental.random.stateful_rng(0), refs.random.stateful_rng(0)
        own = threads_and_returns(counted, (jax.random.key(0), jnp.uint32(0)))
        return {
            BY_HAND: Way(own.call, lambda: own.held()[1]),
            NATIVE: keeps(lambda _: draw(native), ()),
            OURS: keeps(lambda _: draw(ours), ()),
        }

    return Row(title, ways)


def a_walk() -> Ways:
    """A step of a compiled function that draws and writes."""

    def by_hand(state: Any) -> Any:
        x, key, n = state
        return x + jax.random.normal(jax.random.fold_in(key, n), (16,)), key, n + 1

    def over(m: Any, stateful_rng: Any) -> Way:
        rng = stateful_rng(0)

        @m.jit
        def step(x: Any, rng: Any) -> None:
            x[...] += rng.normal(size=16)

        return keeps(lambda x: step(x, rng), m.new_ref(start()))

    def start() -> jax.Array:
        return arrays(1)[0]

    own = threads(jax.jit(by_hand, donate_argnums=0), (start(), jax.random.key(0), jnp.uint32(0)))
    return {
        BY_HAND: Way(own.call, lambda: own.held()[0][0]),
        NATIVE: over(jax, jax.experimental.random.stateful_rng),
        OURS: over(refs, refs.random.stateful_rng),
    }


DRAWS = [
    draws(
        "rng.normal(size=16)",
        lambda rng: rng.normal(size=16),
        lambda key: jax.random.normal(key, (16,)),
    ),
    draws(
        "rng.integers(6)",
        lambda rng: rng.integers(6),
        lambda key: jax.random.randint(key, (), 0, 6),
    ),
    Row("jit: x[...] += rng.normal(size=16)", a_walk),
]
