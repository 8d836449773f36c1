"""The user's own exceptions come out of a traced function as they are, whatever they say."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import refs

X = jnp.arange(3.0)


class Fake:
    """A class of the user's, called like one in JAX."""


class ValAccum:
    """Another."""


def raising(error):
    def fail():
        raise error

    return fail


def raising_in_a_loop(error):
    return lambda: lax.scan(lambda c, _: raising(error)(), 0.0, None, length=2)


# What JAX says in its own errors about refs is in these, by accident.
FAILURES = {
    "attribute": (lambda: Fake().value, AttributeError),
    "another attribute": (lambda: ValAccum().value, AttributeError),
    "by getattr": (lambda: getattr(Fake(), "value"), AttributeError),  # noqa: B009
    "item": (lambda: {}["mutable array"], KeyError),
    "by pop": (lambda: {}.pop("mutable array"), KeyError),
    "a number": (lambda: float("cannot be returned"), ValueError),
    "raised": (raising(TypeError("Ref-typed argument")), TypeError),
    "raised in a loop": (raising_in_a_loop(ValueError("incompatible devices")), ValueError),
    "with a word": (raising(ValueError("vmapped value on an unbatched")), ValueError),
    "of shards": (raising(ValueError("no such shard")), ValueError),
}


def with_a_rule(f, doing):
    """`doing` gets a custom function whose backward rule fails."""
    g = jax.custom_vjp(lambda x: x)
    g.defvjp(lambda x: (x, None), lambda _, ct: (f(ct),))
    return doing(g)


def in_a_nested_jit(f):
    return refs.jit(lambda r: refs.jit(lambda r: f(r[0]))(r) + 1)(refs.new_ref(X))


CALLERS = {
    "jit": lambda f: refs.jit(f)(1.0),
    "jit of a ref": lambda f: refs.jit(lambda r: f(r[0]))(refs.new_ref(X)),
    "a nested jit": in_a_nested_jit,
    "lower": lambda f: refs.jit(lambda r: f(r[0])).lower(refs.new_ref(X)),
    "grad": lambda f: refs.grad(f)(1.0),
    "grad in jit": lambda f: refs.jit(refs.grad(f))(1.0),
    "vjp": lambda f: refs.vjp(f, 1.0),
    "jvp": lambda f: refs.jvp(f, (1.0,), (1.0,)),
    "linearize": lambda f: refs.linearize(f, 1.0),
    "jacobian": lambda f: refs.jacrev(f)(X),
    "vmap": lambda f: refs.vmap(f)(X),
    "scan": lambda f: refs.scan(lambda c, x: (c, f(x)), 0, X),
    "while_loop": lambda f: refs.while_loop(lambda x: x < 3, f, 1.0),
    "fori_loop": lambda f: refs.fori_loop(0, 3, lambda _, x: f(x), 1.0),
    "cond": lambda f: refs.cond(True, f, f, 1.0),
    "map": lambda f: refs.map(f, X),
    "checkpoint": lambda f: refs.grad(refs.checkpoint(f))(1.0),
    "reversible": lambda f: refs.reversible(f)(1.0),
    "functionalize": lambda f: refs.functionalize(lambda r: f(r[0]))(X),
    "make_jaxpr": lambda f: refs.make_jaxpr(f)(1.0),
    "in_place": lambda f: jax.jit(refs.in_place(f))(1.0),
    "a rule": lambda f: with_a_rule(f, lambda g: refs.grad(g)(1.0)),
    "a rule in jit": lambda f: with_a_rule(f, lambda g: refs.jit(refs.grad(g))(1.0)),
    "a rule over a ref": lambda f: with_a_rule(
        f, lambda g: refs.jit(refs.grad(lambda r: g(r[0])))(refs.new_ref(X))
    ),
}


@pytest.mark.parametrize("fail, kind", FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("caller", CALLERS.values(), ids=CALLERS)
def test_it_comes_out_as_it_is(caller, fail, kind):
    with pytest.raises(Exception) as alone:  # noqa: PT011  # of any class
        fail()
    r = refs.new_ref(0.0)

    def f(x):
        r[...] += jnp.sum(x)
        return x + fail()

    with pytest.raises(Exception) as caught:  # noqa: PT011
        caller(f)
    assert type(caught.value) is kind
    assert str(caught.value) == str(alone.value)
    assert r[...] == 0.0
