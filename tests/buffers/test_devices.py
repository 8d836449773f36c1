"""Arrays that lie on another device than a ref: the use is refused, and nothing has changed.

`tests/test_several_devices.py` runs this file on four.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

import refs

DEVICES = jax.devices()
has_several = pytest.mark.skipif(
    len(DEVICES) == 1, reason="test_several_devices.py runs this on four"
)


def on(k, value):
    return jax.device_put(jnp.float32(value) + jnp.zeros(3, jnp.float32), DEVICES[k])


def step(x, a, b):
    a[...] = on(0, 1)
    b[...] = on(1, 1)
    return 2 * x


WAYS = {
    "eager": lambda f, _, r: r.__setitem__(..., on(1, 1)),
    "add": lambda f, _, r: r.addupdate(on(1, 1)),
    "index": lambda f, _, r: r[jax.device_put(jnp.array([0, 2]), DEVICES[1])],
    "reversed": lambda f, _, r: r.at[::-1].set(on(1, 1)),
    "grad": lambda f, *rs: refs.grad(f)(1.0, *rs),
    "jvp": lambda f, *rs: refs.jvp(lambda x: f(x, *rs), (1.0,), (1.0,)),
    "checkpoint": lambda f, *rs: refs.checkpoint(f)(1.0, *rs),
    "vmap": lambda f, *rs: refs.vmap(lambda x: f(x, *rs))(jnp.ones(2)),
    "disable_jit": lambda f, *rs: disabled(refs.grad(f), *rs),
}


def disabled(f, *rs):
    with jax.disable_jit():
        return f(1.0, *rs)


@has_several
@pytest.mark.parametrize("way", WAYS)
def test_all_refs_or_none(way):
    a, b = refs.new_ref(on(0, 0), name="a"), refs.new_ref(on(0, 0), name="b")
    told = r"ref `b` \(created at .*\) lies on .*:0; an array of shape .* lies on .*:1"
    for n in range(2):
        with pytest.raises(refs.errors.RefValueError, match=told):
            WAYS[way](step, a, b)
        for r in a, b:
            np.testing.assert_array_equal(r[...], n)
            r[...] += 1


@has_several
def test_sharded_arrays_are_told():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.zeros(4), jax.NamedSharding(mesh, P("d")))
    r = refs.new_ref(jax.device_put(jnp.zeros(4), DEVICES[0]))
    with pytest.raises(refs.errors.RefValueError, match=r"lies on 4 devices \(NamedSharding"):
        r[...] = x
    r = refs.new_ref(jax.device_put(r[...], x.sharding))  # as the error says
    r[...] = x + 1
    np.testing.assert_array_equal(r[...], 1)


@has_several
def test_arrays_that_nobody_has_put_somewhere_come_along():
    r = refs.new_ref(on(1, 0))
    r[...] = jnp.ones(3)
    r.at[jnp.array([0, 2])].add(1)
    np.testing.assert_array_equal(r[...], [2, 1, 2])
    assert r.sharding.device_set == {DEVICES[1]}


@has_several
def test_refs_of_jax_keep_their_value_too():
    r = jax.new_ref(on(0, 1))
    with pytest.raises(refs.errors.RefValueError, match=r"an array of shape .* lies on .*:1"):
        refs.set(r, ..., on(1, 0))
    np.testing.assert_array_equal(refs.get(r), 1)


@has_several
def test_numbers_that_were_first_used_under_a_mesh_are_used_without_it():
    """JAX spreads them over the mesh, and other operations then can't use them."""
    single, other = refs.new_ref(jnp.zeros(1234)), refs.new_ref(on(1, jnp.zeros((1234, 1))))
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    for number in 234, 235.0:
        with jax.set_mesh(mesh), contextlib.suppress(ValueError):
            single[1233] = number
        other[1233] = number
        assert float(other[1233, 0]) == number
    assert other.sharding.device_set == {DEVICES[1]}


@has_several
def test_operations_of_lanes_run_where_their_operands_lie():
    a, b = (refs.new_ref(on(k, 0)) for k in (0, 1))
    double = jax.jit(lambda x: 2 * x)

    def lane(x, y):
        a[...] += double(x)
        b[...] += double(y)
        return jax.device_put(x, DEVICES[1])

    for k in range(1, 5):
        assert refs.vmap(lane)(on(0, 1), on(1, 1)).devices() == {DEVICES[1]}
        np.testing.assert_array_equal([a[...], b[...]], np.full((2, 3), 6 * k))
    assert [r[...].devices() for r in (a, b)] == [{d} for d in DEVICES[:2]]


@has_several
def test_operations_on_a_ref_outside_of_the_mesh_that_is_set():
    """It stays where it is, as an array does that somebody has put there."""
    r = refs.new_ref(on(1, 0), name="r")
    with jax.set_mesh(jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))):
        r[1] = 2.0
        r.addupdate(1.0)
        np.testing.assert_array_equal(r[...], [1, 3, 1])
        assert float(r[1]) == 3
        with pytest.raises(refs.errors.RefValueError, match=r"ref `r` .* lies on .*:1; an array"):
            r[...] = on(2, 1)
    assert r.sharding.device_set == {DEVICES[1]}
