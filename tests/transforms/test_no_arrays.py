"""Leaves that are no arrays: only those that a transformation takes must be arrays or refs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs.errors import RefTypeError

X = np.arange(1.0, 4.0, dtype=np.float32)


def scaled(x, model):
    return (x * model["w"][...]).sum() * len(model["name"])


@pytest.mark.parametrize("jit", [lambda f: f, refs.jit], ids=["eager", "jit"])
def test_what_is_not_differentiated_or_mapped_may_be_anything(jit):
    model = {"w": refs.new_ref(X), "name": "abc"}
    np.testing.assert_array_equal(jit(lambda: refs.grad(scaled)(X, model))(), 3 * X)
    np.testing.assert_array_equal(jit(lambda: refs.grad(scaled)(X, model=model))(), 3 * X)
    lanes = jit(lambda: refs.vmap(scaled, in_axes=(0, {"w": 0, "name": None}))(X, model))
    np.testing.assert_array_equal(lanes(), 3 * X * X)


@pytest.mark.parametrize(
    "leaf", ["text", jnp.tanh, {1}, object], ids=["text", "function", "set", "class"]
)
@pytest.mark.parametrize("transform", [refs.grad, refs.vmap, refs.hessian, refs.jacfwd])
def test_the_error_is_a_type_error_as_jaxs(transform, leaf):
    with pytest.raises(RefTypeError, match=r"`args\[0\]\[1\]` is of type \w+, no array and no ref"):
        transform(lambda pair: pair[0][...].sum())((refs.new_ref(X), leaf))
    with pytest.raises(TypeError, match=r"a valid JAX type|abstract array") as told:
        transform(lambda pair: pair[0].sum())((X, leaf))  # Without refs it is JAX's own.
    assert not isinstance(told.value, RefTypeError)


def test_of_numbers_nothing_is_refused():
    r = refs.new_ref(X)
    grads = refs.grad(lambda given: (given[0][...] * given[1] * given[2]).sum())
    np.testing.assert_array_equal(grads((r, 2.0, jnp.float32(3)))[0], [6, 6, 6])
    key = jax.random.key(0)
    draws = refs.vmap(lambda given: given[0][...] * jax.random.uniform(given[1]))
    assert draws((r, jax.random.split(key, 3))).shape == (3,)
