"""Where refs lie: they are moved, and go along with others. On eight devices."""

import copy
import pickle
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import NamedSharding, P
from jax.sharding import AxisType

import refs
from refs._buffers.operations import buffer_of
from refs.errors import RefTypeError, RefValueError
from tests.placement import X, lies_at, several


@refs.jit
def add_one(ref):
    ref[...] += 1


@refs.jit
def step(state, count):
    state[...] += 1
    count[...] += 1


@several
def test_shards_are_copies(split):
    r = refs.new_ref(X, sharding=split)
    for shards in (r.addressable_shards, r.global_shards):
        add_one(r)
        for k, shard in enumerate(shards):
            np.testing.assert_array_equal(shard.data, [2 * k, 2 * k + 1])
        r[...] = r[...] - 1
    np.testing.assert_array_equal(r.addressable_data(2), [4, 5])


def test_where_an_array_lies_anyway():
    """A ref that is placed there is a copy; and one of an array that somebody has placed stays."""
    device = jax.devices()[0]
    x = jax.device_put(X, device)
    made = [refs.new_ref(x, sharding=device), refs.new_ref(x)]
    for r in made:
        add_one(r)
        np.testing.assert_array_equal(x, X)
        assert refs.tree.abstract(r).sharding == x.sharding
    assert refs.tree.abstract(refs.new_ref(X)).sharding is None


def test_shards_on_one_device():
    for r in (refs.new_ref(X), refs.pack([X, X])[1]):
        (shard,) = r.addressable_shards
        np.testing.assert_array_equal(shard.data, X)
        assert r.is_fully_replicated
        assert r.is_fully_addressable


def test_what_is_printed_of_a_ref_of_several_processes():
    r = refs.new_ref(X, name="r")
    r._store.sharding = mock.Mock(is_fully_addressable=False, is_fully_replicated=False)
    text = repr(r)
    r._store.sharding = None
    sharding = re.escape(str(r.sharding))
    assert re.fullmatch(
        rf"Ref\(shape=\(16,\), dtype=float32, sharding={sharding}, name='r'\)", text
    )


# --- Moved ---


@several
def test_resharded(split, whole):
    r = refs.new_ref(X, name="r")
    reads = refs.jit(lambda r: r[...].sum())
    places = [split, whole, jax.devices()[3], split, jax.devices()[0]]
    for n, place in enumerate(places):
        add_one(r)
        refs.reshard(r, place)
        sharding = place if isinstance(place, NamedSharding) else r.sharding
        assert lies_at(r, sharding)
        assert sharding.device_set == ({place} if sharding is not place else {*jax.devices()})
        assert reads(r) == X.sum() + 16 * (n + 1)
        r.at[3].add(1)
        r.at[jnp.array([3])].subtract(1)
        r[0] = float(r.addressable_data(0)[0])
        assert lies_at(r, sharding)
        np.testing.assert_array_equal(r, X + n + 1)
    assert r.name == "r"
    assert add_one._cache_size() >= 4


@several
def test_a_moved_ref_that_a_function_closes_over(split):
    r = refs.new_ref(X)

    @refs.jit
    def close_over(x):
        r[...] += x

    for place in (jax.devices()[0], split, jax.devices()[5], split):
        refs.reshard(r, place)
        for _ in range(2):
            close_over(1.0)
        assert lies_at(r, r.sharding)
        assert len(r.devices()) == (8 if place is split else 1)
    np.testing.assert_array_equal(r, X + 8)


@several
def test_moved_keys_and_copies(split, whole):
    r = refs.new_ref(jax.random.split(jax.random.key(0), 8))
    bits = jax.random.key_data(r[...])
    refs.reshard(r, split)
    assert r.sharding.is_equivalent_to(split, 1)
    np.testing.assert_array_equal(jax.random.key_data(r[...]), bits)
    r = refs.new_ref(X, sharding=split)
    assert lies_at(copy.deepcopy(r), split)
    # A pickle has the value, and comes back on the default device.
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(r)), X)


@several
def test_what_cannot_be_moved_stays(split):
    r = refs.new_ref(np.zeros(7), name="r")
    with pytest.raises(ValueError, match="partitioned 8 times"):
        refs.reshard(r, split)
    add_one(r)
    assert len(r.devices()) == 1
    packed = refs.pack([jnp.zeros(2), jnp.zeros(3)])[0]
    with pytest.raises(RefTypeError, match=r"lies in the buffer of a pack"):
        refs.reshard(packed, split)
    with pytest.raises(RefTypeError, match=r"a ref of JAX's own"):
        refs.reshard(jax.new_ref(X), split)
    with pytest.raises(RefTypeError, match=r"reshard of ref `r` .* inside a traced function"):
        refs.jit(lambda r: refs.reshard(r, split))(r)


