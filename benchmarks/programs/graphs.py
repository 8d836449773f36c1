"""The suite's graphs: a search in the order of distance, and a tree of light edges."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from programs import Arrays, Program, each, floats, fold, places

# -- Breadth-first search, from a new source whenever the queue is empty --------------------------

DEGREE = 4


def search_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    """State: which search has seen a node, the queue, and its head, its tail and the search."""
    state = np.zeros(n, np.int32), np.zeros(n, np.int32), np.zeros(3, np.int32)
    return state, (
        places(n * DEGREE, n * DEGREE, rng).reshape(n, DEGREE) % n,
        places(n, steps, rng),
    )


HEAD, TAIL, SEARCH = range(3)


def search(seen: Any, queue: Any, at: Any, neighbours: Any, *args: Any) -> None:
    def enqueue(node: Any) -> None:
        seen[node] = at[SEARCH]
        queue[at[TAIL]] = node
        at[TAIL] += 1

    def step(source: Any) -> None:
        def restart() -> None:
            at[...] = jnp.array([0, 0, 1]) * (at[SEARCH] + 1)
            enqueue(source)

        lax.cond(at[HEAD] == at[TAIL], restart, lambda: None)
        node = queue[at[HEAD]]
        at[HEAD] += 1

        def look(k: Any, _: Any) -> None:
            other = neighbours[node, k]
            lax.cond(seen[other] != at[SEARCH], lambda: enqueue(other), lambda: None)

        lax.fori_loop(0, DEGREE, look, None)

    each(args, step)


def search_by_hand(seen: Any, queue: Any, at: Any, neighbours: Any, *args: Any) -> Any:
    def enqueue(seen: Any, queue: Any, at: Any, node: Any) -> Any:
        seen = seen.at[node].set(at[SEARCH])
        return seen, queue.at[at[TAIL]].set(node), at.at[TAIL].add(1)

    def step(state: Any, source: Any) -> Any:
        def restart(seen: Any, queue: Any, at: Any) -> Any:
            return enqueue(seen, queue, jnp.array([0, 0, 1]) * (at[SEARCH] + 1), source)

        at = state[2]
        state = lax.cond(at[HEAD] == at[TAIL], restart, lambda *state: state, *state)
        seen, queue, at = state
        node = queue[at[HEAD]]

        def look(k: Any, state: Any) -> Any:
            other = neighbours[node, k]
            return lax.cond(
                state[0][other] != state[2][SEARCH],
                lambda *state: enqueue(*state, other),
                lambda *state: state,
                *state,
            )

        return lax.fori_loop(0, DEGREE, look, (seen, queue, at.at[HEAD].add(1)))

    return fold((seen, queue, at), args, step)


def search_bound(seen: Any, queue: Any, at: Any, neighbours: Any, sources: Any) -> None:
    for source in sources:
        if at[0] == at[1]:
            at[0], at[1], at[2] = 0, 1, at[2] + 1
            seen[source], queue[0] = at[2], source
        node = queue[at[0]]
        at[0] += 1
        for other in neighbours[node]:
            if seen[other] != at[2]:
                seen[other], queue[at[1]] = at[2], other
                at[1] += 1


# -- Kruskal: an edge a step, by weight, joins two trees or is left out ---------------------------


def kruskal_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    state = np.arange(n, dtype=np.int32), np.ones(n, np.int32), np.zeros(1, np.float32)
    ends = places(n, steps, rng), places(n, steps, rng)
    return state, (*ends, np.sort(floats(steps, rng)))


def kruskal(parent: Any, size: Any, total: Any, *args: Any) -> None:
    def find(x: Any) -> Any:
        def halve(x: Any) -> Any:
            parent[x] = parent[parent[x]]
            return parent[x]

        return lax.while_loop(lambda x: parent[x] != x, halve, x)

    def step(a: Any, b: Any, weight: Any) -> None:
        a, b = find(a), find(b)

        def join() -> None:
            swap = size[a] > size[b]
            small, large = jnp.where(swap, b, a), jnp.where(swap, a, b)
            parent[small] = large
            size[large] += size[small]
            total[0] += weight

        lax.cond(a != b, join, lambda: None)

    each(args, step)


def kruskal_by_hand(parent: Any, size: Any, total: Any, *args: Any) -> Any:
    def find(parent: Any, x: Any) -> Any:
        def halve(s: Any) -> Any:
            parent, x = s
            parent = parent.at[x].set(parent[parent[x]])
            return parent, parent[x]

        return lax.while_loop(lambda s: s[0][s[1]] != s[1], halve, (parent, x))

    def step(state: Any, a: Any, b: Any, weight: Any) -> Any:
        parent, size, total = state
        parent, a = find(parent, a)
        parent, b = find(parent, b)

        def join(parent: Any, size: Any, total: Any) -> Any:
            swap = size[a] > size[b]
            small, large = jnp.where(swap, b, a), jnp.where(swap, a, b)
            size = size.at[large].add(size[small])
            return parent.at[small].set(large), size, total.at[0].add(weight)

        return lax.cond(a != b, join, lambda *state: state, parent, size, total)

    return fold((parent, size, total), args, step)


def kruskal_bound(parent: Any, size: Any, total: Any, lefts: Any, rights: Any, by: Any) -> None:
    for k in range(len(lefts)):
        a, b = lefts[k], rights[k]
        while parent[a] != a:
            parent[a] = parent[parent[a]]
            a = parent[a]
        while parent[b] != b:
            parent[b] = parent[parent[b]]
            b = parent[b]
        if a != b:
            if size[a] > size[b]:
                a, b = b, a
            parent[a] = b
            size[b] += size[a]
            total[0] += by[k]


GRAPHS = [
    Program("breadth-first search", search_inputs, search, search_by_hand, search_bound),
    Program("Kruskal's tree", kruskal_inputs, kruskal, kruskal_by_hand, kruskal_bound),
]
