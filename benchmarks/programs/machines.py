"""The suite's machines: an interpreter with its memory, a sort and a sandpile with their stacks."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from programs import Arrays, Program, each, fold, places

# -- Interpreter: a program in arrays works on a memory -------------------------------------------

LIMIT = 2**16  # of the numbers that it adds


def code_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    """State: the memory, and the place in the code. Args: operation and operands, one a step."""
    state = places(min(n, LIMIT), n, rng), np.zeros(1, np.int32)
    return state, (places(5, steps, rng), *(places(n, steps, rng) for _ in range(3)))


def interpreter(m: Any, at: Any, *code: Any) -> None:
    def add(a: Any, b: Any, c: Any) -> None:
        m[a] = (m[b] + m[c]) % LIMIT

    def differ(a: Any, b: Any, c: Any) -> None:
        m[a] = m[b] ^ m[c]

    def load(a: Any, b: Any, c: Any) -> None:
        m[a] = m[(m[b] + c) % m.shape[0]]

    def store(a: Any, b: Any, c: Any) -> None:
        m[(m[a] + c) % m.shape[0]] = m[b]

    def skip(a: Any, b: Any, c: Any) -> None:
        at[0] += (m[a] < m[b]).astype(np.int32)

    def step(*_: Any) -> None:
        operation, *operands = (x[at[0] % len(x)] for x in code)
        lax.switch(operation, [add, differ, load, store, skip], *operands)
        at[0] = (at[0] + 1) % len(code[0])

    each(code, step)


def interpreter_by_hand(m: Any, at: Any, *code: Any) -> Any:
    def add(m: Any, at: Any, a: Any, b: Any, c: Any) -> Any:
        return m.at[a].set((m[b] + m[c]) % LIMIT), at

    def differ(m: Any, at: Any, a: Any, b: Any, c: Any) -> Any:
        return m.at[a].set(m[b] ^ m[c]), at

    def load(m: Any, at: Any, a: Any, b: Any, c: Any) -> Any:
        return m.at[a].set(m[(m[b] + c) % m.shape[0]]), at

    def store(m: Any, at: Any, a: Any, b: Any, c: Any) -> Any:
        return m.at[(m[a] + c) % m.shape[0]].set(m[b]), at

    def skip(m: Any, at: Any, a: Any, b: Any, c: Any) -> Any:
        return m, at.at[0].add((m[a] < m[b]).astype(np.int32))

    def step(state: Any, *_: Any) -> Any:
        operation, *operands = (x[state[1][0] % len(x)] for x in code)
        m, at = lax.switch(operation, [add, differ, load, store, skip], *state, *operands)
        return m, at.at[0].set((at[0] + 1) % len(code[0]))

    return fold((m, at), code, step)


def interpreter_bound(m: Any, at: Any, operations: Any, xs: Any, ys: Any, zs: Any) -> None:
    for _ in range(len(operations)):
        k = at[0] % len(operations)
        operation, a, b, c = operations[k], xs[k], ys[k], zs[k]
        if operation == 0:
            m[a] = (m[b] + m[c]) % LIMIT
        elif operation == 1:
            m[a] = m[b] ^ m[c]
        elif operation == 2:
            m[a] = m[(m[b] + c) % len(m)]
        elif operation == 3:
            m[(m[a] + c) % len(m)] = m[b]
        elif m[a] < m[b]:
            at[0] += 1
        at[0] = (at[0] + 1) % len(operations)


# -- Quicksort of a block, with a stack of ranges -------------------------------------------------

BLOCK = 32


def sort_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    """By numbers with some bits flipped: others in each step, so that no block is sorted."""
    state = places(2**30, n, rng), np.zeros((BLOCK // 2, 2), np.int32)
    return state, (places(n // BLOCK, steps, rng) * BLOCK, places(2**30, steps, rng))


def quicksort(r: Any, stack: Any, *args: Any) -> None:
    def step(first: Any, mask: Any) -> None:
        def split(depth: Any) -> Any:
            low, high = stack[depth - 1]
            pivot = r[high] ^ mask

            def partition(i: Any, end: Any) -> Any:
                def swap() -> Any:
                    r[i], r[end] = r[end], r[i]
                    return end + 1

                return lax.cond(r[i] ^ mask < pivot, swap, lambda: end)

            middle = lax.fori_loop(low, high, partition, low)
            r[middle], r[high] = r[high], r[middle]
            depth -= 1
            for a, b in (low, middle - 1), (middle + 1, high):
                stack[depth] = jnp.array([a, b])
                depth += (a < b).astype(np.int32)
            return depth

        stack[0] = jnp.array([first, first + BLOCK - 1])
        lax.while_loop(lambda depth: depth > 0, split, jnp.int32(1))

    each(args, step)


def quicksort_by_hand(r: Any, stack: Any, *args: Any) -> Any:
    def step(state: Any, first: Any, mask: Any) -> Any:
        def split(s: Any) -> Any:
            r, stack, depth = s
            low, high = stack[depth - 1]
            pivot = r[high] ^ mask

            def partition(i: Any, s: Any) -> Any:
                def swap(r: Any, end: Any) -> Any:
                    left, right = r[end], r[i]
                    return r.at[i].set(left).at[end].set(right), end + 1

                return lax.cond(s[0][i] ^ mask < pivot, swap, lambda *s: s, *s)

            r, middle = lax.fori_loop(low, high, partition, (r, low))
            left, right = r[middle], r[high]
            r = r.at[middle].set(right).at[high].set(left)
            depth -= 1
            for a, b in (low, middle - 1), (middle + 1, high):
                stack = stack.at[depth].set(jnp.array([a, b]))
                depth += (a < b).astype(np.int32)
            return r, stack, depth

        stack = state[1].at[0].set(jnp.array([first, first + BLOCK - 1]))
        return lax.while_loop(lambda s: s[2] > 0, split, (state[0], stack, jnp.int32(1)))[:2]

    return fold((r, stack), args, step)


def quicksort_bound(r: Any, stack: Any, starts: Any, masks: Any) -> None:
    for k in range(len(starts)):
        mask = masks[k]
        stack[0, 0], stack[0, 1] = starts[k], starts[k] + BLOCK - 1
        depth = 1
        while depth > 0:
            low, high = stack[depth - 1]
            pivot, middle = r[high] ^ mask, low
            for i in range(low, high):
                if r[i] ^ mask < pivot:
                    r[i], r[middle] = r[middle], r[i]
                    middle += 1
            r[middle], r[high] = r[high], r[middle]
            depth -= 1
            stack[depth, 0], stack[depth, 1] = low, middle - 1
            depth += low < middle - 1
            stack[depth, 0], stack[depth, 1] = middle + 1, high
            depth += middle + 1 < high


# -- Sandpile: a grain falls, and a stack holds the cells that are to topple ----------------------

HEIGHT = 5  # One grain is lost when a cell topples, so that avalanches end.


def sandpile_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    return (places(HEIGHT, n, rng), np.zeros(n, np.int32)), (places(n, steps, rng),)


def neighbours(cell: Any, cells: int) -> list[Any]:
    """In rows, the last cell of each beside the first of the next one."""
    return [(cell + step) % cells for step in (1, -1, int(cells**0.5), -int(cells**0.5))]


def sandpile(grains: Any, stack: Any, *args: Any) -> None:
    def drop(cell: Any, depth: Any) -> Any:
        grains[cell] += 1
        stack[depth] = cell
        return depth + (grains[cell] == HEIGHT).astype(np.int32)

    def topple(depth: Any) -> Any:
        depth -= 1
        cell = stack[depth]
        grains[cell] -= HEIGHT
        for neighbour in neighbours(cell, grains.shape[0]):
            depth = drop(neighbour, depth)
        return depth

    def step(cell: Any) -> None:
        lax.while_loop(lambda depth: depth > 0, topple, drop(cell, 0))

    each(args, step)


def sandpile_by_hand(grains: Any, stack: Any, *args: Any) -> Any:
    def drop(grains: Any, stack: Any, depth: Any, cell: Any) -> Any:
        grains = grains.at[cell].add(1)
        stack = stack.at[depth].set(cell)
        return grains, stack, depth + (grains[cell] == HEIGHT).astype(np.int32)

    def topple(state: Any) -> Any:
        grains, stack, depth = state
        cell = stack[depth - 1]
        state = grains.at[cell].add(-HEIGHT), stack, depth - 1
        for neighbour in neighbours(cell, grains.shape[0]):
            state = drop(*state, neighbour)
        return state

    def step(state: Any, cell: Any) -> Any:
        return lax.while_loop(lambda s: s[2] > 0, topple, drop(*state, 0, cell))[:2]

    return fold((grains, stack), args, step)


def sandpile_bound(grains: Any, stack: Any, where: Any) -> None:
    cells = len(grains)
    side = int(cells**0.5)
    for start in where:
        grains[start] += 1
        stack[0], depth = start, int(grains[start] == HEIGHT)
        while depth > 0:
            depth -= 1
            cell = stack[depth]
            grains[cell] -= HEIGHT
            for step in (1, -1, side, -side):
                neighbour = (cell + step) % cells
                grains[neighbour] += 1
                stack[depth] = neighbour
                depth += grains[neighbour] == HEIGHT


MACHINES = [
    Program("interpreter", code_inputs, interpreter, interpreter_by_hand, interpreter_bound),
    Program("quicksort of a block", sort_inputs, quicksort, quicksort_by_hand, quicksort_bound),
    Program("sandpile", sandpile_inputs, sandpile, sandpile_by_hand, sandpile_bound),
]
