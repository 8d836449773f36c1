"""The suite: small programs whose step touches a few cells of a large buffer.

Each is written three times: over refs (for `refs` and for JAX's own, whose syntax is the same), by
hand as a pure function of its state, and as a loop over plain memory, which is the bound.

A program's state is what it updates, in the order of its parameters; `args` are arrays that it only
reads, one entry (or row) for each step. The loops over memory know nothing of JAX: numba compiles
them where it is installed, otherwise they are Python over NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Program:
    """One program of the suite.

    Attributes:
      title: what it does.
      inputs: (number of elements, steps, generator) -> (state, args).
      over_refs: (refs, args) -> None.
      by_hand: (state, args) -> new state.
      bound: (state, args) -> None, in NumPy arrays.
      over_native: the same for `jax.Ref`, where it isn't `over_refs` itself.
    """

    title: str
    inputs: Callable[[int, int, np.random.Generator], tuple[Arrays, Arrays]]
    over_refs: Callable[..., None]
    by_hand: Callable[..., Any]
    bound: Callable[..., None]
    over_native: Callable[..., None] | None = None


def each(args: Arrays, step: Callable[..., None]) -> None:
    """A step for each entry of the arguments, over refs."""
    lax.fori_loop(0, len(args[0]), lambda k, _: step(*(a[k] for a in args)), None)


def fold(state: Any, args: Arrays, step: Callable[..., Any]) -> Any:
    """A step for each entry of the arguments, by hand."""
    return lax.fori_loop(0, len(args[0]), lambda k, s: step(s, *(a[k] for a in args)), state)


def floats(n: int, rng: np.random.Generator) -> np.ndarray:
    return rng.random(n, dtype=np.float32)


def places(n: int, steps: int, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, n, steps, dtype=np.int32)


# -- Write one ------------------------------------------------------------------------------------


def write_one_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    return (floats(n, rng),), (places(n, steps, rng), floats(steps, rng))


def write_one(r: Any, *args: Any) -> None:
    def step(i: Any, x: Any) -> None:
        r[i] = x

    each(args, step)


def write_one_by_hand(r: Any, *args: Any) -> Any:
    return fold(r, args, lambda r, i, x: r.at[i].set(x))


def write_one_bound(r: Any, where: Any, values: Any) -> None:
    for k in range(len(where)):
        r[where[k]] = values[k]


# -- Swap neighbours ------------------------------------------------------------------------------


def swap_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    return (floats(n, rng),), (places(n - 1, steps, rng),)


def swap(r: Any, *args: Any) -> None:
    def step(i: Any) -> None:
        r[i], r[i + 1] = r[i + 1], r[i]

    each(args, step)


def swap_by_hand(r: Any, *args: Any) -> Any:
    def step(r: Any, i: Any) -> Any:
        left, right = r[i], r[i + 1]
        return r.at[i].set(right).at[i + 1].set(left)

    return fold(r, args, step)


def swap_bound(r: Any, where: Any) -> None:
    for k in range(len(where)):
        i = where[k]
        left = r[i]
        r[i] = r[i + 1]
        r[i + 1] = left


# -- Read elsewhere, then write -------------------------------------------------------------------


def elsewhere_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    return (floats(n, rng),), (places(n, steps, rng), places(n, steps, rng))


def elsewhere(r: Any, *args: Any) -> None:
    def step(i: Any, j: Any) -> None:
        r[i] = jnp.sin(r[j])

    each(args, step)


def elsewhere_by_hand(r: Any, *args: Any) -> Any:
    return fold(r, args, lambda r, i, j: r.at[i].set(jnp.sin(r[j])))


def elsewhere_bound(r: Any, to: Any, source: Any) -> None:
    for k in range(len(to)):
        r[to[k]] = np.sin(r[source[k]])


# -- Conditional write ----------------------------------------------------------------------------


def conditional(r: Any, *args: Any) -> None:
    def step(i: Any, j: Any) -> None:
        def write() -> None:
            r[i] = r[j] * 0.5

        lax.cond(r[j] > 0.5, write, lambda: None)

    each(args, step)


def conditional_by_hand(r: Any, *args: Any) -> Any:
    def step(r: Any, i: Any, j: Any) -> Any:
        return lax.cond(r[j] > 0.5, lambda r: r.at[i].set(r[j] * 0.5), lambda r: r, r)

    return fold(r, args, step)


def conditional_bound(r: Any, to: Any, source: Any) -> None:
    for k in range(len(to)):
        if r[source[k]] > 0.5:
            r[to[k]] = r[source[k]] * np.float32(0.5)


# -- Write in both branches -----------------------------------------------------------------------


def both(r: Any, *args: Any) -> None:
    def step(i: Any, j: Any) -> None:
        def left() -> None:
            r[i] = r[j] * 0.5

        def right() -> None:
            r[j] = r[i] + 0.25

        lax.cond(r[j] > r[i], left, right)

    each(args, step)


def both_by_hand(r: Any, *args: Any) -> Any:
    def step(r: Any, i: Any, j: Any) -> Any:
        return lax.cond(
            r[j] > r[i],
            lambda r: r.at[i].set(r[j] * 0.5),
            lambda r: r.at[j].set(r[i] + 0.25),
            r,
        )

    return fold(r, args, step)


def both_bound(r: Any, to: Any, source: Any) -> None:
    for k in range(len(to)):
        i, j = to[k], source[k]
        if r[j] > r[i]:
            r[i] = r[j] * np.float32(0.5)
        else:
            r[j] = r[i] + np.float32(0.25)


# -- Sorting network ------------------------------------------------------------------------------


def network(r: Any, *args: Any) -> None:
    def step(i: Any, j: Any) -> None:
        a, b = r[i], r[j]
        r[i] = jnp.minimum(a, b)
        r[j] = jnp.maximum(a, b)

    each(args, step)


def network_by_hand(r: Any, *args: Any) -> Any:
    def step(r: Any, i: Any, j: Any) -> Any:
        a, b = r[i], r[j]
        return r.at[i].set(jnp.minimum(a, b)).at[j].set(jnp.maximum(a, b))

    return fold(r, args, step)


def network_bound(r: Any, lower: Any, upper: Any) -> None:
    for k in range(len(lower)):
        a, b = r[lower[k]], r[upper[k]]
        r[lower[k]] = min(a, b)
        r[upper[k]] = max(a, b)


FORWARD = [
    Program("write one", write_one_inputs, write_one, write_one_by_hand, write_one_bound),
    Program("swap neighbours", swap_inputs, swap, swap_by_hand, swap_bound),
    Program(
        "read elsewhere, write", elsewhere_inputs, elsewhere, elsewhere_by_hand, elsewhere_bound
    ),
    Program(
        "conditional write", elsewhere_inputs, conditional, conditional_by_hand, conditional_bound
    ),
    Program("write in both branches", elsewhere_inputs, both, both_by_hand, both_bound),
    Program("sorting network", elsewhere_inputs, network, network_by_hand, network_bound),
]
