"""`refs.tree`: the functions of a ref over trees of refs."""

import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import NamedSharding, P
from jax.sharding import AxisType

import refs
from refs.errors import RefStateError, RefTypeError, RefValueError
from tests.placement import addresses

N = jax.device_count()
several = pytest.mark.skipif(N != 8, reason="test_several_devices.py runs this on eight")


class Model(NamedTuple):
    w: object
    key: object
    act: object = jnp.tanh
    n: int = 3


def model():
    return Model(jnp.arange(6.0).reshape(2, 3), jax.random.key(1))


def values(tree):
    def value(x):
        x = x[...] if isinstance(x, jax.Ref) else x
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return np.array(jax.random.key_data(x))
        return np.array(x) if isinstance(x, jax.Array | np.ndarray) else x

    return jax.tree.map(value, tree)


def same(a, b):
    a, b = values(a), values(b)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if isinstance(x, np.ndarray):
            np.testing.assert_array_equal(x, y)
        else:
            assert x is y or x == y


def test_new_ref_names_refs_after_their_places_and_leaves_the_rest():
    state = refs.tree.new_ref({"a": [model()], "b": np.float32(2), "n": 4}, name="s")
    assert state["a"][0].w.name == "s['a'][0].w"
    assert state["b"].name == "s['b']"
    assert state["n"] == 4
    assert state["a"][0].act is jnp.tanh
    same(state["a"][0], model())
    assert refs.tree.new_ref(jnp.ones(2)).name is None
    assert refs.tree.new_ref(jnp.ones(2), name="x").name == "x"


def test_empty_ref_makes_zeros_of_types():
    types = {**jax.eval_shape(lambda: {"w": jnp.ones((2, 3)), "n": jnp.int8(0)}), "f": jnp.tanh}
    state = refs.tree.empty_ref(types, name="s")
    same(state, {"w": jnp.zeros((2, 3)), "n": jnp.int8(0), "f": jnp.tanh})
    assert state["w"].name == "s['w']"


def test_errors_name_the_leaf():
    state = refs.tree.new_ref({"w": jnp.ones(3)})
    with pytest.raises(RefValueError, match=r"ref `\['w'\]` \(created at test_tree.py"):
        state["w"][...] = jnp.ones(4)


def test_get_gives_separate_arrays():
    state = refs.tree.new_ref(model())
    got = refs.tree.get(state)
    same(got, model())
    state.w[...] = 0
    same(got, model())


@pytest.mark.as_released
def test_set_keeps_the_memory():
    state = refs.tree.new_ref(model())
    where = state.w.unsafe_buffer_pointer()
    new = Model(state.w[...] + 1, jax.random.key(7))
    refs.tree.set(state, new)
    same(state, new)
    assert state.w.unsafe_buffer_pointer() == where
    refs.tree.set(state, new._replace(w=np.zeros((1, 3))))  # broadcast, from NumPy's float64
    np.testing.assert_array_equal(state.w, np.zeros((2, 3)))


def test_swap_returns_the_old_values():
    state = refs.tree.new_ref(model())
    old = refs.tree.swap(state, Model(0, jax.random.key(7)))
    same(old, model())
    same(state, Model(jnp.zeros((2, 3)), jax.random.key(7)))


@pytest.mark.parametrize("doing", [refs.tree.set, refs.tree.swap])
def test_a_value_that_does_not_fit_changes_nothing(doing):
    state = refs.tree.new_ref({"a": jnp.ones(2), "b": jnp.ones(3)}, name="s")
    with pytest.raises(RefValueError, match=r"ref `s\['b'\]`"):
        doing(state, {"a": 5, "b": jnp.ones(4)})
    with pytest.raises(RefTypeError, match=r"ref `s\['b'\]`"):
        doing(state, {"a": 5, "b": 1j})
    same(state, {"a": jnp.ones(2), "b": jnp.ones(3)})


@pytest.mark.parametrize(
    ("old", "new", "is_lost"),
    [
        (0, 1, True),
        (0, 0, False),
        (2.5, np.float32(2.5), False),
        (np.arange(3), jnp.arange(3), False),
        (np.arange(3), np.arange(4), True),
        (jnp.arange(3), jnp.zeros(3), True),
        ("adam", "sgd", False),
        (abs, len, False),
        ("adam", 1, True),
    ],
)
def test_values_without_a_ref(old, new, is_lost):
    """Nothing is lost silently: a number or array that differs is an error."""
    r = refs.new_ref(0.0, name="r")
    if is_lost:
        with pytest.raises(RefValueError, match=r"at `\['other'\]`"):
            refs.tree.set({"r": r, "other": old}, {"r": 1.0, "other": new})
        assert float(r) == 0.0
    else:
        refs.tree.set({"r": r, "other": old}, {"r": 1.0, "other": new})
        assert float(r) == 1.0


