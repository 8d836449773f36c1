"""`refs.pack`: what it makes, and that operations outside of `jit` act on their own part only.

With `pytest --packed` every test's refs are packed ones.
"""

import copy
import gc
import pickle
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs

in_host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def tree():
    return {"w": jnp.arange(6.0).reshape(2, 3), "b": [jnp.ones(2), np.zeros((), np.float32)]}


def values(packed):
    return jax.tree.map(np.array, packed)


def equal(packed, expected):
    jax.tree.map(np.testing.assert_array_equal, values(packed), expected)


@pytest.mark.as_released
def test_a_tree_of_refs_with_names_and_places():
    packed = refs.pack(tree(), name="params")
    assert jax.tree.structure(packed) == jax.tree.structure(tree())
    assert [r.name for r in jax.tree.leaves(packed)] == [
        "params['b'][0]",
        "params['b'][1]",
        "params['w']",
    ]
    assert all(type(r) is refs.Ref for r in jax.tree.leaves(packed))
    equal(packed, tree())
    start = packed["b"][0].unsafe_buffer_pointer()
    assert packed["b"][1].unsafe_buffer_pointer() == start + 8
    assert packed["w"].unsafe_buffer_pointer() == start + 12
    assert packed["w"].sharding == jnp.zeros(1).sharding
    assert refs.pack([1.0, 2.0])[1].name == "[1]"


@pytest.mark.as_released
def test_each_dtype_has_its_buffer():
    values = [jnp.ones(3, d) for d in ("float32", "int8", "bool", "bfloat16", "complex64")] * 2
    packed = refs.pack(values)
    for r, x in zip(packed, values, strict=True):
        assert r.dtype == x.dtype
        np.testing.assert_array_equal(r[...], x)
    for a, b in zip(packed[:5], packed[5:], strict=True):
        assert b.unsafe_buffer_pointer() == a.unsafe_buffer_pointer() + a.nbytes


@pytest.mark.parametrize(
    "leaf",
    [jnp.zeros(100), jax.random.key(0), jnp.zeros((0, 2)), jax.device_put(jnp.zeros(3), in_host)],
    ids=["large", "key", "empty", "in the host's memory"],
)
def test_leaves_with_a_buffer_of_their_own(leaf):
    packed = refs.pack([1.0, leaf, 2.0], larger_than=100)
    assert packed[1]._store.packed is None
    assert packed[0]._store.packed is not None
    assert packed[1].shape == leaf.shape
    step = refs.jit(lambda rs: [r.set(r[...]) for r in rs] and None)
    step(packed)
    assert float(packed[2]) == 2


def test_one_leaf_or_none_is_not_packed():
    assert refs.pack(3.0)._store.packed is None
    assert refs.pack({}) == {}


def test_in_a_traced_function_refs_are_their_own():
    @refs.jit
    def total(x):
        state = refs.pack({"a": x, "b": 2 * x})
        state["a"][0] += 1
        return state["a"][...] + state["b"][...]

    np.testing.assert_array_equal(total(jnp.ones(2)), [4.0, 3.0])


def test_wide_types_stay_without_x64():
    with jax.enable_x64(True):
        wide = [jnp.ones(2, jnp.float64), jnp.full(2, 1 / 3, jnp.float64)]
    packed = refs.pack(wide)
    assert packed[1].dtype == np.float64
    np.testing.assert_array_equal(np.asarray(packed[1]), np.full(2, 1 / 3))
    assert refs.pack([np.ones(2), np.ones(2)])[0].dtype == np.float32


def test_operations_touch_their_part_only():
    packed = refs.pack(tree())
    expected = values(packed)
    w, (b, s) = packed["w"], packed["b"]

    w[1, ::-1] = jnp.arange(3.0)
    expected["w"][1, ::-1] = np.arange(3)
    b[jnp.array([True, False])] += 2
    expected["b"][0][0] += 2
    s[...] -= 1.5
    expected["b"][1][...] -= 1.5
    refs.addupdate(w, (0, jnp.array([1, 1])), 1.0)
    expected["w"][0, 1] += 2
    equal(packed, expected)

    old = refs.swap(w, 0, 9.0)
    np.testing.assert_array_equal(old, expected["w"][0])
    expected["w"][0] = 9
    w.at[:, 1].multiply(0.5)
    expected["w"][:, 1] *= 0.5
    b.at[1].apply(lambda x: -x)
    expected["b"][0][1] *= -1
    equal(packed, expected)
    assert w[5:].shape == (0, 3)
    w[jnp.int32(-1), 0] = 7.0
    b[jnp.array(17)] = 1.0  # dropped
    expected["w"][-1, 0] = 7
    equal(packed, expected)


