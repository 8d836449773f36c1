"""Custom derivatives of functions that close over refs of an enclosing trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs

same = np.testing.assert_allclose


def with_jvp(r):
    @jax.custom_jvp
    def f(x):
        r[...] *= 0.5
        return x * r[...]

    f.defjvp(lambda p, t: (f(*p), 10 * t[0] * r[...]))
    return f


def with_vjp(r):
    @jax.custom_vjp
    def f(x):
        r[...] *= 0.5
        return x * r[...]

    f.defvjp(lambda x: (f(x), r[...]), lambda w, g: (10 * g * w,))
    return f


def with_backward_effect(r):
    f = jax.custom_vjp(lambda x: 2 * x)

    def backward(_, g):
        r[...] *= 0.5
        return (10 * g * r[...],)

    f.defvjp(lambda x: (f(x), None), backward)
    return f


DERIVATIVES = {
    "grad": refs.grad,
    "vjp": lambda f: lambda x: refs.vjp(f, x)[1](1.0)[0],
    "jacrev": refs.jacrev,
    "jvp": lambda f: lambda x: refs.jvp(f, (x,), (1.0,))[1],
    "linearize": lambda f: lambda x: refs.linearize(f, x)[1](1.0),
    "jacfwd": refs.jacfwd,
    "hessian": lambda f: lambda x: refs.hessian(lambda x: x * f(x))(x) / 2,
}
ENCLOSING = {
    "top level": lambda f: f,
    "jit": refs.jit,
    "jit in jit": lambda f: refs.jit(lambda r, x: jax.jit(lambda x: f(r, x))(x)),
    "vmap": lambda f: lambda r, x: refs.vmap(f, in_axes=(0, None))(rows(r), x)[0],
    "grad": lambda f: refs.grad(lambda r, x: f(r, x) * x, 1),
    "jit of grad": lambda f: refs.jit(refs.grad(lambda r, x: f(r, x) * x, 1)),
    "scan": lambda f: lambda r, x: refs.scan(lambda _, x: (None, f(r, x)), None, x[None])[1][0],
    "made inside": lambda f: refs.jit(lambda r, x: f(refs.new_ref(r[...]), x)),
}


def rows(r):
    return refs.new_ref(r[...][None])


@pytest.mark.parametrize("enclosing", ENCLOSING)
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("make", [with_jvp, with_vjp])
def test_the_rule_finds_the_ref(make, derivative, enclosing):
    if make is with_vjp and derivative in ("jvp", "linearize", "jacfwd", "hessian"):
        pytest.skip("JAX has no forward mode for custom_vjp")
    r = refs.new_ref(8.0)
    program = ENCLOSING[enclosing](lambda r, x: DERIVATIVES[derivative](make(r))(x))
    same(program(r, jnp.float32(1.5)), 40)
    assert r[...] == (8 if enclosing in ("vmap", "made inside") else 4)


@pytest.mark.parametrize("enclosing", ENCLOSING)
@pytest.mark.parametrize("derivative", ["grad", "vjp"])
def test_a_backward_rule_finds_the_ref(derivative, enclosing):
    r = refs.new_ref(8.0)
    derive = DERIVATIVES[derivative]
    program = ENCLOSING[enclosing](lambda r, x: derive(with_backward_effect(r))(x))
    same(program(r, jnp.float32(1.5)), 40)
    assert r[...] == (8 if enclosing in ("vmap", "made inside") else 4)


def test_one_jaxpr_called_with_two_refs():
    """Each backward rule touches the ref of its own call."""
    a, b = refs.new_ref(8.0), refs.new_ref(16.0)
    f = jax.jit(lambda r, x: with_backward_effect(r)(x) + r[...])
    same(refs.grad(lambda x: f(a, x) + f(b, x))(1.5), 40 + 80)
    same([a[...], b[...]], [4, 8])


@pytest.mark.parametrize("enclosing", ENCLOSING)
@pytest.mark.parametrize(
    "within",
    [lambda f: f, jax.jit, refs.jit, jax.checkpoint, refs.checkpoint],
    ids=["once", "jit", "refs.jit", "checkpoint", "refs.checkpoint"],
)
def test_a_rule_that_allows_only_some_arguments_to_be_differentiated(within, enclosing):
    """As Equinox's `filter_custom_vjp`: only the derivative itself can trace it."""

    def program(r, x):
        f = jax.custom_vjp(lambda x, y: x * y * r[...])

        def forward(x, y):
            if y.perturbed:
                raise ZeroDivisionError
            return f(x.value, y.value), r[...] * y.value

        f.defvjp(forward, lambda w, g: (10 * g * w, None), symbolic_zeros=True)
        return refs.grad(within(lambda x: f(x, 3.0)))(x)

    r = refs.new_ref(8.0)
    same(ENCLOSING[enclosing](program)(r, jnp.float32(1.5)), 240)


@pytest.mark.parametrize("inner", ["jvp", "vjp"])
@pytest.mark.parametrize("outer", ["jvp", "vjp"])
def test_a_custom_function_over_a_ref_made_in_another(inner, outer, jit):
    """Its rule isn't needed: the function around it has its own."""
    scale = {
        "jvp": jax.custom_jvp(lambda r, x: r[...] * x),
        "vjp": jax.custom_vjp(lambda r, x: r[...] * x),
    }[inner]
    if inner == "jvp":
        scale.defjvp(lambda primals, tangents: 1 / 0)
    else:
        scale.defvjp(lambda r, x: 1 / 0, lambda _, g: 1 / 0)

    def double(x):
        return scale(refs.new_ref(2.0), x)

    if outer == "jvp":
        f = jax.custom_jvp(double)
        f.defjvp(lambda primals, tangents: (double(*primals), 2 * tangents[0]))
    else:
        f = jax.custom_vjp(double)
        f.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))
    assert jit(refs.grad(lambda x: f(x) ** 2))(3.0) == 24