def test_traced_values_without_a_ref():
    r = refs.new_ref(0.0)

    @refs.jit
    def step(x):
        refs.tree.set({"r": r, "n": 0}, {"r": x, "n": x})

    with pytest.raises(RefValueError, match=r"at `\['n'\]`"):
        step(1.0)


def test_a_ref_at_two_places():
    r = refs.new_ref(jnp.ones(2), name="r")
    state = {"a": r, "b": r, "c": refs.new_ref(0)}
    refs.tree.set(state, {"a": 1, "b": 2, "c": 3})
    np.testing.assert_array_equal(r, [2, 2])
    copied = refs.tree.copy(state)
    assert copied["a"] is copied["b"] is not r
    assert copied["a"].name == "r"
    r[...] = 0
    np.testing.assert_array_equal(copied["a"], [2, 2])
    got = refs.tree.freeze(state)
    np.testing.assert_array_equal(got["a"], [0, 0])
    assert got["a"] is got["b"]
    with pytest.raises(RefStateError, match="frozen"):
        r[...]


@pytest.mark.parametrize("ending", [refs.tree.freeze, refs.tree.free_ref])
def test_endings_end_all_or_none(ending):
    state = refs.tree.new_ref([jnp.ones(2), jnp.ones(3)])
    refs.free_ref(state[1])
    with pytest.raises(RefStateError, match=r"ref `\[1\]`"):
        ending(state)
    np.testing.assert_array_equal(state[0], [1, 1])
    ending(state[:1])
    with pytest.raises(RefStateError):
        state[0][...]


def test_abstract():
    state = refs.tree.new_ref({"w": jnp.ones(2), "f": jnp.tanh})
    found = refs.tree.abstract({**state, "x": np.ones(3, np.int8)})
    assert (found["w"].shape, found["w"].dtype, found["w"].is_ref) == ((2,), jnp.float32, True)
    assert found["w"].sharding is None  # nobody has placed it
    assert found["f"] is jnp.tanh
    assert (found["x"].shape, found["x"].dtype, found["x"].is_ref) == ((3,), jnp.int8, False)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    state["w"] = refs.new_ref(jnp.ones(2), sharding=device)
    found = refs.tree.abstract({**state, "c": refs.new_ref(0)})
    assert found["w"].sharding == found["c"].sharding == device  # a counter goes along


def test_traced():
    state = refs.tree.new_ref({"w": jnp.ones(2), "c": jnp.int32(0)})

    @refs.jit
    def step(state):
        inner = refs.tree.copy(state)
        before = refs.tree.swap(state, {"w": state["w"][...] * 3, "c": 1})
        refs.tree.set(inner, {"w": 7, "c": 8})
        assert refs.tree.abstract(state)["w"].shape == (2,)
        return before, refs.tree.get(inner), refs.tree.freeze(inner)

    before, inner, frozen = step(state)
    same(before, {"w": jnp.ones(2), "c": 0 * before["c"]})
    same(inner, {"w": jnp.full(2, 7.0), "c": jnp.int32(8)})
    same(frozen, inner)
    same(state, {"w": jnp.full(2, 3.0), "c": jnp.int32(1)})


def test_jax_own_refs():
    state = {"w": jax.new_ref(jnp.ones(2)), "c": refs.new_ref(1)}
    refs.tree.set(state, {"w": 2, "c": 3})
    same(refs.tree.get(state), {"w": jnp.full(2, 2.0), "c": jnp.int32(3)})
    with refs.tree.borrow(state) as arrays:
        same(arrays, {"w": jnp.full(2, 2.0), "c": jnp.int32(3)})


# --- Lending ---


@pytest.mark.as_released
def test_borrowed_arrays_are_the_memory_itself():
    state = refs.tree.new_ref(model())
    with refs.tree.borrow(state) as arrays:
        assert arrays.w.unsafe_buffer_pointer() == state.w.unsafe_buffer_pointer()
        same(arrays, model())
        np.testing.assert_array_equal(state.w[0], [0, 1, 2])  # reads go on
        assert arrays.act is jnp.tanh
        del arrays
    where = state.w.unsafe_buffer_pointer()
    refs.jit(lambda w: w.addupdate(1))(state.w)
    assert state.w.unsafe_buffer_pointer() == where


@pytest.mark.parametrize("write", [lambda r: r.set(0), refs.jit(lambda r: r.set(0))])
def test_writes_inside_the_block_are_errors(write):
    state = refs.tree.new_ref({"w": jnp.ones(2), "other": jnp.ones(2)})
    with refs.tree.borrow(state["w"]) as w:
        with pytest.raises(RefStateError, match=r"ref `\['w'\]` .* inside a block .*borrow"):
            write(state["w"])
        write(state["other"])
        np.testing.assert_array_equal(w, [1, 1])
    write(state["w"])
    same(state, {"w": jnp.zeros(2), "other": jnp.zeros(2)})