@pytest.mark.as_released
@pytest.mark.parametrize(
    "operation",
    [
        lambda r: r.__setitem__(3, 1.0),
        lambda r: r.__setitem__(slice(2, 5), jnp.ones(3)),
        lambda r: refs.addupdate(r, ..., 1.0),
        lambda r: r.__setitem__(jnp.array([1, 2]), 2.0),
    ],
)
def test_a_write_keeps_the_buffer_where_it_is(operation):
    packed = refs.pack([jnp.zeros(1000)] * 8)
    pointers = [r.unsafe_buffer_pointer() for r in packed]
    for _ in range(3):
        operation(packed[5])
    assert [r.unsafe_buffer_pointer() for r in packed] == pointers


def test_the_end_of_one_is_not_that_of_others():
    a, b, c = refs.pack([jnp.zeros(2), jnp.ones(2), jnp.full(2, 2.0)])
    np.testing.assert_array_equal(refs.freeze(b), [1.0, 1.0])
    with pytest.raises(refs.errors.RefStateError, match="which was frozen at test_pack"):
        b[0]
    refs.free_ref(c)
    with pytest.raises(refs.errors.RefStateError, match="which was freed"):
        np.asarray(c)
    assert "frozen" in repr(b)
    a[...] += 1
    np.testing.assert_array_equal(a, [1.0, 1.0])


def test_pickles_and_copies_are_refs_of_their_own():
    packed = refs.pack(tree(), name="p")
    for other in (pickle.loads(pickle.dumps(packed)), copy.deepcopy(packed)):
        assert all(r._store.packed is None for r in jax.tree.leaves(other))
        assert other["w"].name == "p['w']"
        other["w"][...] = 0
    equal(packed, tree())


def test_gradients_loops_and_callbacks_at_top_level():
    packed = refs.pack(tree())
    w, (b, s) = packed["w"], packed["b"]

    def loss(w):
        s[...] += 1
        return (w[...] ** 2).sum() * b[0] + s[...]

    np.testing.assert_array_equal(refs.grad(loss)(w), 2 * w[...])
    assert float(s) == 1

    def body(i, c):
        b[...] += w[0, 1]
        s[...] += 1
        return c

    refs.fori_loop(0, 3, body, 0)
    np.testing.assert_array_equal(b, [4.0, 4.0])

    def callback(mine, also):
        mine += 10
        also[...] = 5

    refs.io_callback(callback, None, b, s)
    np.testing.assert_array_equal(b, [14.0, 14.0])
    assert float(s) == 5
    equal(w, tree()["w"])


def test_a_failing_callback_leaves_the_others():
    a, b, c = refs.pack([jnp.zeros(2), jnp.ones(2), jnp.full(2, 2.0)])

    def callback(x):
        x += 1
        raise ValueError("no")

    with pytest.raises(refs.errors.CallbackError, match="no"):
        refs.io_callback(callback, None, b)
    np.testing.assert_array_equal(np.stack([a[...], c[...]]), [[0, 0], [2, 2]])
    assert set(np.asarray(b)) <= {1.0, 2.0}


def test_without_jit_and_while_jax_looks_for_nans():
    a, b = refs.pack([jnp.zeros(2), jnp.ones(2)])
    with jax.disable_jit():
        a[0] += 1
        refs.jit(lambda: b.set(a[...] + 1))()
    with jax.debug_nans(True):
        a[1] += 1
        refs.jit(lambda: b.addupdate(a[...]))()
        with pytest.raises(FloatingPointError):
            a[...] = a[...] * jnp.inf * 0
    np.testing.assert_array_equal(b, [3.0, 2.0])


