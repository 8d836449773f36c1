"""The suite's programs with branches that touch the state: a memo, and trees in lanes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from programs import Arrays, Program, each, floats, fold, places

import refs

# -- A memo: read what is there, or compute and store it ------------------------------------------


def memo_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    table = np.where(rng.random(n) < 0.5, 0, floats(n, rng))
    return (table.astype(np.float32), np.zeros(1, np.float32)), (places(n, steps, rng),)


def value(k: Any) -> Any:
    return 1.0 + k % 7 * 0.25


def memo(r: Any, total: Any, *args: Any) -> None:
    def step(k: Any) -> None:
        def miss() -> Any:
            r[k] = value(k)
            return value(k)

        total[0] += lax.cond(r[k] > 0, lambda: r[k], miss)

    each(args, step)


def memo_by_hand(r: Any, total: Any, *args: Any) -> Any:
    def step(state: Any, k: Any) -> Any:
        r, total = state
        found, r = lax.cond(
            r[k] > 0, lambda r: (r[k], r), lambda r: (value(k), r.at[k].set(value(k))), r
        )
        return r, total.at[0].add(found)

    return fold((r, total), args, step)


def memo_bound(r: Any, total: Any, keys: Any) -> None:
    for k in keys:
        if not r[k] > 0:
            r[k] = np.float32(1.0 + k % 7 * 0.25)
        total[0] += r[k]


# -- Trees in lanes: add to a range, ask for an element -------------------------------------------

LANES = 4


def trees_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    size = 2 ** int(np.log2(n // LANES // 2))
    trees = floats(LANES * 2 * size, rng).reshape(LANES, 2 * size)
    first = places(size // 2, LANES * steps, rng).reshape(LANES, steps)
    last = first + places(size // 2, LANES * steps, rng).reshape(LANES, steps)
    return (trees, np.zeros((LANES, 1), np.float32)), (first, last)


def add_if(t: Any, k: Any, flag: Any) -> None:
    def add() -> None:
        t[k] += 0.5

    lax.cond(flag, add, lambda: None)


def add_masked(t: Any, k: Any, flag: Any) -> None:
    """For `jax.Ref`: in `jax.vmap`, its branches can't touch a ref."""
    t[k] += 0.5 * flag


def trees(t: Any, total: Any, *args: Any, add: Callable[..., None] = add_if) -> None:
    size = t.shape[0] // 2

    def step(first: Any, last: Any) -> None:
        def climb(ends: Any) -> Any:
            first, last = ends
            add(t, first, first % 2 == 1)
            add(t, last - 1, last % 2 == 1)
            return (first + 1) // 2, last // 2

        lax.while_loop(lambda ends: ends[0] < ends[1], climb, (first + size, last + size))
        total[0] += lax.while_loop(
            lambda s: s[0] > 0, lambda s: (s[0] // 2, s[1] + t[s[0]]), (last + size, 0.0)
        )[1]

    each(args, step)


def trees_by_hand(t: Any, total: Any, *args: Any) -> Any:
    def one(t: Any, total: Any, *args: Any) -> Any:
        size = t.shape[0] // 2

        def step(state: Any, first: Any, last: Any) -> Any:
            t, total = state

            def climb(s: Any) -> Any:
                first, last, t = s
                t = lax.cond(first % 2 == 1, lambda t: t.at[first].add(0.5), lambda t: t, t)
                t = lax.cond(last % 2 == 1, lambda t: t.at[last - 1].add(0.5), lambda t: t, t)
                return (first + 1) // 2, last // 2, t

            t = lax.while_loop(lambda s: s[0] < s[1], climb, (first + size, last + size, t))[2]
            found = lax.while_loop(
                lambda s: s[0] > 0, lambda s: (s[0] // 2, s[1] + t[s[0]]), (last + size, 0.0)
            )[1]
            return t, total.at[0].add(found)

        return fold((t, total), args, step)

    return jax.vmap(one)(t, total, *args)


def trees_bound(t: Any, total: Any, first: Any, last: Any) -> None:
    size = t.shape[1] // 2
    for lane in range(t.shape[0]):
        for k in range(first.shape[1]):
            a, b = first[lane, k] + size, last[lane, k] + size
            p = b
            while a < b:
                if a % 2 == 1:
                    t[lane, a] += np.float32(0.5)
                if b % 2 == 1:
                    t[lane, b - 1] += np.float32(0.5)
                a, b = (a + 1) // 2, b // 2
            found = np.float32(0)
            while p > 0:
                found += t[lane, p]
                p //= 2
            total[lane, 0] += found


BRANCHES = [
    Program("memo", memo_inputs, memo, memo_by_hand, memo_bound),
    Program(
        "trees in lanes",
        trees_inputs,
        refs.vmap(trees),
        trees_by_hand,
        trees_bound,
        jax.vmap(partial(trees, add=add_masked)),
    ),
]
