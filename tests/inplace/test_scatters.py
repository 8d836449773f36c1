"""Scatters of a few rows, as lanes write them: a loop over the rows, with the same results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import refs
from tests.inplace.helpers import assert_in_place, rewritten
from tests.platforms import as_on_cpu

pytestmark = pytest.mark.as_released

X = jnp.arange(512.0).reshape(8, 64)
ROWS = jnp.array([3, -2, 70, 3, 0])
CUBE = X.reshape(4, 8, 16)


def updated(x, i, v, mode):
    return x.at[i].set(v, mode=mode), x.at[i].add(v, mode=mode)


SCATTERS = {
    "elements": lambda mode: updated(X, (ROWS, ROWS), 5.0, mode),
    "an element of each row": lambda mode: updated(X, (slice(2, 4), ROWS), 1.0, mode),
    "rows of a flat array": lambda mode: updated(X.reshape(128, 4), ROWS, jnp.arange(4.0), mode),
    "two grids": lambda mode: updated(
        CUBE, (ROWS[:2, None], ROWS[None, :3], 5), jnp.arange(6.0).reshape(2, 3), mode
    ),
    "arrays apart": lambda mode: updated(CUBE, (ROWS[:2], slice(0, 2), ROWS[:2]), 2.0, mode),
    "lanes": lambda mode: jax.vmap(lambda x, i, v: updated(x, i, v, mode))(
        X, jnp.arange(-4, 4) * 20, jnp.arange(8.0)
    ),
    "lanes of one array": lambda mode: jax.vmap(lambda i: updated(X.reshape(128, 4), i, 1.0, mode))(
        ROWS[:2]
    ),
    "windows in lanes": lambda mode: jax.vmap(
        lambda row, i: lax.dynamic_update_slice(row, jnp.ones(3), (i,))
    )(X, jnp.arange(8) + 58),
}


def primitives(jaxpr):
    return [eqn.primitive.name for eqn in jaxpr.eqns]


@pytest.mark.parametrize("mode", ["drop", "clip"])
@pytest.mark.parametrize("name", SCATTERS)
def test_a_few_rows_are_written_one_by_one(name, mode):
    new = rewritten(lambda: SCATTERS[name](mode))
    assert not {"scatter", "scatter-add"} & {*primitives(new)}


@pytest.mark.slow
@given(st.data())
def test_any_element_of_any_lane(data):
    n, lanes = data.draw(st.integers(16, 20)), data.draw(st.integers(1, 5))
    places = data.draw(st.lists(st.integers(-30, 30), min_size=lanes, max_size=lanes))
    x = jnp.arange(float(n * lanes)).reshape(lanes, n)

    def step(x, i):
        return lax.cond(i % 2 == 0, lambda: x.at[i].add(1.0), lambda: x.at[i].set(x[i - 1]))

    rewritten(jax.vmap(step), x, jnp.array(places))


def test_many_rows_stay_a_scatter():
    x = jnp.zeros(100_000)
    many = rewritten(lambda x: x.at[jnp.arange(100) * 2].set(1.0), x)
    assert "scatter" in primitives(many)


@as_on_cpu
def test_lanes_of_loops_have_no_scatter():
    """XLA's threads, or passes over all of the array, would take some µs for each."""
    trees = refs.new_ref(jnp.zeros((4, 2**15)))

    def add(tree, k):
        def up(k):
            lax.cond(k % 2 == 0, lambda: tree.at[k].add(1.0), lambda: None)
            return k // 2

        lax.while_loop(lambda k: k > 0, up, k + 2**14)

    def find(tree, k):
        return lax.while_loop(
            lambda c: c[0] > 0, lambda c: (c[0] // 2, c[1] + tree[c[0]]), (k + 2**14, 0.0)
        )[1]

    def both(tree, k):
        add(tree, k)
        return find(tree, k)

    fun, ks = refs.jit(refs.vmap(both)), jnp.array([0, 5, 16_000, 77])
    assert_in_place(fun, trees, ks)
    text = fun.lower(trees, ks).compile().as_text()
    assert "scatter(" not in text
    assert " gather(" not in text
    want = [sum((k + 2**14 >> j) % 2 == 0 for j in range(15)) for k in ks.tolist()]
    np.testing.assert_array_equal(fun(trees, ks), want)


@as_on_cpu
@pytest.mark.parametrize("lanes, loops", [(4, False), (16, True)])
def test_very_few_rows_are_written_without_a_loop(lanes, loops):
    write = jax.vmap(lambda x, i: x.at[i].set(1.0))
    x = jnp.zeros((lanes, 1000))
    compiled = jax.jit(refs.in_place(write)).lower(x, jnp.arange(lanes)).compile()
    assert (" while(" in compiled.as_text()) == loops
