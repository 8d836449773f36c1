"""Refs in `nondiff_argnums`: what isn't differentiated or mapped stays the ref that it is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs

X = np.float32(0.5)
XS = np.arange(3, dtype=np.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def stash(r, x):
    """Leaves its cotangent in a ref."""
    return jnp.sin(x)


def stash_backward(r, x, g):
    r[...] = g
    return (g * jnp.cos(x),)


stash.defvjp(lambda r, x: (jnp.sin(x), x), stash_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def scaled(r, x, k):
    """Reads and writes its ref at each of three occasions."""
    r[...] += 1
    return x * r[...]


def scaled_forward(r, x, k):
    r[...] += 10
    return x * r[...], r[...]


def scaled_backward(r, k, y, g):
    r[...] = y + g
    return (k * g,)


scaled.defvjp(scaled_forward, scaled_backward)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def count(r, x):
    """Only its rule touches the ref."""
    return jnp.sin(x)


@count.defjvp
def count_forward(r, primals, tangents):
    r[...] += 1
    return jnp.sin(primals[0]), jnp.cos(primals[0]) * tangents[0]


FUNCTIONS = {
    "stash": lambda r, x: 3 * stash(r, x),
    "stash twice": lambda r, x: 2 * stash(r, stash(r, x)),
    "scaled": lambda r, x: scaled(r, x, 5.0) * 2,
    "count": lambda r, x: 3 * count(r, x),
}
WAYS = {
    "grad": lambda lib, f: lib.grad(f, 1),
    "value_and_grad": lambda lib, f: lib.value_and_grad(f, 1),
    "keyword": lambda lib, f: lambda r, x: lib.grad(lambda x, r: f(r, x))(x, r=r),
    "in a tree": lambda lib, f: lambda r, x: lib.grad(lambda t, x: f(t["r"], x), 1)({"r": r}, x),
    "closed over too": lambda lib, f: lambda r, x: lib.grad(lambda q, x: f(q, x) + r[...], 1)(r, x),
    "aux": lambda lib, f: lib.grad(lambda r, x: (f(r, x), r[...]), 1, has_aux=True),
    "vjp": lambda lib, f: lambda r, x: lib.vjp(functools.partial(f, r), x)[1](1.0),
    "nested jit": lambda lib, f: lambda r, x: lib.grad(lib.jit(lambda x: f(r, x)))(x),
}
# A forward rule may touch what its function doesn't, where nothing else does.
NOT_OF_COUNT = ("closed over too", "aux", "nested jit")


@pytest.mark.parametrize(
    "function, way",
    [(f, w) for f in FUNCTIONS for w in WAYS if f != "count" or w not in NOT_OF_COUNT],
)
def test_as_jax_does(function, way):
    ours, native = refs.new_ref(jnp.float32(7)), jax.new_ref(jnp.float32(7))
    found = WAYS[way](refs, FUNCTIONS[function])(ours, X)
    expected = WAYS[way](jax, FUNCTIONS[function])(native, X)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found, expected)
    np.testing.assert_allclose(ours[...], native[...], rtol=1e-6)


def test_one_that_is_differentiated_and_one_that_is_not():
    w, seen = refs.new_ref(X), refs.new_ref(jnp.float32(0))
    slope = refs.grad(lambda w, r: stash(r, w[...] ** 2) * w[...])(w, seen)
    np.testing.assert_allclose(slope, np.sin(X**2) + 2 * X**2 * np.cos(X**2), rtol=1e-6)
    assert seen[...] == X


def test_closed_over_in_a_compiled_step():
    r = refs.new_ref(jnp.float32(0))
    step = refs.jit(lambda x: refs.grad(stash, 1)(r, x))
    np.testing.assert_allclose([step(X), step(2 * X)], np.cos([X, 2 * X]), rtol=1e-6)
    assert r[...] == 1


@pytest.mark.parametrize("function", ["stash", "stash twice", "count"])
def test_of_lanes(function):
    ours, native = refs.new_ref(jnp.float32(7)), jax.new_ref(jnp.float32(7))
    f = FUNCTIONS[function]
    found, expected = refs.vmap(f, (None, 0))(ours, XS), jax.vmap(f, (None, 0))(native, XS)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(ours[...], native[...], rtol=1e-6)


@pytest.mark.parametrize("derivative", ["jacrev", "hessian"])
def test_jacobians(derivative):
    ours, native = refs.new_ref(jnp.float32(7)), jax.new_ref(jnp.float32(7))
    found = getattr(refs, derivative)(count, 1)(ours, X)
    expected = getattr(jax, derivative)(lambda r, x: jnp.sin(x), 1)(native, X)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert ours[...] == 8


def test_the_loss_may_return_it_as_auxiliary_data():
    r = refs.new_ref(jnp.float32(0))
    _, (out, x) = refs.grad(lambda r, x: (stash(r, x), (r, x)), 1, has_aux=True)(r, X)
    assert out is r
    assert x == X


def test_lanes_may_return_it():
    r = refs.new_ref(XS)
    ys, out = refs.vmap(lambda r, x: (x + r[1], r), (None, 0), (0, None))(r, XS)
    np.testing.assert_array_equal(ys, XS + 1)
    assert out is r
