"""Refs that lie on several devices: a small access moves a few elements, and not the whole ref.

The programs run in a process with eight devices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import refs
from refs import _jax
from refs._buffers.operations import buffer_of
from refs._buffers.stores import store_of
from refs._explain.hlo import Module
from refs._indexing import lowering
from refs._indexing.access import Access, Place
from refs._indexing.accesses import read_p, update_p
from refs._indexing.locate import locate
from refs._indexing.lowering import read_in_lax, update_in_lax
from refs._inplace import rewrite
from tests.inplace.helpers import assert_in_place, rewritten

pytestmark = pytest.mark.as_released

N = 4096
V = np.arange(4.0, dtype=np.float32)
K = 100  # where programs begin

several = pytest.mark.skipif(
    jax.device_count() != 8, reason="test_several_devices.py runs this on eight"
)


# --- Rows ---


@st.composite
def blocks(draw):
    """A shape, the sizes of a part of it, and starts, which may be out of bounds."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    sizes = [draw(st.integers(1, n)) for n in shape]
    assume(sizes != shape)
    return shape, sizes, [draw(st.integers(-6, 6)) for _ in shape]


@pytest.mark.slow
@given(blocks(), st.booleans())
def test_rows_are_blocks(block, flag):
    shape, sizes, starts = block
    starts = [*map(jnp.int32, starts)]
    x, value = (1.0 + jnp.arange(np.prod(s)).reshape(s) for s in (shape, sizes))
    dynamic = {"allow_negative_indices": False}
    old = lax.dynamic_slice(x, starts, sizes, **dynamic)
    new = lax.dynamic_update_slice(x, value, starts, **dynamic)
    total = lax.dynamic_update_slice(x, old + value, starts, **dynamic)
    access = Access(tuple(Place(wraps=False) for _ in shape), tuple(sizes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "are_few", lambda block, whole: True)
        got = read_in_lax(x, *starts, access=access, on_several=True)
        np.testing.assert_array_equal(got, old)
        write = functools.partial(update_in_lax, x, value, *starts, on_several=True)
        for method, want in (("set", new), ("add", total)):
            np.testing.assert_array_equal(write(access=access, method=method), want)
            masked = access._replace(is_masked=True)
            got = write(jnp.bool_(flag), access=masked, method=method)
            np.testing.assert_array_equal(got, want if flag else x)


def names(jaxpr):
    """The primitives in a jaxpr, those that accesses are lowered to for several devices."""
    found = set()
    for eqn in jaxpr.eqns:
        inner = [j.jaxpr for j in _jax.jaxprs_in(eqn.params)]
        if fun := {read_p: read_in_lax, update_p: update_in_lax}.get(eqn.primitive):
            lowered = functools.partial(fun, on_several=True, **eqn.params)
            inner = [jax.make_jaxpr(lowered)(*(v.aval for v in eqn.invars)).jaxpr]
        else:
            found.add(eqn.primitive.name)
        found.update(*map(names, inner))
    return found


def on_several(fun, *args):
    """The primitives of a program for several devices. It computes the same: see `rewritten`."""
    rewritten(fun, *args)
    return names(rewrite(jax.make_jaxpr(fun)(*args).jaxpr, on_several=True))


X = jnp.arange(512.0).reshape(128, 4)
ROW = jnp.ones((1, 4))


def test_what_is_there_isnt_read():
    def masked(x, k):
        old = lax.dynamic_slice(x, (k, 0), (1, 4), allow_negative_indices=False)
        new = lax.select(k < 100, old + ROW, old)
        return lax.dynamic_update_slice(x, new, (k, 0), allow_negative_indices=False)

    assert not {"gather", "dynamic_slice"} & on_several(masked, X, 7)
    assert "scatter-add" in on_several(masked, X, 101)


def test_what_is_there_is_read_where_it_is_used():
    def moved(x, k):
        other = lax.dynamic_slice(x, (k + 1, 0), (1, 4))
        new = lax.select(k < 100, ROW, other)
        return lax.dynamic_update_slice(x, new, (k, 0), allow_negative_indices=False)

    found = on_several(moved, X, 7)
    assert {"gather", "scatter"} <= found
    assert "dynamic_update_slice" not in found


def test_a_large_block_stays_a_slice():
    def halves(x, k):
        return lax.dynamic_update_slice(x, lax.dynamic_slice(x, (k, 0), (64, 4)) + 1, (2 * k, 0))

    assert {"dynamic_slice", "dynamic_update_slice"} <= on_several(halves, X, 3)


def test_calls_and_loops_without_updates_are_reached():
    def reads(x, k):
        row = jax.jit(lambda x: lax.dynamic_slice(x, (k, 0), (1, 4)))
        return lax.fori_loop(0, 3, lambda _, total: total + row(x), row(x))

    assert "dynamic_slice" not in on_several(reads, X, 3)


def test_the_gradient_of_a_read_is_added_to_its_buffer():
    def loss(x, k):
        return (lax.dynamic_slice(x, (k, 0), (1, 4)) ** 2).sum() + (x**2).sum()

    found = on_several(jax.grad(loss), X, 3)
    assert "scatter-add" in found


# --- Programs on eight devices ---


def sharding():
    return NamedSharding(jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,)), P("d"))


def write(r, k):
    r[k] = V


def write_an_element(r, k):
    r[k, 1] = 5.0


def write_a_window(r, k):
    r[jax.ds(k, 3)] = V + jnp.float32(k)


def add(r, k):
    r.at[k].add(V)


def multiply(r, k):
    r.at[k].multiply(2.0)


def change(r, k):
    r[k] = r[k] * 2 + V


