"""Derivative rules that close over arrays, in calls, loops and branches of JAX's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs

X = np.float32(0.25)
OUTSIDE = jnp.arange(3.0)
same = functools.partial(np.testing.assert_allclose, rtol=1e-6)


def with_backward(array):
    f = jax.custom_vjp(lambda x: x * 2)
    f.defvjp(lambda x: (x * 2, x), lambda x, g: (g * array.sum() * x,))
    return f


def with_forward(array):
    f = jax.custom_vjp(lambda x: x * 2)
    f.defvjp(lambda x: (x * array.sum(), x), lambda x, g: (g * x,))
    return f


def with_jvp(array):
    f = jax.custom_jvp(lambda x: x * array.sum())
    f.defjvp(lambda p, t: (p[0] * array.sum(), t[0] * array.sum() * p[0]))
    return f


ARRAYS = {
    "scalar": lambda x: jnp.float32(3),
    "list": lambda x: jnp.array([1.0, 2.0]),
    "computed": lambda x: jnp.arange(3.0) + 1,
    "from outside": lambda x: OUTSIDE,
    "NumPy": lambda x: np.ones(3, np.float32),
    "of the argument": lambda x: lax.stop_gradient(x) + OUTSIDE,
}
PLACES = {
    "alone": lambda f: f,
    "jit": jax.jit,
    "cond": lambda f: lambda x: lax.cond(x > 0, f, jnp.sin, x),
    "switch": lambda f: lambda x: lax.switch(jnp.int32(x), [f, jnp.sin], x),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), c), x, None, length=2)[0],
    "scan in jit": lambda f: jax.jit(PLACES["scan"](f)),
    "scan in cond": lambda f: PLACES["cond"](PLACES["scan"](f)),
    "jit in scan": lambda f: PLACES["scan"](jax.jit(f)),
    "remat": jax.checkpoint,
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])).sum(),
}
WAYS = {
    "compiled": lambda f: refs.jit(refs.grad(f)),
    "vjp": lambda f: lambda x: refs.vjp(f, x)[1](jnp.float32(1))[0],
    "lanes": lambda f: lambda x: refs.vmap(refs.grad(f))(x[None])[0],
    "jacrev": refs.jacrev,
}


def expected(make, array, place):
    """With that array from outside."""
    constant = np.asarray(ARRAYS[array](X))
    return jax.grad(lambda x: PLACES[place](make(constant))(x * 2))(X)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("array", ARRAYS)
@pytest.mark.parametrize("make", [with_backward, with_forward, with_jvp])
def test_grad(make, array, place):
    found = refs.grad(lambda x: PLACES[place](make(ARRAYS[array](x)))(x * 2))(X)
    same(found, expected(make, array, place))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("make, array", [(with_backward, "scalar"), (with_jvp, "computed")])
def test_beside_a_ref(make, array, place, way):
    r = refs.new_ref(jnp.float32(1))

    def program(x):
        if way != "lanes":  # What they share they may only read.
            r[...] = x
        return PLACES[place](make(ARRAYS[array](x)))(x * 2) + 0 * r[...]

    same(WAYS[way](program)(jnp.asarray(X)), expected(make, array, place))
    assert r[...] == (1 if way == "lanes" else X)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("make", [with_backward, with_forward, with_jvp])
def test_over_what_a_ref_held(make, place):
    r = refs.new_ref(OUTSIDE)

    def program(x):
        f = PLACES[place](make(r[...] + 1))
        r[...] = 0
        return f(x)

    found = refs.grad(program)(X)
    same(found, jax.grad(PLACES[place](make(OUTSIDE + 1)))(X))
    same(r[...], [0, 0, 0])


@pytest.mark.parametrize("derivative", ["jvp", "linearize", "jacfwd", "hessian"])
@pytest.mark.parametrize("place", PLACES)
def test_forward_mode(place, derivative):
    def push(lib, array):
        f = PLACES[place](with_jvp(array))
        if derivative == "jvp":
            return lib.jvp(f, (X,), (X,))[1]
        if derivative == "linearize":
            return lib.linearize(f, X)[1](X)
        return getattr(lib, derivative)(f)(X)

    same(push(refs, OUTSIDE), push(jax, OUTSIDE))


def over_a_ref(kind, r):
    if kind == "vjp":
        f = jax.custom_vjp(lambda x: x * r[...])
        f.defvjp(lambda x: (f(x), None), lambda _, g: (g * r[...],))
        return f
    f = jax.custom_jvp(lambda x: x * r[...])
    f.defjvp(lambda p, t: (f(*p), t[0] * r[...]))
    return f


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("kind", ["vjp", "jvp"])
def test_a_ref_is_read_whose_contents_are_differentiated(kind, place):
    """The rule doesn't say how the result depends on them: JAX refuses that for arrays, too."""
    r = refs.new_ref(3.0, name="r")
    f = place(over_a_ref(kind, r))
    for derivative in (refs.grad, lambda g: refs.jit(refs.grad(g))):
        with pytest.raises(refs.errors.RefValueError, match="with respect to the contents of ref"):
            derivative(lambda r: f(X))(r)
        with pytest.raises(refs.errors.RefValueError, match="with respect to the contents of ref"):
            derivative(lambda x: (refs.set(r, ..., x), f(X))[1])(3.0)


@pytest.mark.parametrize("kind", ["vjp", "jvp"])
def test_a_ref_is_read_whose_contents_are_constant(kind):
    r = refs.new_ref(3.0, name="r")
    f = over_a_ref(kind, r)
    same(refs.grad(f)(2.0), 3)
    same(refs.grad(lambda r, x: r[...] * x)(r, 2.0), 2)
    same(refs.grad(lambda x: (refs.set(r, ..., lax.stop_gradient(x)), f(x))[1])(3.0), 3)


@pytest.mark.parametrize("kind", ["vjp", "jvp"])
def test_over_a_value_that_is_differentiated_beside_a_ref(kind, jit):
    """JAX refuses it, too."""
    n = refs.new_ref(0, name="n")

    def program(x):
        scale = 3 * x
        if kind == "vjp":
            f = jax.custom_vjp(lambda y: 2 * y)

            def forward(y):
                n[...] += 1
                return 2 * y, scale

            f.defvjp(forward, lambda s, g: (g * s,))
        else:
            f = jax.custom_jvp(lambda y: 2 * y)

            def rule(p, t):
                n[...] += 1
                return f(*p), t[0] * scale

            f.defjvp(rule)
        return f(x)

    with pytest.raises(jax.errors.UnexpectedTracerError):
        jit(refs.grad(program))(0.5)
    assert n[...] == 0