def test_other_threads_wait():
    r = refs.new_ref(jnp.zeros(2))
    began, seen = threading.Event(), []

    def write():
        began.set()
        r[...] = 1
        seen.append("written")

    with refs.tree.borrow([r]) as [x]:
        thread = threading.Thread(target=write)
        thread.start()
        began.wait()
        thread.join(0.3)
        assert not seen
        np.testing.assert_array_equal(x, [0, 0])
    thread.join()
    np.testing.assert_array_equal(r, [1, 1])


def test_an_error_in_the_block_gives_the_refs_back():
    r = refs.new_ref(jnp.zeros(2))
    with pytest.raises(KeyError), refs.tree.borrow(r):
        raise KeyError
    r[...] = 1


def test_borrowing_waits_for_a_writer():
    r = refs.new_ref(jnp.zeros(()))

    def callback(x):
        started.set()
        done.wait(10)
        return x + 1

    @refs.jit
    def step(r):
        r[...] = refs.io_callback(callback, jax.ShapeDtypeStruct((), jnp.float32), r[...])

    started, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=step, args=(r,))
    thread.start()
    started.wait()
    threading.Timer(0.2, done.set).start()
    with refs.tree.borrow(r) as x:
        assert done.is_set()
        assert float(x) == 1
    thread.join()


# --- On a mesh ---


@pytest.mark.as_released
@several
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_trees(kind):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    split, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    tree = {"a": {"w": np.arange(16.0, dtype=np.float32), "v": np.ones(8)}, "c": np.int32(1)}
    state = refs.tree.new_ref(tree, sharding={"a": split, "c": None})
    assert state["a"]["w"].sharding.is_equivalent_to(split, 1)
    assert not state["c"]._store.is_placed
    described = refs.tree.abstract(state)
    assert described["a"]["w"].sharding.is_equivalent_to(split, 1)
    assert described["c"].sharding == whole  # it goes along
    assert refs.tree.abstract(state, sharding=whole)["c"].sharding == whole

    where = addresses(state["a"])
    compiled = refs.jit(lambda s: [r.addupdate(0) for r in jax.tree.leaves(s)]).lower(described)
    assert "all-gather" not in compiled.compile().as_text()
    empty = refs.tree.empty_ref(described, sharding={"a": None, "c": jax.devices()[1]})
    assert empty["a"]["w"].sharding.is_equivalent_to(split, 1)
    assert empty["c"].devices() == {jax.devices()[1]}
    # From the host, from one device, and from another sharding.
    for place in (np.asarray, jnp.asarray, lambda x: jax.device_put(x, whole)):
        new = jax.tree.map(lambda x, place=place: place(x + 1), tree)
        refs.tree.set(state, new)
        same(state, jax.tree.map(lambda x: jnp.asarray(x + 1), tree))
        assert addresses(state["a"]) == where
        assert state["a"]["w"].sharding.is_equivalent_to(split, 1)
    other = refs.tree.copy(state)
    assert other["a"]["w"].sharding.is_equivalent_to(split, 1)


@several
def test_a_tree_is_resharded_and_errors_name_the_leaf():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    state = refs.tree.new_ref({"a": np.arange(8.0), "b": np.arange(3.0)}, sharding=whole)
    refs.tree.reshard(state, {"a": split, "b": None})
    assert state["a"].sharding.is_equivalent_to(split, 1)
    assert state["b"].sharding.is_equivalent_to(whole, 1)
    np.testing.assert_array_equal(state["a"], np.arange(8))
    with pytest.raises(ValueError, match="divi") as info:
        refs.tree.new_ref({"a": np.arange(8.0), "b": np.arange(3.0)}, sharding=split, name="s")
    assert info.value.__notes__[-1] == "tree.new_ref: at `s['b']`"


@pytest.mark.as_released
@several
def test_the_shards_of_a_training_state_stay_for_a_thousand_steps():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    both, one = NamedSharding(mesh, P("data", "model")), NamedSharding(mesh, P("model"))
    params = {"w": np.ones((8, 4), np.float32), "b": np.zeros(4, np.float32)}
    places = {"w": both, "b": one}
    state = refs.tree.new_ref(
        {"params": params, "moments": params, "count": np.int32(0)},
        sharding={"params": places, "moments": places, "count": NamedSharding(mesh, P())},
    )

    def loss(params, x):
        return jnp.mean((x @ params["w"][...] + params["b"][...] - 1) ** 2)

    @refs.jit
    def step(state, x):
        value, grads = refs.value_and_grad(loss)(state["params"], x)
        for m, g in zip(jax.tree.leaves(state["moments"]), jax.tree.leaves(grads), strict=True):
            m[...] = 0.9 * m[...] + g
        for p, m in zip(*map(jax.tree.leaves, (state["params"], state["moments"])), strict=True):
            p[...] -= 0.01 * m[...]
        state["count"][...] += 1
        return value

    x = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P("data")))
    first, where = step(state, x), addresses(state)
    for _ in range(1000):
        # Programs of the CPU's devices wait for each other: a few in flight can take all threads.
        last = step(state, x).block_until_ready()
    assert addresses(state) == where
    assert state["count"][...] == 1001
    assert last < 1e-3 * first
