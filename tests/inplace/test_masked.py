"""Updates that select between a value and what was there: blocks are left out instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import refs
from refs._indexing.accesses import read_p, update_p
from refs._inplace import normal, rows
from tests.inplace.helpers import assert_in_place, normal_form, rewritten

pytestmark = pytest.mark.as_released

X = jnp.arange(4 * 16 * 8.0).reshape(4, 16, 8)
PLACES = jnp.array([3, -2, 40, 15])
WHETHER = jnp.array([6])
MASK = jnp.array([True, False, True, True])


def read(x, start, shape):
    return lax.dynamic_slice(x, start, shape, allow_negative_indices=False)


def write(x, start, new, mask):
    """As the writes of refs are: what was there is written where the mask is false."""
    old = lax.dynamic_slice(x, start, new.shape)
    return lax.dynamic_update_slice(
        x, lax.select(jnp.broadcast_to(mask, new.shape), new, old), start
    )


def element(x, i, mask):
    return write(x, (i, 2), jnp.full((1, 1), 9.0), mask)


def row(x, i, mask):
    return write(x, (i, 0), jnp.full((1, 8), 9.0), mask)


def block(x, i, mask):
    """At the end it is moved back, to be inside."""
    return write(x, (i, i), jnp.full((3, 2), 9.0), mask)


def twice(x, i, mask):
    return block(row(x, i, mask), i + 1, ~mask)


def part_of_a_row(x, i, mask):
    return write(x, (i, 0), jnp.full((1, 8), 9.0), mask & (jnp.arange(8) > 3))


def all_lanes_alike(x, i, mask):
    """The mask is a scalar."""
    old = read(x, (i, 2), (1, 1))
    new = lax.select(WHETHER[0] > 5, jnp.full((1, 1), 9.0), old)
    return lax.dynamic_update_slice(x, new, (i, 2), allow_negative_indices=False)


def and_returned(x, i, mask):
    return element(x, i, mask), read(x, (i, 2), (1, 1))


def and_the_selection(x, i, mask):
    old = read(x, (i, 2), (1, 1))
    new = lax.select(mask[None, None], jnp.full((1, 1), 9.0), old)
    return lax.dynamic_update_slice(x, new, (i, 2), allow_negative_indices=False), new


def elsewhere(x, i, mask):
    """What is written where the mask is false isn't what was there."""
    old = read(x, (i - 1, 2), (1, 1))
    new = lax.select(mask[None, None], old + 1, old)
    return lax.dynamic_update_slice(x, new, (i, 2), allow_negative_indices=False)


def are_masked(jaxpr):
    return [e.params["access"].is_masked for e in jaxpr.eqns if e.primitive is update_p]


@pytest.fixture
def batches(monkeypatch):
    """Accesses of several rows stay one, however few these are."""
    monkeypatch.setattr(normal, "are_few", lambda eqn, access: True)
    monkeypatch.setattr(rows, "are_few", lambda eqn: False)


ALL = [element, row, block, twice, all_lanes_alike, and_returned, and_the_selection]


@pytest.mark.parametrize(
    "step, is_masked", [*((f, True) for f in ALL), (part_of_a_row, False), (elsewhere, False)]
)
def test_lanes(step, is_masked, batches):
    fun = jax.vmap(step)
    rewritten(fun, X, PLACES, MASK)
    new = normal_form(jax.make_jaxpr(fun)(X, PLACES, MASK).jaxpr, is_one_cpu=True)
    assert {*are_masked(new)} == {is_masked}
    # A read that is needed besides stays.
    reads = [e for e in new.eqns if e.primitive is read_p]
    assert len(reads) == (not is_masked or step in (and_returned, and_the_selection))


def test_rows_that_may_be_one_row_are_selected(batches):
    def fun(x, places, mask):
        dims = lax.GatherDimensionNumbers((1, 2), (), (0,))
        old = lax.gather(x, places[:, None], dims, (1, 8), mode="clip")
        flags = lax.broadcast_in_dim(mask, old.shape, (0,))
        rows = lax.select(flags, jnp.full_like(old, 9.0), old)
        dims = lax.ScatterDimensionNumbers((1, 2), (), (0,))
        return lax.scatter(x, places[:, None], rows, dims, mode="clip")

    new = normal_form(jax.make_jaxpr(fun)(X[0], PLACES, MASK).jaxpr, is_one_cpu=True)
    assert are_masked(new) == [False]
    rewritten(fun, X[0], PLACES, MASK)


@given(st.data())
def test_any_places_and_masks(data):
    lanes = data.draw(st.integers(1, 5))
    some = st.lists(st.integers(-20, 20), min_size=lanes, max_size=lanes)
    masks = st.lists(st.booleans(), min_size=lanes, max_size=lanes)
    step = data.draw(st.sampled_from([element, row, block, twice]))
    x = jnp.arange(lanes * 16 * 8.0).reshape(lanes, 16, 8)
    rewritten(jax.vmap(step), x, jnp.array(data.draw(some)), jnp.array(data.draw(masks)))


def test_lanes_over_refs_are_in_place_with_few_fences():
    """Each lane's read of what it masks had to pass a fence of its own."""
    after, before = (refs.new_ref(jnp.tile(jnp.arange(1000), (4, 1))) for _ in range(2))

    def move(after, before, node):
        after[before[node]] = after[node]
        before[after[node]] = before[node]
        after[node], before[node] = before[node], after[node]

    step, nodes = refs.jit(refs.vmap(move)), jnp.array([5, 999, 0, 1000])
    assert_in_place(step, after, before, nodes)
    text = step.lower(after, before, nodes).compile().as_text()
    assert text.count(" conditional(") < 8  # of 16 rows
    want = [np.array(r) for r in (after, before)]
    step(after, before, nodes)
    for a, b, node in zip(*want, nodes, strict=True):
        i = min(int(node), 999)  # A read beyond the end gives the last.
        if (place := b[i]) < 1000:
            a[place] = a[i]
        b[a[i]] = b[i]
        if node < 1000:
            a[node], b[node] = b[node], a[node]
    np.testing.assert_array_equal(after, want[0])
    np.testing.assert_array_equal(before, want[1])
