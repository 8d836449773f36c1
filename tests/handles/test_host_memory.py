"""Refs in the host's memory: state that is offloaded, and updated on the device."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import NamedSharding, P, lax
from jax.sharding import AxisType, SingleDeviceSharding

import refs
from refs.errors import RefTypeError
from tests.placement import N, addresses

X = np.arange(16.0, dtype=np.float32)


def one():
    return SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def over_mesh(kind):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    return NamedSharding(mesh, P("x"), memory_kind="pinned_host")


KINDS = AxisType.Auto, AxisType.Explicit
PLACES = {"one": one} | {str(kind): lambda k=kind: over_mesh(k) for kind in KINDS}


@pytest.fixture(params=PLACES)
def host(request):
    if N != 8 and request.param != "one":
        pytest.skip("test_several_devices.py runs this on eight")
    return PLACES[request.param]()


def is_there(ref, host):
    return ref.sharding.memory_kind == "pinned_host" and ref.sharding.is_equivalent_to(host, 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda host: refs.new_ref(X, sharding=host, name="r"),
        lambda host: refs.new_ref(jax.device_put(X, host), name="r"),
        lambda host: refs.new_ref(jax.device_put(X, host), copy=False, name="r"),
        lambda host: refs.tree.new_ref({"r": X}, sharding=host)["r"],
    ],
)
def test_made_there(host, make):
    r = make(host)
    assert is_there(r, host)
    np.testing.assert_array_equal(r, X)
    assert r[...].sharding.memory_kind == "device"
    assert "16" in repr(r.shape)
    other = copy.deepcopy(r)
    assert is_there(other, host)
    r[0] = 7
    np.testing.assert_array_equal(other, X)
    with refs.tree.borrow(r) as x:
        assert x.sharding.memory_kind == "pinned_host"
    frozen = refs.freeze(r)
    assert frozen.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(frozen, [7, *X[1:]])


def test_made_empty(host):
    r = refs.empty_ref(jax.ShapeDtypeStruct((16,), jnp.float32), sharding=host)
    assert is_there(r, host)
    np.testing.assert_array_equal(r, 0 * X)


def test_a_copied_array_is_not_the_refs(host):
    x = jax.device_put(X, host)
    r = refs.new_ref(x)
    r[...] = 0
    np.testing.assert_array_equal(x, X)


def use(r, i):
    """Accesses of all kinds; the same in NumPy, with `+=` for what is no method there."""
    r[0] = 5.0
    r[1:3] += 1
    r[np.array([3, 7])] = 2.0
    r[i] = r[i - 1] * 3
    r[...] = r[...] - 1


@pytest.mark.parametrize("wrap", [lambda f: f, refs.jit], ids=["eager", "jit"])
def test_accesses(host, wrap):
    if getattr(host, "mesh", None) and host.mesh.explicit_axes:
        pytest.skip("parts of a sharded axis can't be read there")
    r, expected = refs.new_ref(X, sharding=host), X.copy()
    f = wrap(use)
    for i in (4, 9):
        f(r, jnp.int32(i))
        use(expected, i)
        np.testing.assert_array_equal(r, expected)
        assert is_there(r, host)
    old = r.swap(3.0, idx=2)
    assert float(old) == expected[2]
    r.at[2].multiply(2)
    r.addupdate(jnp.ones(16))
    expected[2] = 6
    np.testing.assert_array_equal(r, expected + 1)
    assert is_there(r, host)


@pytest.mark.as_released
def test_an_optimizer_with_moments_on_the_host(host):
    m = refs.new_ref(X, sharding=host)
    w = refs.new_ref(X, sharding=host.with_memory_kind("device"))

    @refs.jit
    def step(g):
        m[...] = 0.9 * m[...] + g
        w[...] -= 0.1 * m[...]

    where = addresses(m)
    expected, moment = X.copy(), X.copy()
    for _ in range(3):
        step(jnp.ones(16))
        moment = np.float32(0.9) * moment + 1
        expected = expected - np.float32(0.1) * moment
    np.testing.assert_allclose(m, moment, rtol=1e-6)
    np.testing.assert_allclose(w, expected, rtol=1e-5)
    assert is_there(m, host)
    assert w.sharding.memory_kind == "device"
    assert addresses(m) == where


def test_moved_there_and_back(host):
    device = host.with_memory_kind("device")
    r = refs.new_ref(X, sharding=device, name="r")
    other = refs.new_ref(0)

    @refs.jit
    def step(r):
        r[...] += 1
        other[...] += 1

    for place in (device, host, host, device, host):
        refs.reshard(r, place)
        step(r)
        assert r.sharding.memory_kind == place.memory_kind
        assert other.sharding.memory_kind == "device"
    np.testing.assert_array_equal(r, X + 5)
    assert other[...] == 5


def test_loops_gradients_and_lanes():
    r = refs.new_ref(X, sharding=one())

    def double(r):
        def body(k, n):
            r[k] = 2 * r[k]
            return n + 1

        return lax.fori_loop(0, 16, body, 0)

    assert refs.jit(double)(r) == 16
    refs.fori_loop(0, 16, lambda k, _: r.at[k].add(1), None)
    np.testing.assert_array_equal(r, 2 * X + 1)
    g = refs.jit(refs.grad(lambda r: (r[...] ** 2).sum()))(r)
    np.testing.assert_array_equal(g, 4 * X + 2)
    np.testing.assert_array_equal(refs.grad(lambda r: (r[...] ** 2).sum())(r), 4 * X + 2)
    refs.vmap(lambda r, x: r.addupdate(x))(r, jnp.ones(16))
    np.testing.assert_array_equal(r, 2 * X + 2)
    assert is_there(r, one())


@pytest.mark.parametrize("wrap", [lambda f: f, refs.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("place", ["host", "device"])
def test_a_value_in_host_memory_is_written_anywhere(host, place, wrap):
    r = refs.new_ref(X, sharding=host if place == "host" else host.with_memory_kind("device"))
    value = jax.device_put(X + 1, host)

    def write(r, value):
        r[...] = value
        r.addupdate(value)

    wrap(write)(r, value)
    np.testing.assert_array_equal(r, 2 * X + 2)
    wrap(lambda r, x: r.__setitem__(0, x))(r, jax.device_put(np.float32(7), one()) if N == 1 else 7)
    np.testing.assert_array_equal(np.asarray(r)[0], 7)
    assert r.sharding.memory_kind == ("pinned_host" if place == "host" else "device")


def test_a_compiled_function_says_which_ref_lies_elsewhere():
    r, other = refs.new_ref(X, sharding=one()), refs.new_ref(X, sharding=jax.devices()[0])
    compiled = refs.jit(lambda r, x: r.addupdate(x)).lower(r, 1.0).compile()
    compiled(r, np.float32(1))
    with pytest.raises(RefTypeError) as info:
        compiled(other, np.float32(1))
    assert str(info.value).endswith(
        ":\nArgument args[0] compiled with Ref{float32[16]} and called with Ref{float32[16]}, "
        "which lies elsewhere"
    )


def test_keys_stay_on_the_device():
    key = jax.random.key(0)
    k = refs.new_ref(key)
    for make in (
        lambda: refs.new_ref(key, sharding=one()),
        lambda: refs.new_ref(jax.device_put(key, one())),
        lambda: refs.empty_ref(jax.eval_shape(lambda: key), sharding=one()),
        lambda: refs.reshard(k, one()),
    ):
        with pytest.raises(RefTypeError, match="a PRNG key, in the host's memory"):
            make()
    assert k[...] == key


def test_moved_from_anywhere_to_anywhere():
    device = jax.devices()[-1]
    places = [one(), device, SingleDeviceSharding(device)]
    if N == 8:
        for kind in KINDS:
            split = over_mesh(kind)
            whole = NamedSharding(split.mesh, P(), memory_kind="pinned_host")
            places += [split, whole, *(s.with_memory_kind("device") for s in (split, whole))]
    for a in places:
        for b in places:
            r = refs.new_ref(X, sharding=a)
            refs.reshard(r, b)
            refs.tree.set(r, refs.new_ref(X + 1, sharding=a)[...])
            np.testing.assert_array_equal(r, X + 1)
            kind = getattr(b, "memory_kind", "device")
            assert r.sharding.memory_kind == kind
            np.testing.assert_array_equal(refs.new_ref(refs.freeze(r), sharding=a), X + 1)


def test_its_parts(host):
    r = refs.new_ref(X, sharding=host)
    for shard in (*r.addressable_shards, *r.global_shards):
        np.testing.assert_array_equal(shard.data, X[shard.index])
    np.testing.assert_array_equal(r.addressable_data(0), X[r.addressable_shards[0].index])


def test_a_callback_is_given_the_values():
    r, seen = refs.new_ref(X, sharding=one()), []

    def look(x):
        seen.append(np.array(x))
        x[0] = 8

    refs.jit(lambda r: refs.io_callback(look, None, r))(r)
    np.testing.assert_array_equal(seen[0], X)
    assert float(r[0]) == 8
    assert is_there(r, one())


def test_without_jit():
    r = refs.new_ref(X, sharding=one())
    with jax.disable_jit():
        use(r, 4)
    expected = X.copy()
    use(expected, 4)
    np.testing.assert_array_equal(r, expected)
    assert is_there(r, one())


def test_trees(host):
    state = refs.tree.new_ref({"a": X, "k": jax.random.key(0)}, sharding={"a": host, "k": None})
    refs.tree.set(state, {"a": X + 1, "k": jax.random.key(1)})
    np.testing.assert_array_equal(state["a"], X + 1)
    assert is_there(state["a"], host)
    assert refs.tree.abstract(state)["a"].sharding.memory_kind == "pinned_host"
    assert is_there(refs.tree.copy(state)["a"], host)
    np.testing.assert_array_equal(refs.tree.swap(state, {"a": 0, "k": state["k"][...]})["a"], X + 1)
    assert is_there(state["a"], host)
