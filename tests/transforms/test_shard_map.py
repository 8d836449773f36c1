"""`refs.shard_map`: refs split over devices, refs that all devices share, and what differentiates.

Run on as many devices as there are; `tests/test_several_devices.py` runs this file on four.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding

import refs
from refs._buffers.operations import buffer_of
from refs.errors import RefValueError
from tests import oracle

P = jax.P
N = len(jax.devices())
SPLIT = P("d")
X = np.arange(8, dtype=np.float32)
WRAPPERS = [pytest.param(oracle.as_is, id="top level"), pytest.param(refs.jit, id="jit")]
everywhere = pytest.mark.parametrize("wrap", WRAPPERS)


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((N,), ("d",), axis_types=(kind,))


def place(x, spec=None, kind=AxisType.Auto):
    return jax.device_put(jnp.asarray(x), NamedSharding(mesh(kind), P() if spec is None else spec))


def split(x=X):
    return refs.new_ref(place(x, P("d")), name="split")


def whole(x):
    return refs.new_ref(place(x), name="whole")


def over_devices(f, in_specs=SPLIT, out_specs=None, **options):
    return refs.shard_map(f, mesh=mesh(), in_specs=in_specs, out_specs=out_specs, **options)


def shards(x):
    """What each device has."""
    return np.split(np.array(x), N)


@pytest.mark.as_released
@everywhere
def test_each_device_has_its_shard(wrap):
    r = split()
    pointers = [s.data.unsafe_buffer_pointer() for s in buffer_of(r).addressable_shards]

    def body(r, x):
        r[0] += x[1]
        r[1] = 5
        return r[...] * 2

    out = wrap(over_devices(body, out_specs=P("d")))(r, place(X, P("d")))
    expected = []
    for shard in shards(X):
        mine = shard.copy()
        mine[0] += shard[1]
        mine[1] = 5
        expected.append(mine)
    np.testing.assert_array_equal(r[...], np.concatenate(expected))
    np.testing.assert_array_equal(out, 2 * np.concatenate(expected))
    assert r.sharding.is_equivalent_to(NamedSharding(mesh(), P("d")), 1)
    if wrap is refs.jit:
        assert pointers == [s.data.unsafe_buffer_pointer() for s in buffer_of(r).addressable_shards]


@everywhere
@pytest.mark.parametrize("closed_over", [True, False])
def test_what_all_devices_share(wrap, closed_over):
    total = whole(np.zeros(3))

    def body(x, *passed):
        t = total if closed_over else passed[0]
        t[1] += lax.psum(x.sum(), "d")
        t[2] = lax.axis_size("d")

    specs, args = ((P("d"),), ()) if closed_over else ((P("d"), P()), (total,))
    wrap(over_devices(body, specs))(place(X, P("d")), *args)
    np.testing.assert_array_equal(total[...], [0, X.sum(), N])


@everywhere
def test_collectives_between_shards_of_refs(wrap):
    r = split()

    def body(r):
        r[...] = lax.ppermute(r[...], "d", [(k, (k + 1) % N) for k in range(N)])
        return lax.all_gather(r[0], "d"), lax.pmax(r[1], "d")

    gathered, most = wrap(over_devices(body, out_specs=(P("d"), P())))(r)
    expected = np.roll(X, 8 // N)
    np.testing.assert_array_equal(r[...], expected)
    np.testing.assert_array_equal(gathered, np.tile([s[0] for s in shards(expected)], N))
    assert most == max(s[1] for s in shards(expected))


@everywhere
def test_results(wrap):
    """Arrays, the argument itself, and refs that the devices make."""
    r = split()

    def body(r, x):
        mine = refs.new_ref(x * 2, name="mine")
        return {"same": r, "new": mine, "sum": lax.psum(x.sum(), "d")}

    specs = {"same": None, "new": P("d"), "sum": P()}
    out = wrap(over_devices(body, out_specs=specs))(r, place(X, P("d")))
    assert out["same"] is r
    assert out["sum"] == X.sum()
    np.testing.assert_array_equal(out["new"][...], 2 * X)
    assert out["new"].name == "mine"


def test_idle_and_only_read_refs_stay_out_of_the_results():
    r, s, idle = split(), split(X + 1), split()

    def body(r, s, idle):
        r[...] += s[...]

    jaxpr = refs.make_jaxpr(over_devices(body))(r, s, idle)
    [call] = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map"]
    assert len(call.invars) == 2
    assert len(call.outvars) == 1


@everywhere
def test_gradients_with_respect_to_refs_and_arrays(wrap):
    r, total = split(), whole(1.0)
    x = place(X + 1, P("d"))

    def loss(r, x):
        over_devices(scale)(r, x)
        return total[...] * r[0]

    def scale(r, x):
        r[...] *= jnp.sin(x)
        total[...] += lax.psum(r[...].sum(), "d")

    def by_hand(r, x):
        r = r * jnp.sin(x)
        return (1 + r.sum()) * r[0]

    expected = jax.grad(by_hand, argnums=(0, 1))(X, X + 1)
    got = wrap(refs.grad(loss, argnums=(0, 1)))(r, x)
    for have, want in zip(got, expected, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(r[...], X * np.sin(X + 1), rtol=1e-6)
    np.testing.assert_allclose(total[...], 1 + (X * np.sin(X + 1)).sum(), rtol=1e-6)


@everywhere
def test_other_transformations_inside(wrap):
    r, counts = split(), whole(np.zeros(4))

    def body(r, x):
        mine = refs.new_ref(lax.pcast(jnp.zeros(4), "d", to="varying"))

        def lane(x):
            mine[jnp.int32(x) % 4] += 1

        refs.vmap(lane)(x)
        counts[...] += lax.psum(mine[...], "d")

        @refs.checkpoint
        def square(y):
            r[0] += 1
            return (y**2).sum()

        slope = refs.grad(square)(x)
        r[...] += slope
        refs.fori_loop(0, 2, lambda i, _: r.at[1].multiply(2), None)
        refs.cond(r[0] > 3, lambda: r.at[1].add(1), lambda: None)

    wrap(over_devices(body))(r, place(X, P("d")))
    expected = []
    for shard in shards(X):
        mine = shard.copy()
        mine[0] += 1
        mine += 2 * shard
        mine[1] *= 4
        mine[1] += mine[0] > 3
        expected.append(mine)
    np.testing.assert_array_equal(r[...], np.concatenate(expected))
    np.testing.assert_array_equal(counts[...], [2, 2, 2, 2])


def test_lanes_that_add_to_a_ref_on_the_mesh():
    total = whole(0.0)

    def body(x):
        def lane(v):
            total[...] += 1

        refs.vmap(lane)(x)

    over_devices(body)(place(X, P("d")))
    assert total[...] == 8 // N  # each device adds the same


@everywhere
def test_inside_other_transformations(wrap):
    r, total = split(), whole(0.0)

    def body(r, x):
        y = r[...] * x
        total[...] += lax.psum(y.sum(), "d")
        return y

    f = over_devices(body, (P("d"), P()), P("d"))
    out = wrap(refs.vmap(f, in_axes=(None, 0)))(r, place(np.arange(3.0)))
    np.testing.assert_array_equal(out, np.outer(np.arange(3), X))
    assert total[...] == 3 * X.sum()

    def step(carry, x):
        y = f(r, x)
        r[...] = y
        return carry + 1, y

    count, ys = wrap(lambda xs: refs.scan(step, 0, xs))(place(np.float32([2, 3])))
    assert count == 2
    np.testing.assert_array_equal(ys, [2 * X, 6 * X])
    np.testing.assert_array_equal(r[...], 6 * X)


def test_an_unchecked_write_is_one_devices():
    r = whole(np.zeros(2))

    def body(x):
        r[0] = x[0]

    over_devices(body, check_vma=False)(place(X, P("d")))
    assert r[0] in X


def test_specs_that_are_inferred():
    """On a mesh of explicit axes, an array's type has its spec."""
    with jax.set_mesh(mesh(AxisType.Explicit)):
        r = refs.new_ref(place(X, P("d"), AxisType.Explicit))
        total = refs.new_ref(place(0.0, P(), AxisType.Explicit))

        @refs.jit
        @refs.shard_map(out_specs=P("d"))
        def step(r, total):
            r[...] *= 2
            total[...] += lax.psum(r[...].sum(), "d")
            return r[...]

        out = step(r, total)
        np.testing.assert_array_equal(out, 2 * X)
        np.testing.assert_array_equal(r[...], 2 * X)
        assert total[...] == 2 * X.sum()
        assert jax.typeof(r[...]).sharding.spec == P("d")


