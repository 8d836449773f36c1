"""Index arrays whose contents are known: `r[i] += x` adds to each element once, and accumulates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from refs.errors import RefValueError

X = np.array([1.0, 2.0, 4.0], np.float32)

DISTINCT = {
    "mask": np.array([True, False, True, False]),
    "JAX's mask": jnp.array([True, False, True, False]),
    "list": [2, 1],
    "negative": np.array([-1, 0]),
    "two-dimensional": np.array([[0, 1], [3, 2]]),
    "JAX's array": jnp.array([3, 0]),
    "new axis": (np.array([0, 1]), None),
    "empty": np.zeros(0, np.int32),
    "int64": np.array([1, 3], np.int64),
}


@pytest.mark.parametrize("index", DISTINCT.values(), ids=DISTINCT)
@pytest.mark.parametrize("loop", [False, True])
def test_lanes_accumulate(index, loop):
    r = refs.new_ref(jnp.zeros(4))

    def lane(x):
        def body(i, c):
            r[index] += x
            r[index] -= 3 * x
            return c

        lax.fori_loop(0, 2, body, 0) if loop else body(0, 0)

    refs.jit(refs.vmap(lane))(X)
    want = np.zeros(4)
    want[jax.tree.map(np.asarray, index)] -= 2 * X.sum() * (2 if loop else 1)
    np.testing.assert_array_equal(r[...], want)


def test_several_axes_together():
    r = refs.new_ref(jnp.zeros((3, 4)))
    rows, columns = np.array([0, 0, 2]), np.array([1, 2, 1])

    def lane(x, i):
        r[rows, columns] += x
        r[:, [3, 0]] += x
        r[i, [1, 3]] += x

    refs.vmap(lane)(X, jnp.arange(3))
    want = np.zeros((3, 4))
    for i, x in enumerate(X):
        want[rows, columns] += x
        want[:, [3, 0]] += x
        want[i, [1, 3]] += x
    np.testing.assert_array_equal(r[...], want)


def test_its_derivative():
    r = refs.new_ref(jnp.zeros(4))

    def loss(xs):
        def lane(x):
            r[[2, 1]] += x**2

        refs.vmap(lane)(xs)
        return r[1] * 3

    np.testing.assert_array_equal(refs.grad(loss)(X), 6 * X)


@pytest.mark.parametrize(
    "index", [[0, 0], np.array([3, -1]), np.array([[0, 1], [1, 2]]), (np.array([0, 0]), None)]
)
def test_constants_that_name_an_element_twice(index):
    r = refs.new_ref(jnp.zeros(4))

    def lane(x):
        r[index] += x

    with pytest.raises(RefValueError, match=r"ref\.at\[i\]\.add\(…\)"):
        refs.vmap(lane)(X)


def test_an_index_that_is_computed_twice_in_many_steps():
    """Each step uses the last one's result twice: there are 2⁶⁰ ways down, and 60 steps."""

    def hashed(i):
        for k in range(60):
            i = (i * (k + 1)) ^ i
        return i & 3

    r = refs.new_ref(jnp.zeros(4))

    def step(i):
        r[hashed(i)] = r[hashed(i)] + 1.0

    refs.jit(step)(jnp.int32(7))
    assert r[...].sum() == 1.0


@pytest.mark.parametrize("start", [14, -3, 99, -99, 5])
@pytest.mark.parametrize("size", [1, 4])
def test_a_block_at_a_constant_is_moved_as_one_at_a_variable(start, size):
    def both(r, start):
        r.at[jax.ds(start, size)].add(100)
        return r[jax.ds(start, size)]

    found = []
    for program in (
        lambda r: both(r, jnp.int32(start)),
        refs.jit(lambda r: both(r, jnp.int32(start))),
        refs.jit(jax.jit(lambda r: both(r, jnp.int32(start)))),
        lambda r: refs.jit(both)(r, jnp.int32(start)),
    ):
        r = refs.new_ref(jnp.arange(16))
        found.append([np.array(program(r)), np.array(r)])
    for value, ref in found[1:]:
        np.testing.assert_array_equal(value, found[0][0])
        np.testing.assert_array_equal(ref, found[0][1])
