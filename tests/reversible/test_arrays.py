"""Functions of arrays alone: their loops and branches are undone, or left to JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from refs import _jax
from tests.platforms import as_on_cpu
from tests.reversible.common import BOTH, FIXED, WS, X, agree

pytestmark = pytest.mark.usefixtures("x64")
swap = refs.inverse(lambda x: x[::-1] * 2, lambda y: y[::-1] / 2)


def loop(step, ws, *carry):
    out, _ = lax.scan(lambda carry, w: (step(w, *carry), None), carry, ws)
    return out


def two_streams(ws, x):
    def step(w, a, b):
        a = a + jnp.tanh(b) * w
        return a, b - jnp.sin(a) * w

    a, b = loop(step, ws, x, 2 * x)
    return jnp.sum(a * b)


def heun(ws, x):
    """Reversible Heun, whose product is of what is known."""

    def step(w, y, z):
        y = y + 0.5 * jnp.sin(w * z)
        z = 2 * y - z
        return y + 0.5 * jnp.sin(w * z), z

    y, z = loop(step, ws, x, x)
    return jnp.sum(y * z)


def exchanges(ws, x):
    def step(w, k, a, b):
        a, b = lax.cond(
            k % 2 == 0,
            lambda a, b: (a + jnp.sin(b) * w, b),
            lambda a, b: (a, b - jnp.cos(a) * w),
            *(a, b),
        )
        return k + 1, swap(b), a

    _, a, b = loop(step, ws, 0, x, 2 * x)
    return jnp.sum(a * b)


def scattered(ws, x):
    def step(w, k, a, b):
        a = a.at[k % 6].add(jnp.sum(jnp.sin(b)) * w[0]).at[jnp.array([1, 1, 7])].add(w[:3])
        return k + 1, a, b - jnp.cos(a) * w

    _, a, b = loop(step, ws, 0, x, 2 * x)
    return jnp.sum(a * b)


def nested(ws, x):
    def step(w, a, b):
        def inner(u, a, b):
            a = a + jnp.sin(b) * u
            return a, b + jnp.sin(a) * u

        a, b = loop(inner, w, a, b)
        return a, b + 0.1 * a**2

    a, b = loop(step, ws, x, 2 * x)
    return jnp.sum(a * b)


def with_results(ws, x):
    def step(carry, w):
        a, b = carry
        a = a + jnp.tanh(b) * w
        return (a, b - jnp.sin(a) * w), a * b

    (a, _), products = lax.scan(step, (x, 2 * x), ws, reverse=True)
    return jnp.sum(a) + jnp.sum(products**2)


UNDONE = [two_streams, heun, exchanges, scattered, nested, with_results]


@pytest.mark.parametrize("f", UNDONE)
@pytest.mark.parametrize("wrap", [lambda f: f, refs.jit, jax.jit], ids=["", "refs.jit", "jax.jit"])
def test_gradient(f, wrap):
    agree(wrap(refs.grad(refs.reversible(f), BOTH))(WS, X), jax.grad(f, BOTH)(WS, X))


@as_on_cpu
@pytest.mark.as_released
@pytest.mark.parametrize("f", UNDONE[:-1])
def test_memory_does_not_grow_with_the_steps(f):
    def of(f, n):
        args = np.ones((n, 6)), X
        return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes

    undone = refs.grad(refs.reversible(f))
    assert of(undone, 400) <= 1.1 * of(undone, 40)
    assert of(jax.grad(f), 400) > 4 * of(jax.grad(f), 40)


def test_a_while_loop():
    def until(ws, x):
        def step(loop):
            k, a, b = loop
            a = a + jnp.sin(b) * ws[k]
            return k + 1, a, b - jnp.cos(a)

        _, a, b = lax.while_loop(lambda loop: loop[0] < len(ws), step, (0, x, 2 * x))
        return jnp.sum(a * b)

    def counted(ws, x):
        def step(w, a, b):
            a = a + jnp.sin(b) * w
            return a, b - jnp.cos(a)

        a, b = loop(step, ws, x, 2 * x)
        return jnp.sum(a * b)

    agree(refs.grad(refs.reversible(until), BOTH)(WS, X), jax.grad(counted, BOTH)(WS, X))


# --- What JAX stores


def recurrent(ws, x):
    def step(h, w):
        h = jnp.tanh(0.9 * h + w)
        return h, h

    h, hs = lax.scan(step, x, ws)
    return jnp.sum(h) + jnp.sum(hs**2)


def contracting(ws, x):
    """Division would give the state back, and lose its digits: that is no use."""

    def step(h, w):
        h = 0.01 * h + w * jnp.sin(w)
        return h, h * w

    h, hs = lax.scan(step, x, jnp.concatenate([ws] * 6))
    return jnp.sum(h) + jnp.sum(hs**2)


def chosen(ws, x):
    return lax.cond(x[0] > 0, lambda: jnp.sum(jnp.tanh(x * ws)), lambda: jnp.sum(ws**2))


@pytest.mark.parametrize("f", [recurrent, contracting, chosen])
@pytest.mark.parametrize("mode", ["float", FIXED], ids=str)
def test_what_cannot_be_undone(f, mode):
    agree(refs.grad(refs.reversible(f, mode=mode), BOTH)(WS, X), jax.grad(f, BOTH)(WS, X))


@pytest.mark.parametrize("f", [recurrent, contracting, chosen, two_streams, nested])
@pytest.mark.parametrize("mode", ["float", FIXED], ids=str)
def test_in_a_layer_of_a_loop_over_refs(f, mode):
    def program(a, b, ws):
        def layer(_, w):
            a[...] += f(ws, b[...]) * w
            b[...] -= jnp.cos(a[...])
            return _, None

        refs.scan(layer, None, ws)
        return jnp.sum(a[...] * b[...])

    def loss(wrap):
        return lambda ws, x: wrap(program)(refs.new_ref(x), refs.new_ref(2 * x), ws)

    found = refs.grad(loss(lambda f: refs.reversible(f, mode=mode)), BOTH)(WS, X)
    agree(found, refs.grad(loss(lambda f: f), BOTH)(WS, X), 1e-8)


# --- In the exact mode, what outermost loops carry is kept as integers


def from_a_number(ws, x):
    return lax.scan(lambda y, w: (y + jnp.sum(w * x**2), None), 0.0, ws)[0]


def a_product_that_is_a_result(ws, x):
    def step(b, w):
        b = 0.9 * b + w
        return b, b

    b, bs = lax.scan(step, x, ws)
    return jnp.sum(jnp.sin(b)) + jnp.sum(bs)


def a_product_that_is_carried_twice(ws, x):
    def step(w, a, b):
        b = 0.9 * a + w
        return b, b

    a, b = loop(step, ws, x, x)
    return jnp.sum(jnp.sin(a) * b)


def a_product_in_a_branch(ws, x):
    def step(w, a):
        return (lax.cond(w[0] > 0, lambda a: 0.9 * a, lambda a: a, a),)

    return jnp.sum(jnp.sin(loop(step, ws, x)[0]))


def results_of_a_loop_that_is_stored(ws, x):
    def step(carry, w):
        b, d = carry
        return (0.9 * b + jnp.sin(d), jnp.sin(d) * d * w), b

    (b, _), bs = lax.scan(step, (x, x), ws)
    return jnp.sum(jnp.sin(bs)) + jnp.sum(b)


def under_jit(ws, x):
    @jax.jit
    def step(w, a, b):
        a = a + jnp.tanh(w * b)
        return a, 0.9 * b + jnp.tanh(w * a)

    a, b = loop(step, ws, x, 2 * x)
    return jnp.sum(a * b)


EXACTLY = [
    *(from_a_number, a_product_that_is_a_result, a_product_that_is_carried_twice),
    *(a_product_in_a_branch, results_of_a_loop_that_is_stored, under_jit, *UNDONE),
]


@pytest.mark.parametrize("f", EXACTLY)
@pytest.mark.parametrize("wrap", [lambda f: f, refs.jit], ids=["", "refs.jit"])
def test_exactly(f, wrap):
    undone = refs.reversible(f, mode=FIXED, tolerance=0.0)
    agree(wrap(undone)(WS, X), f(WS, X), 1e-9)
    agree(wrap(refs.grad(undone, BOTH))(WS, X), jax.grad(f, BOTH)(WS, X), 1e-8)


def test_a_carry_beside_refs():
    """It is undone, as what the refs hold is."""

    def program(a, b, ws):
        def layer(carry, w):
            x, y = carry
            x = x + jnp.tanh(y) * w
            y = y - jnp.sin(x) + jnp.cos(a[...])
            a[...] += jnp.sin(b[...]) * w
            b[...] -= jnp.cos(a[...])
            return (x, y), None

        (x, y), _ = refs.scan(layer, (ws[0], ws[1]), ws)
        return jnp.sum(x * y) + jnp.sum(a[...])

    def loss(wrap):
        return lambda ws, x: wrap(program)(refs.new_ref(x), refs.new_ref(2 * x), ws)

    agree(refs.grad(loss(refs.reversible), BOTH)(WS, X), refs.grad(loss(lambda f: f), BOTH)(WS, X))


# --- Equations that are kept as they are


def test_a_jit_with_shardings_stays_one():
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def placed(x):
        return jnp.sin(x)

    inner = jax.jit(placed, out_shardings=place)

    def program(a, b, ws):
        def layer(_, w):
            a[...] += inner(b[...]) * w
            return _, None

        refs.scan(layer, None, ws)
        return jnp.sum(a[...] * b[...])

    def loss(ws, x):
        return refs.reversible(program)(refs.new_ref(x), refs.new_ref(2 * x), ws)

    found = jax.make_jaxpr(refs.grad(loss))(WS, X)
    kept = [
        eqn.params["out_shardings"]
        for eqn in _jax.all_equations(found.jaxpr.eqns)
        if eqn.params.get("name") == "placed"
    ]
    assert kept
    assert all(place in shardings for shardings in kept)
