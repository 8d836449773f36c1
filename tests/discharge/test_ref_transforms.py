"""JAX's own chains of ref transforms: indices one after another."""

import jax
import jax.numpy as jnp
import numpy as np

import refs

MATRIX = np.arange(8, dtype=np.float32).reshape(4, 2)


def run(program, x):
    """The result and the state of a program over one of JAX's refs, discharged by us."""
    pure = refs.discharge(jax.make_jaxpr(program)(jax.new_ref(x)))
    return jax.core.eval_jaxpr(pure.jaxpr, pure.consts, x)


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