def test_jax_is_told_of_reshard():
    r = refs.new_ref(X, name="r")
    sharding = NamedSharding(jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,)), P("x"))
    with pytest.raises(RefTypeError, match=r"`refs.reshard\(ref, sharding\)`"):
        jax.device_put(r, sharding)
    with pytest.raises(RefTypeError, match=r"with_sharding_constraint of ref `r`"):
        refs.jit(lambda r: jax.lax.with_sharding_constraint(r, sharding))(r)


@several
@pytest.mark.parametrize("wrap", [lambda f: f, refs.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    "read",
    [
        lambda r, spec: r.at[1].get(out_sharding=spec),
        lambda r, spec: r.at[:, 1].get(out_sharding=spec),
        lambda r, spec: r.at[1:5].at[0].get(out_sharding=spec),
    ],
)
def test_a_part_gets_a_spec_where_no_mesh_is_set(read, wrap):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    x = np.arange(64.0).reshape(8, 8)
    r = refs.new_ref(x, sharding=NamedSharding(mesh, P("x", None)))
    part = wrap(lambda r: read(r, P("y")))(r)
    assert part.sharding.is_equivalent_to(NamedSharding(mesh, P("y")), 1)
    np.testing.assert_array_equal(part, read(refs.new_ref(x), None))


# --- Refs that nobody has placed go along ---


@several
def test_a_counter_and_a_key_go_along(split, whole):
    state, count = refs.new_ref(X, sharding=split), refs.new_ref(0)
    key = refs.new_ref(jax.random.key(0))

    @refs.jit
    def draw(state):
        key[...], sub = jax.random.split(key[...])
        state[...] += jax.random.bernoulli(sub)

    for _ in range(2):
        step(state, count)
        draw(state)
        count[...] += 1
    assert count[...] == 4
    assert lies_at(state, split)
    assert lies_at(count, whole)
    assert key.sharding.device_set == {*jax.devices()}


@several
def test_a_counter_goes_along_with_the_mesh_that_is_set(mesh, split, whole):
    count, rows, numbers = (refs.new_ref(x) for x in (0, X, X))
    placed = refs.new_ref(X, sharding=jax.devices()[0])
    inside = jax.typeof(jax.device_put(X, split)).sharding

    @refs.jit
    def steps(rows):
        count[...] += 1
        x = jnp.arange(16.0)
        rows[...] += jax.sharding.reshard(x, inside) if mesh.explicit_axes else x

    if not mesh.explicit_axes:
        steps(rows)  # They lie on one device until a mesh is set.
    with jax.set_mesh(mesh):
        steps(rows)
        steps(rows)
        refs.fori_loop(0, 3, lambda i, _: numbers.set(numbers[...] + 1), None)
        with pytest.raises(RefValueError, match="different devices"):
            refs.jit(lambda: placed.set(placed[...] + 1))()
    assert count[...] == 2 + (not mesh.explicit_axes)
    np.testing.assert_array_equal(rows, X * (1 + count[...]))
    np.testing.assert_array_equal(numbers, X + 3)
    assert all(lies_at(r, whole) for r in (count, numbers))


@several
def test_where_an_argument_is_sharded_in_a_later_call(split, whole):
    count = refs.new_ref(0)
    add = refs.jit(lambda count, x: count.at[...].add(x.sum()))
    add(count, X.astype(int))
    add(count, X.astype(int))
    add(count, jax.device_put(X.astype(int), split))
    assert count[...] == 3 * X.sum()
    assert lies_at(count, whole)


@several
def test_a_placed_ref_stays_in_a_later_call_too(split):
    count = refs.new_ref(0, sharding=jax.devices()[2], name="count")
    add = refs.jit(lambda count, x: count.at[...].add(x.sum()))
    for _ in range(2):
        add(count, X.astype(int))
        with pytest.raises(RefValueError, match=r"ref `count` .* lies on cpu:2"):
            add(count, jax.device_put(X.astype(int), split))
    assert count[...] == 2 * X.sum()
    assert count.devices() == {jax.devices()[2]}


@several
def test_compiled_ahead(split, whole):
    state, count = refs.new_ref(X, sharding=split), refs.new_ref(0)
    compiled = step.lower(state, count).compile()
    compiled(state, count)
    assert count[...] == 1
    assert lies_at(count, whole)


@several
def test_compiled_ahead_of_a_counter_that_goes_along(split, whole):
    state = refs.tree.new_ref({"w": X, "step": np.int32(0)}, sharding={"w": split, "step": None})
    f = refs.jit(lambda s: step(s["w"], s["step"]))
    compiled = f.lower(refs.tree.abstract(state)).compile()
    compiled(state)
    np.testing.assert_array_equal(state["w"], X + 1)
    assert state["step"][...] == 1
    assert lies_at(state["step"], whole)


@several
def test_compiled_functions_take_what_jax_takes(mesh, split, whole):
    def add(w, x):
        w[...] += x

    w = refs.new_ref(X, sharding=split, name="w")
    x = jax.device_put(X, split)
    abstract = jax.ShapeDtypeStruct(X.shape, X.dtype)
    expected = X.copy()
    calls = [(refs.jit(add, in_shardings=(None, split)), abstract, x)]
    if not mesh.explicit_axes:
        calls += [(refs.jit(add), jnp.asarray(X), x), (refs.jit(add), x, X)]
    for f, given, argument in calls:
        f.lower(w, given).compile()(w, argument)
        expected += X
        np.testing.assert_array_equal(w, expected)
    compiled = refs.jit(add).lower(w, x).compile()
    refs.reshard(w, whole)
    with pytest.raises((ValueError, TypeError)) as info:
        compiled(w, x)
    if not mesh.explicit_axes:
        assert re.search(r"state\[0\]: ref `w` \(created at", info.value.__notes__[-1])
    refs.reshard(w, jax.devices()[0])
    with pytest.raises(RefTypeError, match=r"Argument args\[0\] compiled with"):
        compiled(w, jax.device_put(x, jax.devices()[0]))
    np.testing.assert_array_equal(w, expected)


@several
def test_a_nan_is_the_error_of_a_nan(split):
    r = refs.new_ref(X, sharding=split)
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        r.at[0].set(np.nan)
    np.testing.assert_array_equal(r, X)


@several
def test_a_placed_ref_stays(split):
    state = refs.new_ref(X, sharding=split, name="state")
    count = refs.new_ref(0, sharding=jax.devices()[2], name="count")
    for run in step, step.lower:
        with pytest.raises(
            RefValueError,
            match=r"ref `state` .* lies on 8 devices .* ref `count` .* lies on cpu:2.*refs.reshard",
        ):
            run(state, count)
    assert count.devices() == {jax.devices()[2]}
    np.testing.assert_array_equal(state, X)
    refs.reshard(count, NamedSharding(split.mesh, P()))
    step(state, count)
    assert count[...] == 1


@several
def test_nothing_goes_along_where_it_is_not_clear_with_what(split):
    first, second = refs.new_ref(X, sharding=split), refs.new_ref(X, sharding=jax.devices()[2])
    count = refs.new_ref(0)

    @refs.jit
    def all_three(first, second, count):
        first[...] += second[...]
        count[...] += 1

    for _ in range(2):
        with pytest.raises(RefValueError, match="lie on different devices"):
            all_three(first, second, count)
    assert count.devices() == {jax.devices()[0]}


@several
def test_in_a_loop_at_top_level(split, whole):
    state, count = refs.new_ref(X, sharding=split), refs.new_ref(0)

    def body(k, x):
        state[...] += 1
        count[...] += 1
        return x

    for _ in range(2):
        refs.fori_loop(0, 3, body, 0)
    refs.scan(lambda x, k: (body(k, x), None), 0, jnp.arange(3))
    assert count[...] == 9
    assert lies_at(count, whole)
    assert lies_at(state, split)


@several
def test_under_shard_map_at_top_level(mesh, split, whole):
    """Where nobody has placed anything, the mesh says where."""
    r, total, odd = refs.new_ref(X), refs.new_ref(np.float32(0)), refs.new_ref(X[:3], name="odd")

    def f(r, total):
        r[...] += 1
        total[...] += jax.lax.psum(r[...].sum(), "x")

    mapped = refs.shard_map(f, mesh=mesh, in_specs=(P("x"), P()), out_specs=P())
    for _ in range(2):
        mapped(r, total)
    np.testing.assert_array_equal(r, X + 2)
    assert total[...] == 2 * X.sum() + 16 * 3
    assert lies_at(r, split)
    assert lies_at(total, whole)
    with pytest.raises(ValueError, match="divi"):
        mapped(odd, total)
    np.testing.assert_array_equal(odd, X[:3])


@several
def test_going_along_with_another_device():
    state, count = refs.new_ref(X, sharding=jax.devices()[2]), refs.new_ref(0)
    for _ in range(2):
        step(state, count)
    assert count[...] == 2
    assert count.devices() == {jax.devices()[2]}


@pytest.mark.as_released
@several
def test_pointers_stay(split):
    state, count = refs.new_ref(X, sharding=split), refs.new_ref(0)
    step(state, count)

    def pointers():
        shards = (s.data for r in (state, count) for s in buffer_of(r).addressable_shards)
        return [x.unsafe_buffer_pointer() for x in shards]

    first = pointers()
    for _ in range(100):
        step(state, count)
    assert pointers() == first