def test_threads_that_write_different_ones():
    packed = refs.pack([jnp.zeros(3, jnp.int32)] * 4)
    step = refs.jit(lambda r: r.set(r[...] + 1))

    def work(r):
        for _ in range(100):
            r[...] += 1
            step(r)

    threads = [threading.Thread(target=work, args=(r,)) for r in packed]
    _ = [t.start() for t in threads], [t.join() for t in threads]
    equal(packed, [np.full(3, 200)] * 4)


def test_a_compiled_function_is_for_refs_in_their_order():
    a, b = refs.pack([jnp.float32(0), jnp.float32(0)])
    compiled = refs.jit(lambda r: r.set(r[...] + 1)).lower(a).compile()
    compiled(a)
    with pytest.raises(refs.errors.RefTypeError, match="refs of a pack are of other types"):
        compiled(b)
    equal([a, b], [1.0, 0.0])


def test_a_lost_value_is_told_of_each():
    a, b = refs.pack([jnp.zeros(2), jnp.ones(2)], name="p")
    alone = refs.new_ref(0)
    a._store.cell[0].delete()
    with pytest.raises(refs.errors.RefStateError, match=r"`p\[1\]`.*whose value was lost"):
        b[0]
    with pytest.raises(refs.errors.RefStateError, match=r"`p\[1\]`.*whose value was lost"):
        refs.scan(lambda c, _: (b.set(b[...] + 1), alone.set(1)), None, length=1)
    assert int(alone) == 0

    a, b = refs.pack([jnp.zeros(2), jnp.ones(2)], name="q")

    def losing(c, _):
        b[...] += 1
        a._store.cell[0].delete()  # while it is traced: it is found when the loop is to run
        return c, None

    with pytest.raises(refs.errors.RefStateError, match=r"`q\[1\]`.*whose value was lost"):
        refs.scan(losing, None, length=1)


def test_a_loop_over_some_and_others():
    a, b, c = refs.pack([jnp.zeros(2), jnp.ones(2), jnp.ones(3)])
    alone = refs.new_ref(jnp.zeros(2))

    def body(k, x):
        a[...] += b[...]
        alone[...] += a[...]
        return x

    refs.fori_loop(0, 3, body, 0)
    np.testing.assert_array_equal(a, [3, 3])
    np.testing.assert_array_equal(alone, [6, 6])
    np.testing.assert_array_equal(b[...].sum() + c[...].sum(), 5)


def test_a_derivative_with_a_callback_on_it():
    a, b = refs.pack([jnp.ones(2), jnp.zeros(2)])

    def host(x):
        x += 1

    def loss(x):
        b[...] += 1
        refs.io_callback(host, None, b)
        return (x * a[...]).sum()

    np.testing.assert_array_equal(refs.grad(loss)(jnp.ones(2)), [1, 1])
    np.testing.assert_array_equal(b, [2, 2])


def test_arrays_over_a_mesh_keep_their_buffers():
    mesh = jax.make_mesh((1,), ("x",))
    over = jax.device_put(jnp.ones(2), jax.NamedSharding(mesh, jax.P("x")))
    packed = refs.pack([over, jnp.ones(2), jnp.ones(2)])
    assert [r._store.packed is None for r in packed] == [True, False, False]


def test_jax_functions_read_and_write_it():
    a, b = refs.pack([jnp.arange(3.0), jnp.ones(3)])

    @jax.jit
    def step(r, x):
        r[0] += x
        b[...] = r[...] * 2
        return r[...]

    np.testing.assert_array_equal(step(a, 5.0), [5, 1, 2])
    np.testing.assert_array_equal(b, [10, 2, 4])
    np.testing.assert_array_equal(jax.ref.get(a), [5, 1, 2])
    jax.ref.set(a, 1, 7.0)
    assert isinstance(jax.ref.freeze(a), jax.Array)
    np.testing.assert_array_equal(jnp.sum(jax.ref.freeze(a)), 14)


def test_buffers_are_freed():
    packed = refs.pack([jnp.zeros(2), jnp.ones(2)])
    refs.jit(lambda rs: rs[0].set(rs[1][...]))(packed)
    buffer = weakref.ref(packed[0]._store.cell[0])
    del packed
    gc.collect()
    assert buffer() is None
