"""A training state of millions of numbers that never moves, at a cost that doesn't see its size.

A step of temporal-difference learning changes one value of a table. Over refs that costs the same
for a table of a million states as for one of a thousand, because the compiled step works in the
table's own memory: each ref keeps its address. A function that returns a new table copies it.

The method is TD(0): R. S. Sutton, "Learning to predict by the methods of temporal differences",
Machine Learning 3 (1988). The walk goes around a ring of states, with a reward at state 0.
"""

import time

import _gallery
import jax
import jax.numpy as jnp
import numpy as np

import refs

RATE, DISCOUNT = 0.1, 0.9


def learner(n):
    """A table of n states in refs, and the step that updates it."""
    state = {"values": jnp.zeros(n), "visits": jnp.zeros(n, jnp.int32), "at": jnp.int32(0)}
    state = refs.tree.new_ref(state)
    values, visits, at = state["values"], state["visits"], state["at"]

    @refs.jit
    def step(move):
        here = at[...]
        there = (here + move) % n
        target = jnp.where(there == 0, 1.0, 0.0) + DISCOUNT * values[there]
        values[here] += RATE * (target - values[here])
        visits[here] += 1
        at[...] = there

    return state, step


@jax.jit
def functional_step(values, visits, here, move):
    there = (here + move) % len(values)
    target = jnp.where(there == 0, 1.0, 0.0) + DISCOUNT * values[there]
    values = values.at[here].add(RATE * (target - values[here]))
    return values, visits.at[here].add(1), there


def with_numpy(n, moves):
    values, visits, here = np.zeros(n, np.float32), np.zeros(n, np.int32), 0
    for move in moves:
        there = (here + move) % n
        target = float(there == 0) + DISCOUNT * values[there]
        values[here] += RATE * (target - values[here])
        visits[here] += 1
        here = there
    return values, visits


def microseconds(step, moves, state):
    """The time of a step: the best of three rounds."""
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        for move in moves:
            step(move)
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - began)
    return 1e6 * min(seconds) / len(moves)


def main(sizes=(1_000, 10_000, 100_000, 1_000_000), steps=2000):
    moves = [*np.random.default_rng(0).choice(np.array([-1, 1], np.int32), steps)]
    times = []
    for n in sizes:
        state, step = learner(n)
        pointers = [r.unsafe_buffer_pointer() for r in jax.tree.leaves(state)]
        for move in moves:
            step(move)
        assert [r.unsafe_buffer_pointer() for r in jax.tree.leaves(state)] == pointers
        values, visits = with_numpy(n, moves)
        np.testing.assert_allclose(state["values"][...], values, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(state["visits"][...], visits)

        arrays = [jnp.zeros(n), jnp.zeros(n, jnp.int32), jnp.int32(0)]

        def copying(move, arrays=arrays):
            arrays[:] = functional_step(*arrays, move)

        in_place = microseconds(step, moves, state)
        functional = microseconds(copying, moves[:200], arrays)
        print(f"{n:9,} states: {in_place:4.0f} µs a step in place, {functional:5.0f} copying")
        times.append((in_place, functional))
    return sizes, times


def draw(axes, result):
    sizes, times = result
    in_place, copying = zip(*times, strict=True)
    axes.loglog(sizes, copying, "o-", label="functional: copies", color="#e69f00")
    axes.loglog(sizes, in_place, "o-", label="refs: in place", color="#0072b2")
    axes.set(xlabel="states in the table", ylabel="µs a step", ylim=(1, None))
    axes.legend()


if __name__ == "__main__":
    _gallery.run(main, draw)
