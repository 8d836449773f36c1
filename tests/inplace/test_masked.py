"""Scatters of lanes that select between a value and what was there: rows are left out instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import refs
from refs._inplace.masked import drop_masked_rows
from tests.inplace.helpers import assert_in_place, rewritten

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


def modes(jaxpr):
    return [str(e.params["mode"]) for e in jaxpr.eqns if e.primitive is lax.scatter_p]


DROPPED, KEPT = "FILL_OR_DROP", "CLIP"


@pytest.mark.parametrize(
    "step, mode",
    [
        *((f, DROPPED) for f in (element, row, block, twice, and_returned)),
        *((f, KEPT) for f in (part_of_a_row, all_lanes_alike, and_the_selection, elsewhere)),
    ],
)
def test_lanes(step, mode):
    fun = jax.vmap(step)
    rewritten(fun, X, PLACES, MASK)
    jaxpr = jax.make_jaxpr(fun)(X, PLACES, MASK).jaxpr
    new = drop_masked_rows(jaxpr, {})
    assert all(mode in found for found in modes(new))
    assert modes(new)
    # A read that is needed besides stays.
    gathers = [e for e in new.eqns if e.primitive is lax.gather_p]
    assert len(gathers) == (mode == KEPT or step is and_returned)


def test_rows_that_may_be_one_row_are_selected():
    def fun(x, places, mask):
        rows = jnp.where(mask[:, None], 9.0, x.at[places].get(mode="clip"))
        return x.at[places].set(rows, mode="clip")

    jaxpr = jax.make_jaxpr(fun)(X[0], PLACES, MASK).jaxpr
    assert all(KEPT in mode for mode in modes(drop_masked_rows(jaxpr, {})))
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
