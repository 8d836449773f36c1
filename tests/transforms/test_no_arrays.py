"""Leaves that are no arrays: only those that a transformation takes must be arrays or refs."""

import re

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


def text_of(call):
    with pytest.raises((TypeError, AttributeError)) as told:
        call()
    return re.sub(r"0x\w+", "", str(told.value))


def branch(*args):
    return 1.0


def pair(x, y=None):
    return x, x


LOOPS = {
    "cond": lambda m, x: m.cond(True, branch, branch, 1.0, {"a": x}),
    "predicate": lambda m, x: m.cond(x, branch, branch, 1.0),
    "switch": lambda m, x: m.switch(1, [branch, branch], x),
    "scan": lambda m, x: m.scan(pair, {"a": x, "b": 1.0}, jnp.ones(3)),
    "rows": lambda m, x: m.scan(pair, 1.0, {"a": x, "b": jnp.ones(3)}),
    "map": lambda m, x: m.map(pair, {"a": x}),
    "batches": lambda m, x: m.map(pair, x, batch_size=2),
    "while_loop": lambda m, x: m.while_loop(lambda x: False, lambda x: x, [x]),
    "fori_loop": lambda m, x: m.fori_loop(0, 3, lambda i, x: x, [x]),
}
CALLS = {
    "checkpoint": lambda m, x: m.checkpoint(pair)(x),
    "static": lambda m, x: m.checkpoint(pair, static_argnums=0)("s", y={"a": x}),
    "make_jaxpr": lambda m, x: m.make_jaxpr(pair)(1.0, y={"a": x}),
    "static jaxpr": lambda m, x: m.make_jaxpr(pair, static_argnums=0)("s", (x,)),
}


@pytest.mark.parametrize("leaf", ["text", jnp.tanh, object], ids=["text", "function", "class"])
@pytest.mark.parametrize("name", [*LOOPS, *CALLS])
def test_without_refs_the_error_is_jaxs(name, leaf):
    call = LOOPS.get(name) or CALLS[name]
    jaxs = jax.lax if name in LOOPS else jax
    expected = text_of(lambda: call(jaxs, leaf))
    assert text_of(lambda: call(refs, leaf)) == expected
    if name not in CALLS:
        assert text_of(lambda: refs.jit(call, static_argnums=(0, 1))(refs, leaf)) == expected


def test_of_numbers_nothing_is_refused():
    r = refs.new_ref(X)
    grads = refs.grad(lambda given: (given[0][...] * given[1] * given[2]).sum())
    np.testing.assert_array_equal(grads((r, 2.0, jnp.float32(3)))[0], [6, 6, 6])
    key = jax.random.key(0)
    draws = refs.vmap(lambda given: given[0][...] * jax.random.uniform(given[1]))
    assert draws((r, jax.random.split(key, 3))).shape == (3,)
