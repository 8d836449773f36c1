"""The suite's queues: a heap, and a wheel of timers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from programs import Arrays, Program, each, floats, fold, places

# -- Binary heap: take the least, put back something larger ---------------------------------------


def heap_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    """Cells 1 … n / 2 - 1 are the heap: a sorted array is one."""
    heap, size = np.zeros(n, np.float32), n // 2 - 1
    heap[1 : size + 1] = np.sort(floats(size, rng))
    return (heap, np.array([size], np.int32)), (floats(steps, rng),)


def smaller_child(heap: Any, size: Any, i: Any) -> Any:
    """`heap` is a ref or an array."""
    left = 2 * i
    return jnp.where((left < size) & (heap[left + 1] < heap[left]), left + 1, left)


def push(heap: Any, size: Any, x: Any) -> None:
    def rise(i: Any) -> Any:
        heap[i] = heap[i // 2]
        return i // 2

    size[0] += 1
    heap[lax.while_loop(lambda i: (i > 1) & (heap[i // 2] > x), rise, size[0])] = x


def pop(heap: Any, size: Any) -> Any:
    least, last = heap[1], heap[size[0]]
    size[0] -= 1
    left = size[0]

    def sinks(i: Any) -> Any:
        child = smaller_child(heap, left, i)
        return (child <= left) & (heap[child] < last)

    def sink(i: Any) -> Any:
        child = smaller_child(heap, left, i)
        heap[i] = heap[child]
        return child

    heap[lax.while_loop(sinks, sink, jnp.int32(1))] = last
    return least


def heap(r: Any, size: Any, *args: Any) -> None:
    each(args, lambda wait: push(r, size, pop(r, size) + wait))


def heap_by_hand(r: Any, size: Any, *args: Any) -> Any:
    def push(r: Any, size: Any, x: Any) -> Any:
        def rise(s: Any) -> Any:
            r, i = s
            return r.at[i].set(r[i // 2]), i // 2

        size = size.at[0].add(1)
        r, i = lax.while_loop(lambda s: (s[1] > 1) & (s[0][s[1] // 2] > x), rise, (r, size[0]))
        return r.at[i].set(x), size

    def pop(r: Any, size: Any) -> Any:
        least, last = r[1], r[size[0]]
        size = size.at[0].add(-1)

        def sinks(s: Any) -> Any:
            r, i = s
            child = smaller_child(r, size[0], i)
            return (child <= size[0]) & (r[child] < last)

        def sink(s: Any) -> Any:
            r, i = s
            child = smaller_child(r, size[0], i)
            return r.at[i].set(r[child]), child

        r, i = lax.while_loop(sinks, sink, (r, jnp.int32(1)))
        return r.at[i].set(last), size, least

    def step(state: Any, wait: Any) -> Any:
        *state, least = pop(*state)
        return push(*state, least + wait)

    return fold((r, size), args, step)


def heap_bound(r: Any, size: Any, waits: Any) -> None:
    for wait in waits:
        least, x = r[1], r[size[0]]
        size[0] -= 1
        i = 1
        while 2 * i <= size[0]:
            child = 2 * i
            if child < size[0] and r[child + 1] < r[child]:
                child += 1
            if r[child] >= x:
                break
            r[i] = r[child]
            i = child
        r[i] = x
        size[0] += 1
        x, i = least + wait, size[0]
        while i > 1 and r[i // 2] > x:
            r[i] = r[i // 2]
            i //= 2
        r[i] = x


# -- Wheel of timers: a list of events for each tick, put off when they are due -------------------


def wheel_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    ticks = n // 2
    first = rng.permutation(ticks).astype(np.int32)
    state = first, np.full(ticks, -1, np.int32), np.zeros(1, np.int32)
    return state, (places(ticks, steps, rng),)


def wheel(first: Any, after: Any, now: Any, *args: Any) -> None:
    ticks = first.shape[0]

    def step(delay: Any) -> None:
        t = now[0]
        due = first[t]
        first[t] = -1

        def put_off(event: Any) -> Any:
            later = (t + 1 + (delay + event) % (ticks - 1)) % ticks
            following = after[event]
            after[event], first[later] = first[later], event
            return following

        lax.while_loop(lambda event: event >= 0, put_off, due)
        now[0] = (t + 1) % ticks

    each(args, step)


def wheel_by_hand(first: Any, after: Any, now: Any, *args: Any) -> Any:
    ticks = first.shape[0]

    def step(state: Any, delay: Any) -> Any:
        first, after, now = state
        t = now[0]
        due = first[t]
        first = first.at[t].set(-1)

        def put_off(s: Any) -> Any:
            event, first, after = s
            later = (t + 1 + (delay + event) % (ticks - 1)) % ticks
            following = after[event]
            after = after.at[event].set(first[later])
            return following, first.at[later].set(event), after

        _, first, after = lax.while_loop(lambda s: s[0] >= 0, put_off, (due, first, after))
        return first, after, now.at[0].set((t + 1) % ticks)

    return fold((first, after, now), args, step)


def wheel_bound(first: Any, after: Any, now: Any, delays: Any) -> None:
    ticks = len(first)
    for delay in delays:
        t = now[0]
        event = first[t]
        first[t] = -1
        while event >= 0:
            later = (t + 1 + (delay + event) % (ticks - 1)) % ticks
            following = after[event]
            after[event], first[later] = first[later], event
            event = following
        now[0] = (t + 1) % ticks


QUEUES = [
    Program("binary heap", heap_inputs, heap, heap_by_hand, heap_bound),
    Program("wheel of timers", wheel_inputs, wheel, wheel_by_hand, wheel_bound),
]