def test_a_part_of_the_mesh():
    both = jax.make_mesh((N, 1), ("d", "e"), axis_types=(AxisType.Auto,) * 2)
    r = refs.new_ref(jax.device_put(X, NamedSharding(both, P("d"))))

    def body(r):
        r[0] += 1

    specs = {"in_specs": P("d"), "out_specs": None, "axis_names": {"d"}}
    refs.jit(refs.shard_map(body, mesh=both, **specs))(r)
    np.testing.assert_array_equal(r[...], X + (np.arange(8) % (8 // N) == 0))


def test_what_raises_changes_nothing():
    r, total = split(), whole(0.0)

    def body(r):
        r[...] = 0
        total[...] = 1
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        over_devices(body)(r)
    np.testing.assert_array_equal(r[...], X)
    assert total[...] == 0


@everywhere
@pytest.mark.parametrize("is_passed", [True, False], ids=["passed", "closed over"])
def test_a_ref_on_a_single_device(wrap, is_passed):
    r = refs.new_ref(jax.device_put(X, jax.devices()[0]), name="r")

    def double(x):
        held = x if is_passed else r
        held[...] += lax.psum(x[...].sum(), "d")

    mapped = refs.shard_map(double, mesh=mesh(), in_specs=SPLIT, out_specs=None)
    args = [r] if is_passed else [split()]
    if N == 1:
        wrap(mapped)(*args)
        np.testing.assert_array_equal(r[...], X + X.sum())
        return
    doing = "shard_map of" if wrap is oracle.as_is else "a call of"
    text = (
        rf"^{doing} `double` takes refs and arrays that lie on different devices: .*ref `r` "
        r"\(created at .*\) lies on .*\. Move what is to go with the rest: a ref by "
        r"`refs\.reshard\(ref, sharding\)`, an array by `jax\.device_put\(x, sharding\)`\."
    )
    with pytest.raises(RefValueError, match=text):
        wrap(mapped)(*args)
    np.testing.assert_array_equal(r[...], X)


@everywhere
@pytest.mark.parametrize("is_passed", [True, False], ids=["passed", "closed over"])
def test_refs_that_nobody_has_placed_go_to_the_mesh(wrap, is_passed):
    n = refs.new_ref(1.0)

    def counted(x, n):
        n[...] += 1
        return n[...] * x

    passed = over_devices(counted, (SPLIT, P()), SPLIT), (jnp.asarray(X), n)
    closed_over = over_devices(lambda x: counted(x, n), SPLIT, SPLIT), (jnp.asarray(X),)
    mapped, args = passed if is_passed else closed_over
    for k in (2, 3):
        np.testing.assert_array_equal(wrap(mapped)(*args), k * X)
        assert n[...] == k


def test_what_has_no_spec_is_handed_on_as_it_is():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    x, given = refs.new_ref(jnp.arange(4.0)), {"a": object(), "b": 2.0}

    def body(other, x, name):
        assert other is not given
        assert other["a"] is given["a"]
        assert name == "rows"
        x[...] *= other["b"]

    specs = {"a": None, "b": None}, jax.P("d"), None
    refs.shard_map(body, mesh=mesh, in_specs=specs, out_specs=None)(given, x, "rows")
    np.testing.assert_array_equal(x, 2 * np.arange(4.0))


@everywhere
def test_an_array_like_a_part(wrap):
    r = split()

    def step(r):
        part = r.at[:1]
        part.set(jnp.ones_like(part))

    wrap(refs.shard_map(step, mesh=mesh(), in_specs=SPLIT, out_specs=None))(r)
    first = np.arange(8) % (8 // N) == 0
    np.testing.assert_array_equal(r[...], np.where(first, 1, X))


def test_jaxs_errors_name_the_users_function():
    def normalised(x):
        return x * 2

    for in_spec, out_spec in [(P("d", None), P("d")), (P("d"), P())]:
        with pytest.raises(ValueError, match="applied to the function 'normalised'"):
            refs.shard_map(normalised, mesh=mesh(), in_specs=in_spec, out_specs=out_spec)(X)


@everywhere
def test_a_view_whole_on_every_device(wrap):
    r = whole(np.ones((2, 3), np.float32))
    read = over_devices(lambda v: v[...], in_specs=P(), out_specs=P())
    np.testing.assert_array_equal(wrap(read)(r.at[1]), np.ones(3))
