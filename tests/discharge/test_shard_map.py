"""shard_map: a ref operand's state is sharded as the operand is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from tests.discharge.helpers import agree, equations
from tests.processes import run_with_devices

P = jax.P
X = np.arange(8, dtype=np.float32)


def mesh_of(n):
    return jax.make_mesh((n,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


def sharded(fun, in_specs, out_specs, n=1):
    return jax.shard_map(fun, mesh=mesh_of(n), in_specs=in_specs, out_specs=out_specs)


def test_a_ref_operand():
    def body(r, x):
        r[...] += x
        return lax.psum(jnp.sum(r[...]), "d")

    def plain(a, x):
        a += x
        return a.sum()

    mapped = sharded(body, (P("d"), P("d")), P())
    pure = agree(mapped, plain, [X], X, effects=["NamedAxisEffect"])
    [call] = equations(pure, "shard_map")
    assert call.params["in_specs"] == (P("d"), P("d"))
    assert call.params["out_specs"] == (P(), P("d"))


def test_one_written_one_only_read():
    def body(r, s):
        r[...] = s[::-1]

    def plain(a, b):
        a[...] = b[::-1]

    pure = agree(sharded(body, (P("d"), P()), None), plain, [X, X + 1])
    [call] = equations(pure, "shard_map")
    assert len(call.outvars) == 1


def test_control_flow_within():
    def body(r, n):
        def step(i, c):
            r[i] += c
            return c + 1

        lax.fori_loop(0, n, step, jnp.float32(1))
        lax.cond(r[0] > 0, lambda: r.at[7].set(0), lambda: None)

    def plain(a, n):
        a[: int(n)] += np.arange(1, n + 1)
        if a[0] > 0:
            a[7] = 0

    agree(sharded(body, (P(), P()), None), plain, [X], np.int32(3))


def test_within_control_flow():
    def body(r):
        r[...] *= 2

    def program(r):
        mapped = sharded(body, P("d"), None)
        lax.scan(lambda c, _: (mapped(r), None), None, length=3)

    def plain(a):
        a *= 8

    agree(program, plain, [X])


def test_gradients():
    def body(r, x):
        r[...] = r[...] * x
        return r[...] * 2

    mapped = sharded(body, (P("d"), P()), P("d"))
    pure = refs.functionalize(lambda state, x: mapped(state[0], x))
    assert jax.grad(lambda x: jnp.sum(pure([X], x)[0]))(3.0) == 2 * X.sum()


def test_an_axis_names_some_axes():
    mesh = jax.make_mesh((1, 1), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def body(r):
        r[...] += 1

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=P("a"), out_specs=None, axis_names={"a"}, check_vma=True
    )

    def plain(a):
        a += 1

    # Mapped over some axes only: JAX evaluates that under jit alone.
    agree(jax.jit(mapped), plain, [X])


FOUR_DEVICES = """
import jax, jax.numpy as jnp, numpy as np, refs
from jax import lax
from refs._buffers.operations import buffer_of
from tests.discharge.test_shard_map import P, X, mesh_of, sharded
from tests.discharge.helpers import agree

assert len(jax.devices()) == 4
sharding = jax.sharding.NamedSharding(mesh_of(4), P("d"))
r = refs.new_ref(jax.device_put(X, sharding))
total = refs.new_ref(jax.device_put(jnp.zeros(1), jax.sharding.NamedSharding(mesh_of(4), P())))

@refs.jit
def step(x):
    def body(r, total, x):
        r[0] += x[0]                                  # the first of each shard
        left = lax.ppermute(r[1], "d", [(k, (k + 1) % 4) for k in range(4)])
        r[1] = left
        total[0] = lax.psum(jnp.sum(r[...]), "d")
        return left[None]
    return sharded(body, (P("d"), P(), P("d")), P("d"), n=4)(r, total, x)

expected = X.copy()
x = np.float32([10, 20, 30, 40])
pointers = [s.data.unsafe_buffer_pointer() for s in buffer_of(r).addressable_shards]
for _ in range(2):
    left = step(x)
    expected[::2] += x
    expected[1::2] = np.roll(expected[1::2], 1)
    np.testing.assert_array_equal(r[...], expected)
    np.testing.assert_array_equal(left, expected[1::2])
    assert total[0] == expected.sum()
    assert r.sharding == sharding
assert pointers == [s.data.unsafe_buffer_pointer() for s in buffer_of(r).addressable_shards]

# Updates outside shard_map keep the sharding, too.
@refs.jit
def whole(y):
    r[...] = y
    r[3] += 1
    refs.addupdate(r, jnp.arange(2), 5)
whole(np.ones(8, np.float32))
np.testing.assert_array_equal(r[...], [6, 6, 1, 2, 1, 1, 1, 1])
assert r.sharding == sharding
r[2] = 7
r[::-1] += 1
assert r.sharding == sharding
np.testing.assert_array_equal(r[...], [7, 7, 8, 3, 2, 2, 2, 2])

def body(r, x):
    r[...] += x * lax.axis_index("d")
    return lax.pmax(r[0], "d")
def plain(a, x):
    a += x * np.repeat(np.arange(4), 2)
    return a.reshape(4, 2)[:, 0].max()
three = jax.device_put(np.float32(3), total.sharding)
mapped = sharded(body, (P("d"), P()), P(), n=4)
agree(mapped, plain, [jax.device_put(X, sharding)], three, effects=["NamedAxisEffect"])
print("four devices agree")
"""


def test_on_four_devices():
    assert run_with_devices(4, "-c", FOUR_DEVICES) == "four devices agree\n"


def test_a_ref_passed_twice_with_different_specs():
    r = refs.new_ref(X, name="r")

    def body(one, two):
        one[...] += 1
        two[...] += 1

    # Only refs.jit can pass one ref under two names that JAX takes for different refs.
    @refs.jit
    def program(passed):
        sharded(body, (P("d"), P()), None)(passed, r)

    with pytest.raises(refs.errors.RefValueError, match=r"`r` .* is passed twice with different"):
        program(r)
    np.testing.assert_array_equal(r[...], X)


@pytest.mark.parametrize("add", [False, True])
def test_a_value_that_is_the_same_on_every_device(add):
    def body(r):
        if add:
            refs.addupdate(r, 0, 5.0)
        else:
            r[0] = 5.0

    def plain(a):
        a[0] = 5 + a[0] * add

    agree(sharded(body, P("d"), None), plain, [X])
