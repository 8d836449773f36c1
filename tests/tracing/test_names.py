"""JAX's errors about traced values name the user's function and its argument, as JAX's own do."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from tests.errors.case import X


def origin(call):
    """What JAX says of where a value came from: the function, for what, and the argument."""
    kinds = jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError
    with pytest.raises(kinds) as caught:
        call()
    said = re.search(
        r"tracing the function (\w+|<lambda>) at (\S+?):\d+ for ([\w /]+)\. .*argument (\S+)\.",
        str(caught.value),
    )
    assert said, str(caught.value)
    return said.groups()


def step(r, a, tree, *, flag=1.0):
    value = r[...].sum()
    if tree["k"][0] > 0:
        value += a
    return value * flag


CALLS = {
    "in order": lambda f, r: f(r, 1.0, {"k": [X.sum(), 2.0]}),
    "by name": lambda f, r: f(r, tree={"k": [X.sum(), 2.0]}, flag=2.0, a=1),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("keywords", [{}, {"static_argnames": "flag"}])
def test_jit_says_what_jax_jit_says(call, keywords):
    ours = origin(lambda: call(refs.jit(step, **keywords), refs.new_ref(X)))
    assert ours == origin(lambda: call(jax.jit(step, **keywords), jax.new_ref(X)))
    assert ours == ("step", __file__, "jit", "tree['k'][0]")


def decide(a, b):
    return a + 1 if b > 0 else a


def over(ref):
    """`decide`, after a touch of a ref."""

    def decide_over(a, b):
        ref[...] += 1
        return decide(a, b)

    return decide_over


MEETINGS = {
    "make_jaxpr": (lambda f: refs.make_jaxpr(f)(1.0, 2.0), "jit"),
    "vmap": (lambda f: refs.vmap(f)(X, X), "jit"),
    "in vmap, jit": (lambda f: refs.vmap(refs.jit(f))(X, X), "jit"),
    "in jit": (lambda f: refs.jit(lambda x: refs.jit(f)(x, x))(1.0), "jit"),
    "checkpoint": (lambda f: refs.checkpoint(f)(1.0, 2.0), "checkpoint / remat"),
    "scan": (lambda f: refs.scan(lambda a, b: (decide(a, b), None), 1.0, X), "scan"),
    "fori_loop": (lambda f: refs.fori_loop(0, 3, lambda b, a: decide(a, b), 1.0), "fori_loop"),
    "cond": (lambda f: refs.cond(True, f, f, 1.0, 2.0), "cond"),
    "switch": (lambda f: refs.switch(1, [f, f], 1.0, 2.0), "switch"),
}


@pytest.mark.parametrize("meet, doing", MEETINGS.values(), ids=MEETINGS)
def test_transformations_name_the_argument(meet, doing):
    _, *where = origin(lambda: meet(over(refs.new_ref(jnp.zeros(())))))
    assert where == [__file__, doing, "b"]


def test_what_leaks_says_from_where():
    leaked = []

    def leak(x):
        leaked.append(x + 1)

    refs.jit(leak)(1.0)
    with pytest.raises(jax.errors.UnexpectedTracerError, match=rf"leak at {re.escape(__file__)}"):
        lax.sin(leaked[0])


def test_refs_are_named_too():
    r = refs.new_ref(X)
    got = origin(lambda: refs.jit(lambda state: np.asarray(state["w"]))({"w": r}))
    assert got[1:] == (__file__, "jit", "state['w']")
