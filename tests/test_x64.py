"""With `jax_enable_x64`: 64-bit values and indices, in every way in which refs are used."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
import refs.testing
from tests.inplace.helpers import assert_in_place


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def eagerly(program, *args):
    return program(*args)


def compiled(program, *args):
    return refs.jit(program)(*args)


def in_jax_jit(program, *args):
    return jax.jit(program)(*args)


def in_a_loop(program, *args):
    def body(k, seen):
        return program(*args)

    shapes = jax.eval_shape(body, 0, None)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return refs.jit(lambda: lax.fori_loop(0, 1, body, zeros))()


ways = pytest.mark.parametrize("run", [eagerly, compiled, in_jax_jit, in_a_loop])


@ways
@pytest.mark.parametrize("types", [("int32", "int64"), ("uint8", "uint64"), ("int64", "int16")])
def test_indices_of_mixed_types(run, types):
    r = refs.new_ref(jnp.arange(12.0).reshape(3, 4))
    i, j = (jnp.asarray(1, t) for t in types)

    def program(i, j):
        seen = [r[i], r[i, j], r[jax.ds(i, 2)], r[jax.ds(j, 2), i], r[i, jax.ds(j, 2)], r[2, j]]
        r[i] = 1.0
        r[j, i] += 2.0
        r[0, jax.ds(j, 2)] = 4.0
        r.at[::-1].at[j].at[i + 1].add(8.0)
        r.at[jnp.array([0, 0], i.dtype), j].multiply(2.0)
        return seen

    x = np.arange(12.0).reshape(3, 4)
    want = [x[1], x[1, 1], x[1:3], x[1:3, 1], x[1, 1:3], x[2, 1]]
    want = [w.copy() for w in want]
    x[1] = 1
    x[1, 1] += 2
    x[0, 1:3] = 4
    x[1, 2] += 8
    x[0, 1] *= 4
    for got, w in zip(run(program, i, j), want, strict=True):
        assert got.dtype == np.float64
        np.testing.assert_array_equal(got, w)
    np.testing.assert_array_equal(r[...], x)


@pytest.mark.parametrize("run", [eagerly, compiled])
@pytest.mark.parametrize("far", [2**32, 2**62, -(2**40)])
def test_indices_beyond_32_bits(run, far):
    r = refs.new_ref(jnp.arange(5.0))

    def program(i):
        seen = [r[i], r[i[None]][0], r[jax.ds(i, 1)][0], r.at[i].get(mode="fill")]
        r[i] = 9.0
        r.at[i[None]].add(9.0)
        return jnp.stack(seen)

    nearest = 4 if far > 0 else 0
    seen = run(program, jnp.int64(far))
    np.testing.assert_array_equal(seen, [nearest, nearest, nearest, np.nan])
    assert r[...].tolist() == [0, 1, 2, 3, 4]
    r[np.array([far, 1])] = 7.0
    assert r[...].tolist() == [0, 7, 2, 3, 4]


def test_derivatives():
    r = refs.new_ref(jnp.arange(4.0))

    def loss(x, i):
        r[i] = x**2
        lax.fori_loop(0, 3, lambda k, c: (r.at[k].add(x * r[k + 1]), c)[1], 0)
        return (r[...] * jnp.arange(4.0)).sum()

    def pure(x, i):
        y = jnp.arange(4.0).at[i].set(x**2)
        for k in range(3):
            y = y.at[k].add(x * y[k + 1])
        return (y * jnp.arange(4.0)).sum()

    got = refs.value_and_grad(loss)(1.5, jnp.int32(2))
    want = jax.value_and_grad(pure)(1.5, jnp.int32(2))
    assert all(g.dtype == np.float64 for g in got)
    np.testing.assert_allclose(got, want, rtol=1e-15)
    tangent = refs.new_ref(jnp.ones(4))
    refs.jvp(lambda x, r: loss(x, 1), (2.0, refs.new_ref(jnp.zeros(4))), (1.0, tangent))


def test_lanes():
    total, own = refs.new_ref(jnp.zeros(4)), refs.new_ref(jnp.zeros((3, 4), jnp.int64))

    @refs.jit
    @refs.vmap
    def lane(own, i, x):
        total.at[jax.ds(i, 2)].add(x)
        total[[0, 3]] += 1
        own[i] += 2**40
        lax.while_loop(lambda k: k < i, lambda k: (own.at[k].add(1), k + 1)[1], 0)

    lane(own, jnp.array([0, 2, 5], jnp.uint8), jnp.array([0.5, 0.25, 2.0]))
    assert total[...].tolist() == [3.5, 0.5, 2.25, 5.25]
    assert own[...].tolist() == [[2**40, 0, 0, 0], [1, 1, 2**40, 0], [1, 1, 1, 1]]


@pytest.mark.as_released
def test_updates_stay_in_place():
    r = refs.new_ref(jnp.zeros((8, 1000)))

    def program(i, j):
        r[i, j] += 1.0
        r[i, jax.ds(j, 10)] = r[0, :10] * 2
        lax.fori_loop(0, 5, lambda k, c: (r.at[k, j].set(c), c + 1)[1], 0.0)

    assert_in_place(refs.jit(program), jnp.int32(2), jnp.int64(3))
    pointer = r.unsafe_buffer_pointer()
    refs.jit(program)(jnp.int32(2), jnp.int64(3))
    r[jnp.int32(1), jnp.int64(2)] = 4.0
    assert r.unsafe_buffer_pointer() == pointer