def swap(r, k):
    r[k], r[k + 1] = r[k + 1], r[k]


def branch(r, k):
    lax.cond(k % 3 == 0, lambda: write(r, k), lambda: add(r, k))


def memo(r, k):
    lax.cond(r[k, 0] > 50, lambda: r[k, 1], lambda: refs.swap(r, (k, 1), 7.0))


def nothing_that_exists(r, k):
    r[k + N] = V


STEPS = [
    *(write, write_an_element, write_a_window, add, multiply, change, swap, branch, memo),
    nothing_that_exists,
]
# These read nothing that another device needs.
SILENT = [write, write_an_element, write_a_window, add, nothing_that_exists]


def looped(step, r, k):
    lax.fori_loop(0, 9, lambda i, _: step(r, k + i), None)


def start():
    return np.arange(4.0 * N, dtype=np.float32).reshape(N, 4) % 101


def collectives(text):
    return [m for m in Module.parse(text).moves() if m.is_collective]


@several
@pytest.mark.parametrize("step", STEPS)
def test_a_loop_moves_only_what_it_touches(step):
    alone = refs.new_ref(start())
    refs.jit(looped, static_argnums=0)(step, alone, K)
    r = refs.new_ref(jax.device_put(start(), sharding()))
    program = refs.jit(functools.partial(looped, step))
    assert_in_place(program, r, K)
    found = collectives(program.lower(r, K).compile().as_text())
    assert all(m.size <= 12 for m in found), found
    assert not (step in SILENT and found)
    before = [s.data.unsafe_buffer_pointer() for s in buffer_of(r).addressable_shards]
    program(r, K)
    after = [s.data.unsafe_buffer_pointer() for s in buffer_of(r).addressable_shards]
    assert before == after
    np.testing.assert_array_equal(r[...], alone[...])


@several
@pytest.mark.parametrize("value", [K, N - 1, N + 3, -2])
def test_rows_after_a_large_block(value):
    """A large block is a slice. XLA before jaxlib 0.11.2 writes rows elsewhere after it."""

    def program(r, k):
        r[jax.ds(k, N // 3)] = 7.0
        r[k] = V
        r.at[k, 2].add(r[k + 1, 1])

    alone, r = refs.new_ref(start()), refs.new_ref(jax.device_put(start(), sharding()))
    for ref in (alone, r):
        refs.jit(program)(ref, jnp.int32(value))
    np.testing.assert_array_equal(r[...], alone[...])


@several
@pytest.mark.parametrize("step", STEPS)
def test_its_gradient_too(step):
    def loss(x):
        r = refs.new_ref(x)
        looped(step, r, K)
        return (r[...] ** 2).sum()

    gradient = refs.jit(refs.grad(loss))
    x = jax.device_put(start(), sharding())
    found = collectives(gradient.lower(x).compile().as_text())
    assert all(m.size < N for m in found), found
    np.testing.assert_allclose(gradient(x), gradient(start()), rtol=1e-6)


@several
@pytest.mark.parametrize("index", [3, (5, 1), slice(5, 9), (slice(7, 8), 2), ([1, 9, 4],), -2])
def test_eagerly_too(index):
    r = refs.new_ref(jax.device_put(start(), sharding()))
    x = start()
    np.testing.assert_array_equal(r[index], x[index])
    r[index] = 5.0
    r.at[index].add(2.0)
    r.at[index].multiply(3.0)
    x[index] = 21.0
    np.testing.assert_array_equal(r[...], x)
    np.testing.assert_array_equal(refs.swap(r, index, 1.0), x[index])
    x[index] = 1.0
    np.testing.assert_array_equal(r[...], x)


@several
@pytest.mark.parametrize("index", [3, (5, 1), slice(5, 9), (slice(7, 8), 2), ([1, 9, 4],), -2])
def test_the_kernels_move_what_they_touch(index):
    r = refs.new_ref(jax.device_put(start(), sharding()))
    kernels, buffer = store_of(r).kernels, buffer_of(r)
    key, operands = locate(r.shape, index, is_read=True, is_simple=False)
    (write, shape), (add, _) = (kernels.updater(key, method) for method in ("set", "add"))
    value = jnp.zeros(shape)
    for lowered in (
        kernels.reader(key).lower(buffer, operands),
        write.lower([buffer], operands, value),
        add.lower([buffer], operands, value),
    ):
        found = collectives(lowered.compile().as_text())
        assert all(m.size <= 16 for m in found), found


# --- What the check says ---


def whole_products(r):
    def step(_, total):
        r.at[0].add(1.0)
        return total + (r[...] @ r[...].T).sum()

    return lax.fori_loop(0, 3, step, 0.0)


def half(r):
    lax.fori_loop(0, 3, lambda k, _: r.set(2.0, idx=jax.ds(k, N // 2)), None)


def reverse(r):
    r[...] = r[::-1]


@several
@pytest.mark.parametrize("spec", [P("a"), P("a", "b"), P(("a", "b"))], ids=str)
@pytest.mark.parametrize("program", [whole_products, half, reverse])
def test_a_collective_is_found(program, spec):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    r = refs.new_ref(jax.device_put(start(), NamedSharding(mesh, spec)), name="r")
    with pytest.raises(
        AssertionError, match=r"it brings .* elements of float32 of ref `r` .* A block of more than"
    ):
        assert_in_place(program, r)


@several
def test_a_sum_of_gradients_is_none():
    w = refs.new_ref(jax.device_put(start(), sharding()))

    def step(x):
        w[...] -= refs.grad(lambda w: (w * x).sum())(w[...])

    assert_in_place(step, jax.device_put(start(), sharding()))
