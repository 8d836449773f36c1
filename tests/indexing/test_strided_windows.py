"""`jax.ds(start, size, stride)`: a slice with a step that starts where the program says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs.testing import assert_in_place

X = np.arange(7.0, dtype=np.float32)
# Moved into bounds as a whole, as `lax.dynamic_slice` moves a window: the places of three elements.
STARTS = {0: [0, 2, 4], 1: [1, 3, 5], 2: [2, 4, 6], 5: [2, 4, 6], 9: [2, 4, 6], -1: [2, 4, 6],
          -6: [1, 3, 5], -9: [0, 2, 4]}  # fmt: skip
V = np.float32([10, 20, 30])

RUNS = {
    "eager": lambda f, r, k: f(r, k),
    "eager with an array": lambda f, r, k: f(r, jnp.int32(k)),
    "jit": lambda f, r, k: refs.jit(f)(r, k),
    "static in jit": lambda f, r, k: refs.jit(lambda r: f(r, k))(r),
    "op by op": lambda f, r, k: refs.grad(lambda x: f(r, k).sum() + x)(1.0) * 0 + r[STARTS[k]],
}


@pytest.mark.parametrize("k", STARTS)
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_reads_and_updates(run, k):
    r, want, places = refs.new_ref(X), X.copy(), STARTS[k]

    def step(r, k):
        r[jax.ds(k, 3, 2)] = V
        r[jax.ds(k, 3, 2)] += V
        r.at[jax.ds(k, 3, 2)].multiply(2)
        r.at[jax.ds(k, 3, 2)].at[::-1].add(V)
        r.at[::-1].at[::-1].at[jax.ds(k, 3, 2)].max(90)
        return r[jax.ds(k, 3, 2)]

    want[places] = np.maximum(V * 4 + V[::-1], 90)
    np.testing.assert_array_equal(run(step, r, k), want[places])
    np.testing.assert_array_equal(r[...], want)


@pytest.mark.parametrize("run", [refs.vmap, lambda f: refs.jit(refs.vmap(f))], ids=["vmap", "jit"])
def test_lanes(run):
    total, rows, starts = refs.new_ref(jnp.zeros(7)), refs.new_ref(jnp.zeros((3, 7))), [0, 2, 9]

    def lane(row, k):
        total[jax.ds(k, 3, 2)] += V
        row[jax.ds(k, 3, 2)] = V
        return total.size + row[jax.ds(k, 2, 4)]

    got = run(lane)(rows, jnp.array(starts))
    want, of_all = np.zeros((3, 7), np.float32), np.zeros(7, np.float32)
    for row, k in zip(want, starts, strict=True):
        row[STARTS[k]] = V
        of_all[STARTS[k]] += V
    np.testing.assert_array_equal(rows[...], want)
    np.testing.assert_array_equal(total[...], of_all)
    np.testing.assert_array_equal(got, 7 + want[[[0], [1], [2]], [[0, 4], [2, 6], [2, 6]]])


@pytest.mark.parametrize("jit", [lambda f: f, refs.jit], ids=["op by op", "jit"])
@pytest.mark.parametrize("k", [1, 9])
def test_gradients(jit, k):
    def f(x, k):
        r = refs.new_ref(x)
        r[jax.ds(k, 3, 2)] *= V
        r.at[jax.ds(0, 3, 3)].add(x[:3])
        return r[jax.ds(k - 1, 4, 2)].sum()

    def pure(x):
        y = x.at[np.array(STARTS[k])].multiply(V).at[np.array([0, 3, 6])].add(x[:3])
        return y[np.array([0, 2, 4, 6])].sum()

    x = jnp.linspace(1.0, 2.0, 7)
    np.testing.assert_allclose(jit(refs.grad(f))(x, k), jax.grad(pure)(x), rtol=1e-6)


@pytest.mark.as_released
def test_it_works_in_place():
    r = refs.new_ref(jnp.zeros(100_000))

    def step(k):
        r[jax.ds(k, 100, 3)] += 1
        return r[jax.ds(k, 10, 2)]

    assert_in_place(refs.jit(step), 5)


def test_a_window_of_one_element_has_no_stride():
    r = refs.new_ref(X)
    assert r[jax.ds(6, 1, 5)] == 6
    assert r[jax.ds(0, 0, 9)].shape == (0,)
