"""The suite's linked lists: two arrays of places, what comes after each node and what before it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax
from programs import Arrays, Program, each, fold, places

import refs


def unlink(after: Any, before: Any, node: Any) -> None:
    left, right = before[node], after[node]
    after[left] = right
    before[right] = left


def insert(after: Any, before: Any, node: Any, left: Any) -> None:
    right = after[left]
    after[left], after[node] = node, right
    before[right], before[node] = node, left


def unlinked(after: Any, before: Any, node: Any) -> Any:
    left, right = before[node], after[node]
    return after.at[left].set(right), before.at[right].set(left)


def inserted(after: Any, before: Any, node: Any, left: Any) -> Any:
    right = after[left]
    return (
        after.at[left].set(node).at[node].set(right),
        before.at[right].set(node).at[node].set(left),
    )


def shuffled_ring(n: int, rng: Any) -> Arrays:
    """`after` and `before` of all nodes, in a random order."""
    order = rng.permutation(n).astype(np.int32)
    after, before = np.empty_like(order), np.empty_like(order)
    after[order], before[order] = np.roll(order, -1), np.roll(order, 1)
    return after, before


# -- Doubly linked list: move a node to behind another one ----------------------------------------


def list_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    nodes = places(n, steps, rng)
    return shuffled_ring(n, rng), (nodes, (nodes + 1 + places(n - 1, steps, rng)) % n)


def move(after: Any, before: Any, *args: Any) -> None:
    def step(node: Any, left: Any) -> None:
        unlink(after, before, node)
        insert(after, before, node, left)

    each(args, step)


def move_by_hand(after: Any, before: Any, *args: Any) -> Any:
    def step(state: Any, node: Any, left: Any) -> Any:
        return inserted(*unlinked(*state, node), node, left)

    return fold((after, before), args, step)


def move_bound(after: Any, before: Any, nodes: Any, lefts: Any) -> None:
    for k in range(len(nodes)):
        node, left = nodes[k], lefts[k]
        after[before[node]] = after[node]
        before[after[node]] = before[node]
        right = after[left]
        after[left] = before[right] = node
        after[node], before[node] = right, left


# -- The same in lanes, a list each ---------------------------------------------------------------

LANES = 4


def lists_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    lanes = [list_inputs(n // LANES, steps, rng) for _ in range(LANES)]
    (after, before), (nodes, lefts) = (
        [np.stack(arrays) for arrays in zip(*group, strict=True)]
        for group in zip(*lanes, strict=True)
    )
    return (after, before), (nodes, lefts)


def moves_by_hand(*arrays: Any) -> Any:
    return jax.vmap(move_by_hand)(*arrays)


def moves_bound(after: Any, before: Any, nodes: Any, lefts: Any) -> None:
    for lane in range(len(nodes)):
        for k in range(nodes.shape[1]):
            node, left = nodes[lane, k], lefts[lane, k]
            after[lane, before[lane, node]] = after[lane, node]
            before[lane, after[lane, node]] = before[lane, node]
            right = after[lane, left]
            after[lane, left] = before[lane, right] = node
            after[lane, node], before[lane, node] = right, left


# -- LRU cache: a table from keys to slots, and a list of slots by recency ------------------------


def lru_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    """A full cache of n / 2 slots for n keys. The list has one more node, its ends."""
    slots = n // 2
    slot_of = np.full(n, -1, np.int32)
    slot_of[:slots] = key_of = np.arange(slots, dtype=np.int32)
    after, before = shuffled_ring(slots + 1, rng)
    hits = np.zeros(1, np.int32)
    return (slot_of, key_of.copy(), after, before, hits), (places(n, steps, rng),)


def lru(slot_of: Any, key_of: Any, after: Any, before: Any, hits: Any, *args: Any) -> None:
    ends = key_of.shape[0]

    def step(key: Any) -> None:
        def hit() -> Any:
            hits[0] += 1
            return slot_of[key]

        def miss() -> Any:
            oldest = before[ends]
            slot_of[key_of[oldest]] = -1
            slot_of[key], key_of[oldest] = oldest, key
            return oldest

        slot = lax.cond(slot_of[key] >= 0, hit, miss)
        unlink(after, before, slot)
        insert(after, before, slot, ends)

    each(args, step)


def lru_by_hand(slot_of: Any, key_of: Any, *state: Any) -> Any:
    *state, keys = state
    ends = key_of.shape[0]

    def step(state: Any, key: Any) -> Any:
        slot_of, key_of, after, before, hits = state

        def hit(slot_of: Any, key_of: Any, hits: Any) -> Any:
            return slot_of, key_of, hits.at[0].add(1), slot_of[key]

        def miss(slot_of: Any, key_of: Any, hits: Any) -> Any:
            oldest = before[ends]
            slot_of = slot_of.at[key_of[oldest]].set(-1).at[key].set(oldest)
            return slot_of, key_of.at[oldest].set(key), hits, oldest

        slot_of, key_of, hits, slot = lax.cond(slot_of[key] >= 0, hit, miss, slot_of, key_of, hits)
        after, before = inserted(*unlinked(after, before, slot), slot, ends)
        return slot_of, key_of, after, before, hits

    return fold((slot_of, key_of, *state), (keys,), step)


def lru_bound(slot_of: Any, key_of: Any, after: Any, before: Any, hits: Any, keys: Any) -> None:
    ends = len(key_of)
    for key in keys:
        slot = slot_of[key]
        if slot >= 0:
            hits[0] += 1
        else:
            slot = before[ends]
            slot_of[key_of[slot]] = -1
            slot_of[key], key_of[slot] = slot, key
        after[before[slot]] = after[slot]
        before[after[slot]] = before[slot]
        right = after[ends]
        after[ends] = before[right] = slot
        after[slot], before[slot] = right, ends


LISTS = [
    Program("linked list", list_inputs, move, move_by_hand, move_bound),
    Program(
        "linked lists in lanes",
        lists_inputs,
        refs.vmap(move),
        moves_by_hand,
        moves_bound,
        jax.vmap(move),
    ),
    Program("LRU cache", lru_inputs, lru, lru_by_hand, lru_bound),
]
