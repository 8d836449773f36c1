"""Indices of refs that lie on several devices: a process of its own, with eight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import refs

N = jax.device_count()
several = pytest.mark.skipif(N != 8, reason="test_several_devices.py runs this on eight")


def eagerly(program, *args):
    return program(*args)


def compiled(program, *args):
    return refs.jit(program)(*args)


ways = pytest.mark.parametrize("run", [eagerly, compiled])


@several
@ways
@pytest.mark.parametrize("value", [20, 15, -3, -40])
def test_a_traced_start_along_a_sharded_axis_is_moved_into_bounds(run, value):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x = np.arange(16.0, dtype=np.float32)
    q = refs.new_ref(jax.device_put(x, NamedSharding(mesh, P("x"))))
    start = min(max(value + 16 if value < 0 else value, 0), 14)
    place = value + 16 if value < 0 else value

    def program(i):
        seen = q[jax.ds(i, 2)], q[i], q.at[::-1].at[jax.ds(i, 2)].get()
        q[jax.ds(i, 2)] = -1.0
        q.at[jax.ds(i, 2)].add(-1.0)
        q[i] = 100.0
        q.at[i[None]].add(1.0)
        return seen

    seen = run(program, jnp.int32(value))
    nearest = min(max(place, 0), 15)
    for got, want in zip(
        seen, [x[start : start + 2], x[nearest], x[::-1][start : start + 2]], strict=True
    ):
        np.testing.assert_array_equal(got, want)
    x[start : start + 2] = -2
    if 0 <= place < 16:
        x[place] = 101
    np.testing.assert_array_equal(q[...], x)
    assert q[...].sharding.spec == P("x")


@pytest.fixture
def explicit():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jnp.arange(48.0).reshape(16, 3)
        yield refs.new_ref(jax.device_put(x, NamedSharding(mesh, P("x"))), name="e")


@several
@ways
def test_an_explicit_mesh_and_the_axes_that_are_not_sharded(run, explicit):
    r = explicit
    x = np.arange(48.0, dtype=np.float32).reshape(16, 3)
    sharding = r[...].sharding

    def program(i):
        seen = r[:, 1], r[:, i], r[:, [2, 0]], r[:, np.array([True, False, True])], r[:, ::-1]
        r[:, 1] = 5.0
        r[:, i] += 1.0
        r.at[:, i].add(r[:, 0])
        r.at[:, jnp.array([0, 0])].add(1.0)
        r.at[:, jnp.array([1, 1])].multiply(2.0)
        r.at[:, 1:].at[:, i - 1].set(r[:, 0] * 2)
        old = refs.swap(r, (slice(None), 0), -1.0)
        return *seen, old

    want = [x[:, 1], x[:, 2], x[:, [2, 0]], x[:, [0, 2]], x[:, ::-1]]
    want = [w.copy() for w in want]
    x[:, 1] = 5
    x[:, 2] += 1
    x[:, 2] += x[:, 0]
    x[:, 0] += 2
    x[:, 1] *= 4
    x[:, 2] = x[:, 0] * 2
    want.append(x[:, 0].copy())
    x[:, 0] = -1
    for got, w in zip(run(program, jnp.int32(2)), want, strict=True):
        np.testing.assert_array_equal(got, w)
    np.testing.assert_array_equal(r[...], x)
    assert r[...].sharding == sharding


@several
def test_an_explicit_mesh_and_derivatives(explicit):
    def loss(c, i):
        explicit.at[:, i].multiply(c)
        return (explicit[:, i] ** 2).sum()

    column = np.arange(48.0).reshape(16, 3)[:, 1]
    got = refs.grad(loss)(jnp.float32(2.0), jnp.int32(1))
    np.testing.assert_allclose(got, 2 * 2 * (column**2).sum(), rtol=1e-6)


def op_by_op(program, *args):
    with jax.disable_jit():
        return program(*args)


WHOLE = {
    "a scalar": lambda x: 2.0,
    "a row": lambda x: np.arange(3, dtype=np.float32),
    "NumPy's": lambda x: np.ones(x.shape, np.float32),
    "itself": lambda x: x,
}


@several
@pytest.mark.parametrize("run", [eagerly, compiled, op_by_op])
@pytest.mark.parametrize("value", WHOLE.values(), ids=WHOLE)
@pytest.mark.parametrize("spec", [P("x"), P(None, None)], ids=["sharded", "replicated"])
def test_an_explicit_mesh_and_updates_of_the_whole(run, value, spec, explicit):
    x = np.arange(48.0, dtype=np.float32).reshape(16, 3)
    r = refs.new_ref(jax.device_put(x, NamedSharding(explicit[...].sharding.mesh, spec)))
    sharding = r[...].sharding

    def program():
        refs.addupdate(r, ..., value(r[...]))
        r.at[:].add(value(r[...]))
        r.at[:, 1:].add(1.0)
        r.at[...].multiply(2.0)
        r.at[...].subtract(value(r[...]))
        r[...] += value(r[...])
        r.at[...].max(5.0)

    run(program)
    for _ in range(2):
        x += value(x)
    x[:, 1:] += 1
    x *= 2
    x -= value(x)
    x += value(x)
    np.testing.assert_array_equal(r[...], np.maximum(x, 5))
    assert r[...].sharding == sharding


@several
@pytest.mark.parametrize("run", [eagerly, compiled, op_by_op])
def test_an_explicit_mesh_and_a_replicated_ref(run, explicit):
    x = np.arange(48.0, dtype=np.float32).reshape(16, 3)
    mesh = explicit[...].sharding.mesh
    r = refs.new_ref(jax.device_put(x, NamedSharding(mesh, P(None, None))))

    def program(i):
        r.at[i].add(1.0)
        r.at[1:3].add(np.ones((2, 3), np.float32))

    run(program, jnp.array([1, 1]))
    np.add.at(x, [1, 1], 1.0)
    x[1:3] += 1
    np.testing.assert_array_equal(r[...], x)


@several
@ways
@pytest.mark.parametrize("n", [8, 1])
def test_an_explicit_mesh_of_any_size_and_an_update_of_the_whole(run, n):
    mesh = jax.make_mesh((n,), ("x",), (AxisType.Explicit,), devices=jax.devices()[:n])
    with jax.set_mesh(mesh):
        r = refs.new_ref(jax.device_put(np.zeros(8, np.float32), NamedSharding(mesh, P("x"))))
        run(lambda: refs.addupdate(r, ..., 1.0))
        assert r[...].tolist() == [1] * 8
