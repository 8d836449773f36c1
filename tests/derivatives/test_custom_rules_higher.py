"""Backward rules that call the function that they are the rule of, as those of fixed points do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs


def calls_itself():
    """e^x, and a ref that counts the calls."""
    n = refs.new_ref(0, name="n")

    @jax.custom_vjp
    def exp(x):
        n[...] += 1
        return jnp.exp(x)

    exp.defvjp(lambda x: (exp(x), x), lambda x, g: (g * exp(x),))
    return exp, n


def mean_of_lanes(f):
    return lambda x: refs.vmap(f)(x * jnp.ones(2)).mean()


# How often JAX calls it: a rule whose result nothing depends on isn't asked.
SECOND = {
    "grad of grad": (lambda f: refs.grad(refs.grad(f))(1.0), 3),
    "jit": (lambda f: refs.jit(refs.grad(refs.grad(f)))(1.0), 3),
    "grad of jit of grad": (lambda f: refs.grad(refs.jit(refs.grad(f)))(1.0), 3),
    "value and grad": (lambda f: refs.value_and_grad(refs.grad(f))(1.0)[1], 3),
    "jacrev of grad": (lambda f: refs.jacrev(refs.grad(f))(1.0), 3),
    "lanes": (lambda f: refs.vmap(refs.grad(refs.grad(f)))(jnp.ones(2))[0], 6),
    "jit of lanes": (lambda f: refs.jit(refs.vmap(refs.grad(refs.grad(f))))(jnp.ones(2))[1], 6),
    "of lanes": (lambda f: refs.grad(refs.grad(mean_of_lanes(f)))(1.0), 6),
    "third": (lambda f: refs.grad(refs.grad(refs.grad(f)))(1.0), 4),
    "third, jit": (lambda f: refs.jit(refs.grad(refs.grad(refs.grad(f))))(1.0), 4),
    "third of lanes": (lambda f: refs.grad(refs.grad(refs.grad(mean_of_lanes(f))))(1.0), 8),
    "third of lanes, jit": (
        lambda f: refs.jit(refs.grad(refs.grad(refs.grad(mean_of_lanes(f)))))(1.0),
        8,
    ),
}


@pytest.mark.parametrize("name", SECOND)
def test_higher_derivatives_where_the_rule_calls_the_function(name):
    exp, n = calls_itself()
    derivative, calls = SECOND[name]
    np.testing.assert_allclose(derivative(exp), np.exp(1), rtol=1e-6)
    assert n[...] == calls
