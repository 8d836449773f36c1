"""The suite's data structures: rings, trees, caches and sets in the cells of a large buffer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from programs import Arrays, Program, each, floats, fold, places

# -- Ring buffer of rows with a counter -----------------------------------------------------------

WIDTH = 16


def ring_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    rows = floats(n // WIDTH * WIDTH, rng).reshape(-1, WIDTH)
    return (rows, np.zeros(1, np.int32)), (floats(steps * WIDTH, rng).reshape(-1, WIDTH),)


def ring(r: Any, count: Any, *args: Any) -> None:
    def step(row: Any) -> None:
        r[count[0] % r.shape[0]] = row
        count[0] += 1

    each(args, step)


def ring_by_hand(r: Any, count: Any, *args: Any) -> Any:
    def step(state: Any, row: Any) -> Any:
        r, count = state
        return r.at[count[0] % r.shape[0]].set(row), count.at[0].add(1)

    return fold((r, count), args, step)


def ring_bound(r: Any, count: Any, rows: Any) -> None:
    for k in range(len(rows)):
        r[count[0] % len(r)] = rows[k]
        count[0] += 1


# -- Fenwick tree: add at a place, in log n cells -------------------------------------------------


def fenwick_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    return (floats(n, rng),), (places(n - 1, steps, rng) + 1, floats(steps, rng))


def fenwick(r: Any, *args: Any) -> None:
    def step(i: Any, x: Any) -> None:
        def climb(i: Any) -> Any:
            r[i] += x
            return i + (i & -i)

        lax.while_loop(lambda i: i < r.shape[0], climb, i)

    each(args, step)


def fenwick_by_hand(r: Any, *args: Any) -> Any:
    def step(r: Any, i: Any, x: Any) -> Any:
        def climb(s: Any) -> Any:
            i, r = s
            return i + (i & -i), r.at[i].add(x)

        return lax.while_loop(lambda s: s[0] < r.shape[0], climb, (i, r))[1]

    return fold(r, args, step)


def fenwick_bound(r: Any, where: Any, values: Any) -> None:
    for k in range(len(where)):
        i = where[k]
        while i < len(r):
            r[i] += values[k]
            i += i & -i


# -- Floyd–Warshall, a row a step -----------------------------------------------------------------


def floyd_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    side = int(n**0.5)
    d = floats(side * side, rng).reshape(side, side)
    return (d,), (places(side, steps, rng), places(side, steps, rng))


def floyd(r: Any, *args: Any) -> None:
    def step(i: Any, k: Any) -> None:
        r[i] = jnp.minimum(r[i], r[i, k] + r[k])

    each(args, step)


def floyd_by_hand(r: Any, *args: Any) -> Any:
    return fold(r, args, lambda r, i, k: r.at[i].set(jnp.minimum(r[i], r[i, k] + r[k])))


def floyd_bound(r: Any, rows: Any, over: Any) -> None:
    for s in range(len(rows)):
        i, k = rows[s], over[s]
        via = r[i, k]
        for j in range(r.shape[1]):
            r[i, j] = min(r[i, j], via + r[k, j])


# -- Union-find, with path halving ----------------------------------------------------------------


def union_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    return (np.arange(n, dtype=np.int32),), (places(n, steps, rng), places(n, steps, rng))


def union(r: Any, *args: Any) -> None:
    def find(x: Any) -> Any:
        def halve(x: Any) -> Any:
            r[x] = r[r[x]]
            return r[x]

        return lax.while_loop(lambda x: r[x] != x, halve, x)

    def step(a: Any, b: Any) -> None:
        r[find(a)] = find(b)

    each(args, step)


def union_by_hand(r: Any, *args: Any) -> Any:
    def find(r: Any, x: Any) -> Any:
        def halve(s: Any) -> Any:
            r, x = s
            r = r.at[x].set(r[r[x]])
            return r, r[x]

        return lax.while_loop(lambda s: s[0][s[1]] != s[1], halve, (r, x))

    def step(r: Any, a: Any, b: Any) -> Any:
        r, b = find(r, b)
        r, a = find(r, a)
        return r.at[a].set(b)

    return fold(r, args, step)


def union_bound(r: Any, lefts: Any, rights: Any) -> None:
    for k in range(len(lefts)):
        b = rights[k]
        while r[b] != b:
            r[b] = r[r[b]]
            b = r[b]
        a = lefts[k]
        while r[a] != a:
            r[a] = r[r[a]]
            a = r[a]
        r[a] = b


# -- KV-cache decode, attending to a window -------------------------------------------------------

WINDOW = 32


def decode_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    rows = n // WIDTH
    keys, values = (floats(rows * WIDTH, rng).reshape(rows, WIDTH) for _ in range(2))
    at = places(rows - WINDOW, steps, rng)
    return (keys, values), (at, floats(steps * WIDTH, rng).reshape(steps, WIDTH))


def attend(keys: Any, values: Any, query: Any) -> Any:
    return jax.nn.softmax(keys @ query / WIDTH**0.5) @ values


def decode(keys: Any, values: Any, *args: Any) -> None:
    def step(t: Any, x: Any) -> None:
        y = attend(keys[pl.ds(t, WINDOW)], values[pl.ds(t, WINDOW)], x)
        keys[t + WINDOW] = jnp.tanh(x + y)
        values[t + WINDOW] = x - y

    each(args, step)


def decode_by_hand(keys: Any, values: Any, *args: Any) -> Any:
    def step(state: Any, t: Any, x: Any) -> Any:
        keys, values = state
        seen = (lax.dynamic_slice_in_dim(c, t, WINDOW) for c in state)
        y = attend(*seen, x)
        return keys.at[t + WINDOW].set(jnp.tanh(x + y)), values.at[t + WINDOW].set(x - y)

    return fold((keys, values), args, step)


def decode_bound(keys: Any, values: Any, at: Any, xs: Any) -> None:
    for s in range(len(at)):
        t, x = at[s], xs[s]
        logits = keys[t : t + WINDOW] @ x / np.float32(WIDTH**0.5)
        weights = np.exp(logits - logits.max())
        y = (weights / weights.sum()) @ values[t : t + WINDOW]
        keys[t + WINDOW] = np.tanh(x + y)
        values[t + WINDOW] = x - y


# -- Prioritised replay: a sum tree ---------------------------------------------------------------


def replay_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    leaves = 1 << (n // 2).bit_length() - 1
    tree = np.zeros(2 * leaves, np.float32)
    tree[leaves:] = rng.integers(1, 8, leaves)
    for i in range(leaves - 1, 0, -1):
        tree[i] = tree[2 * i] + tree[2 * i + 1]
    return (tree,), (floats(steps, rng), rng.integers(1, 8, steps).astype(np.float32))


def drawn(tree: Any, u: Any) -> Any:
    """The leaf that a number in [0, 1) falls on; `tree` is a ref or an array."""

    def descend(s: Any) -> Any:
        i, mass = s
        left = tree[2 * i]
        goes_left = mass < left
        return jnp.where(goes_left, 2 * i, 2 * i + 1), jnp.where(goes_left, mass, mass - left)

    leaves = tree.shape[0] // 2
    return lax.while_loop(lambda s: s[0] < leaves, descend, (jnp.int32(1), u * tree[1]))[0]


def replay(r: Any, *args: Any) -> None:
    def step(u: Any, priority: Any) -> None:
        i = drawn(r, u)
        change = priority - r[i]

        def climb(i: Any) -> Any:
            r[i] += change
            return i // 2

        lax.while_loop(lambda i: i > 0, climb, i)

    each(args, step)


def replay_by_hand(r: Any, *args: Any) -> Any:
    def step(r: Any, u: Any, priority: Any) -> Any:
        i = drawn(r, u)
        change = priority - r[i]

        def climb(s: Any) -> Any:
            return s[0] // 2, s[1].at[s[0]].add(change)

        return lax.while_loop(lambda s: s[0] > 0, climb, (i, r))[1]

    return fold(r, args, step)


def replay_bound(r: Any, draws: Any, priorities: Any) -> None:
    leaves = len(r) // 2
    for k in range(len(draws)):
        i, mass = 1, draws[k] * r[1]
        while i < leaves:
            i = 2 * i
            if mass >= r[i]:
                mass -= r[i]
                i += 1
        change = priorities[k] - r[i]
        while i > 0:
            r[i] += change
            i //= 2


STRUCTURES = [
    Program("ring buffer of rows", ring_inputs, ring, ring_by_hand, ring_bound),
    Program("Fenwick tree", fenwick_inputs, fenwick, fenwick_by_hand, fenwick_bound),
    Program("Floyd–Warshall, a row", floyd_inputs, floyd, floyd_by_hand, floyd_bound),
    Program("union-find", union_inputs, union, union_by_hand, union_bound),
    Program("KV-cache decode", decode_inputs, decode, decode_by_hand, decode_bound),
    Program("prioritised replay", replay_inputs, replay, replay_by_hand, replay_bound),
]
