"""JAX's own chains of ref transforms: bitcasts, and indices one after another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs

MATRIX = np.arange(8, dtype=np.float32).reshape(4, 2)


def run(program, x):
    """The result and the state of a program over one of JAX's refs, discharged by us."""
    pure = refs.discharge(jax.make_jaxpr(program)(jax.new_ref(x)))
    return jax.core.eval_jaxpr(pure.jaxpr, pure.consts, x)


def test_a_bitcast():
    def program(r):
        bits = r.bitcast(jnp.int32)
        seen = jax.ref.get(bits, (1, slice(None)))
        jax.ref.set(bits, (0, 1), jnp.int32(0x40400000))
        jax.ref.addupdate(bits, (2, 0), jnp.int32(1 << 23))  # twice as much
        return seen

    seen, state = run(program, MATRIX)
    np.testing.assert_array_equal(seen, MATRIX.view(np.int32)[1])
    want = MATRIX.copy()
    want[0, 1], want[2, 0] = 3.0, 8.0
    np.testing.assert_array_equal(state, want)


def test_a_bitcast_of_a_ref_of_ours():
    r = refs.new_ref(MATRIX)
    refs.jit(lambda r: jax.ref.set(r.bitcast(jnp.int32), (0, 0), jnp.int32(0x40400000)))(r)
    assert float(r[0, 0]) == 3
    seen = refs.jit(lambda r: jax.ref.get(r.bitcast(jnp.int32), (Ellipsis,)))(r)
    np.testing.assert_array_equal(seen, np.asarray(r).view(np.int32))


def test_a_bitcast_in_loops_lanes_and_derivatives():
    def halve(row, x):
        def step(i, y):
            row.bitcast(jnp.int32)[0, i] -= 1 << 23  # half as much
            return y * row[0, i]

        return jax.lax.fori_loop(0, 2, step, x)

    rows = refs.new_ref(MATRIX[:, None] + 1)
    seen = refs.jit(refs.vmap(halve, in_axes=(0, None)))(rows, 3.0)
    np.testing.assert_array_equal(rows[:, 0], (MATRIX + 1) / 2)
    np.testing.assert_array_equal(seen, 3 * np.prod((MATRIX + 1) / 2, axis=1))
    gradient = refs.grad(lambda x: halve(refs.new_ref(MATRIX[3:]), x))
    assert gradient(1.0) == MATRIX[3].prod() / 4


@pytest.mark.parametrize("dtype, ratio", [(np.int16, 2), (np.float32, 1)])
def test_a_bitcast_to_another_width(dtype, ratio):
    def program(r):
        part = r.bitcast(dtype)
        seen = jax.ref.get(part, (slice(None),))
        jax.ref.set(part, (slice(None),), seen[::-1])
        return seen

    seen, state = run(program, MATRIX)
    assert seen.shape == (4 * ratio, 2)
    again, _ = run(lambda r: jax.ref.get(r.bitcast(dtype), (slice(None),)), np.asarray(state))
    np.testing.assert_array_equal(again, seen[::-1])


def test_an_element_that_the_outer_index_names_twice():
    def program(r):
        rows = r.at[np.array([2, 2])]
        jax.ref.set(rows.at[0], (0,), 50.0)
        jax.ref.addupdate(rows, (slice(None), 1), jnp.ones(2))
        return jax.ref.swap(r.at[np.array([3, 3])].at[0], (1,), 9.0)

    old, state = run(program, MATRIX)
    want = MATRIX.copy()
    want[2] = [50, MATRIX[2, 1] + 2]
    want[3, 1] = 9
    assert old == MATRIX[3, 1]
    np.testing.assert_array_equal(state, want)
