"""`nested`, the stage for old jaxlibs, on any: a slice of a slice is read behind a barrier."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from refs._inplace.nested import keep_slices_apart
from tests.inplace.helpers import normal_form

pytestmark = pytest.mark.as_released

X = jnp.arange(100.0)


def inner(x, i, k):
    return lax.dynamic_slice(lax.dynamic_slice(x, (i,), (50,)), (k,), (3,))


def in_a_loop(x, i, k):
    block = lax.dynamic_slice(x, (i,), (50,))
    return lax.fori_loop(0, 2, lambda _, y: y + lax.dynamic_slice(block, (k,), (3,)), jnp.zeros(3))


def in_a_branch(x, i, k):
    block = lax.dynamic_slice(x, (i,), (50,))
    read = lambda block: lax.dynamic_slice(block, (k,), (3,))  # noqa: E731
    return lax.cond(k > 0, read, lambda block: block[:3], block)


def seen_through(x, i, k):
    block = lax.dynamic_slice(x, (i,), (50,)).reshape(5, 10)
    return lax.dynamic_slice(block, (k, k), (2, 2))


# Each program, and how many barriers it gets.
PROGRAMS = {
    "of a slice": (inner, 1),
    "in a loop": (in_a_loop, 1),
    "in a branch": (in_a_branch, 1),
    "seen through a reshape": (seen_through, 1),
    "of an array": (lambda x, i, k: lax.dynamic_slice(x * 2, (i,), (3,)) + x[:3], 0),
    "of two arrays": (lambda x, i, k: inner(x, i, k)[:2] + lax.dynamic_slice(x, (k,), (2,)), 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_slices_of_slices(name):
    fun, barriers = PROGRAMS[name]
    closed = jax.make_jaxpr(fun)(X, 0, 0)
    kept = keep_slices_apart(normal_form(closed.jaxpr))
    assert str(kept).count("optimization_barrier") == barriers
    for i, k in ((0, 0), (70, 49), (2, 5)):
        # The places are moved into bounds of the inner slice, whatever lies beyond.
        got = jax.core.eval_jaxpr(kept, closed.consts, X, jnp.int32(i), jnp.int32(k))
        with jax.disable_jit():
            want = fun(X, jnp.int32(i), jnp.int32(k))
        np.testing.assert_array_equal(got[0], want)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32])
def test_short_places_are_widened(dtype):
    def move(x, i):
        return lax.dynamic_update_slice(x, lax.dynamic_slice(x, (i,), (3,)) + 1, (i,))

    lowered = jax.jit(refs.in_place(move)).lower(X, dtype(7)).as_text()
    places = re.findall(r"dynamic_(?:update_)?slice.*(tensor<\S+>)\) ->", lowered)
    assert places == ["tensor<i32>"] * 2
    np.testing.assert_array_equal(jax.jit(refs.in_place(move))(X, dtype(7)), move(X, 7))
