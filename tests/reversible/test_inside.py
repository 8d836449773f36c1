"""What a reversible function may do to refs besides: lanes, custom rules, callbacks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from tests.reversible.common import BOTH, FIXED, MODES, WS, X, agree
from tests.reversible.programs import scan

pytestmark = pytest.mark.usefixtures("x64")


def lanes_with_loops(a, b, ws):
    def lane(x, y, w):
        def step(_, u):
            x[...] += jnp.sin(y[...]) * u
            y[...] -= jnp.cos(x[...])
            return _, None

        refs.scan(step, None, w)
        return x[...] * y[...]

    return jnp.sum(refs.vmap(lane, in_axes=(0, 0, 1))(a, b, ws))


def lanes_with_refs_of_their_own(a, b, ws):
    def lane(x, w):
        c, d = refs.new_ref(x), refs.new_ref(jnp.stack([2 * x, x, x]))

        def step(k, u):
            c[...] += jnp.sin(d[0]) * u
            d[jax.lax.rem(k, 3)] -= jnp.cos(c[...])
            return k + 1, None

        refs.scan(step, 0, w)
        return c[...] * d[0]

    out = refs.vmap(lane)(a[...], ws.T)
    b[...] += out
    return jnp.sum(b[...] * out)


def lanes_that_add(a, b, ws):
    def layer(w):
        add = lambda i, u: refs.addupdate(a, i, jnp.sin(b[i]) * u)  # noqa: E731
        refs.vmap(add)(jnp.arange(6), w)
        b[...] -= jnp.cos(a[...])

    scan(layer, ws)
    return jnp.sum(a[...] * b[...])


def custom_rules_that_read(a, b, ws):
    @jax.custom_jvp
    def product(r, x):
        return r[...] * x

    @product.defjvp
    def rule(primals, tangents):
        (r, x), (dr, dx) = primals, tangents
        return r[...] * x, dr[...] * x + r[...] * dx

    def layer(w):
        a[...] += jnp.sin(b[...]) * w
        b[...] -= product(a, w)

    scan(layer, ws)
    return jnp.sum(a[...] * b[...])


def custom_rules_that_write(a, b, ws):
    """What the function has written is written once more: the gradient needs neither before."""
    c = refs.new_ref(jnp.zeros(6))

    @jax.custom_jvp
    def add(r, x):
        r[...] += x
        return x

    @add.defjvp
    def rule(primals, tangents):
        (r, x), (dr, dx) = primals, tangents
        r[...] += x
        dr[...] += dx
        return x, dx

    def layer(w):
        a[...] += jnp.sin(b[...]) * w
        b[...] -= jnp.cos(a[...])
        add(c, a[...] * w)
        c[...] += w

    scan(layer, ws)
    return jnp.sum(a[...] * b[...] + c[...])


def shards_that_read(a, b, ws):
    """Several devices may compute what is added, of a ref that is written between."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    c = refs.new_ref(jnp.arange(6.0) + 1)

    @refs.shard_map(mesh=mesh, in_specs=(jax.P("d"), jax.P()), out_specs=jax.P("d"))
    def amount(x, k):
        return jnp.sin(x * c[k]) * c[0]

    def layer(k, w):
        a[...] += amount(b[...] * w, k)
        b[...] -= jnp.cos(a[...])
        c[1] += jnp.sum(w)
        return k + 1, None

    refs.scan(layer, 0, ws)
    return jnp.sum(a[...] * b[...])


def callbacks_beside(a, b, ws):
    n = refs.new_ref(np.zeros(3, np.int32))

    def layer(w):
        a[...] += jnp.sin(b[...]) * w
        b[...] -= jnp.cos(a[...])
        refs.io_callback(add_one, None, n)

    scan(layer, ws)
    return jnp.sum(a[...] * b[...])


def add_one(n):
    n += 1


def predicates_that_write(a, b, ws):
    n = refs.new_ref(0)

    def test(_):
        n[...] += 1
        return n[...] <= len(ws)

    def step(_):
        a[...] += jnp.sin(b[...]) * ws[n[...] - 1]
        b[...] -= jnp.cos(a[...])
        return _

    refs.while_loop(test, step, None)
    return jnp.sum(a[...] * b[...])


def loss(program, wrap):
    return lambda ws, x: wrap(program)(refs.new_ref(x), refs.new_ref(2 * x), ws)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(
    "program",
    [
        *(lanes_with_refs_of_their_own, lanes_that_add, callbacks_beside),
        *(custom_rules_that_read, custom_rules_that_write, shards_that_read),
    ],
)
def test_gradient(program, mode):
    found = refs.grad(loss(program, lambda f: refs.reversible(f, mode=mode)), BOTH)(WS, X)
    agree(found, refs.grad(loss(program, lambda f: f), BOTH)(WS, X), 1e-8)


def test_gradient_of_lanes_of_refs_of_the_outside():
    found = refs.grad(loss(lanes_with_loops, refs.reversible), BOTH)(WS, X)
    agree(found, refs.grad(loss(lanes_with_loops, lambda f: f), BOTH)(WS, X))


def test_a_predicate_that_writes():
    def counted(a, b, ws):
        def layer(w):
            a[...] += jnp.sin(b[...]) * w
            b[...] -= jnp.cos(a[...])

        scan(layer, ws)
        return jnp.sum(a[...] * b[...])

    want = refs.grad(loss(counted, lambda f: f), BOTH)(WS, X)
    for mode in ("float", FIXED):
        wrap = lambda f: refs.reversible(f, mode=mode)  # noqa: B023, E731
        agree(refs.grad(loss(predicates_that_write, wrap), BOTH)(WS, X), want, 1e-8)


def test_callbacks_run_once():
    n = refs.new_ref(np.zeros(3, np.int32))

    @refs.reversible
    def program(x):
        r = refs.new_ref(x)
        r[...] += 1.0
        refs.io_callback(add_one, None, n)
        return jnp.sum(jnp.sin(r[...]))

    agree(refs.grad(program)(X), np.cos(X + 1))
    np.testing.assert_array_equal(n, 1)


def test_lanes_of_a_function_with_custom_rules():
    """What the rules' function does to a ref is batched as part of it."""

    def lanes(wrap):
        f = loss(custom_rules_that_read, wrap)
        return lambda ws, xs: jnp.sum(refs.vmap(f, in_axes=(None, 0))(ws, xs))

    xs = np.stack([X, 2 * X])
    agree(
        refs.grad(lanes(refs.reversible), BOTH)(WS, xs),
        refs.grad(lanes(lambda f: f), BOTH)(WS, xs),
    )
