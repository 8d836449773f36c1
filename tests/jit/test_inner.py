"""Calls of a compiled function in the trace of another one: traced once, and right in any trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs

X = jnp.arange(3.0)


def layer():
    """A layer that counts its traces, and the number of them so far."""
    traces = []

    @refs.jit
    def run(w, count, h):
        traces.append(1)
        count[...] += 1
        w[0] += h[0]
        return jnp.tanh(h * w[...])

    return run, traces


def weights(n=4):
    return [refs.new_ref(X + k, name=f"w{k}") for k in range(n)]


def expected(ws, h):
    for w in ws:
        w[0] += h[0]
        h = np.tanh(h * w)
    return h


def arrays(n=4):
    return [np.float32([0, 1, 2]) + k for k in range(n)]


def chain(run, ws, count, h):
    for w in ws:
        h = run(w, count, h)
    return h


@pytest.mark.parametrize("outer", [refs.jit, jax.jit], ids=["refs.jit", "jax.jit"])
def test_layers_are_traced_once(outer):
    run, traces = layer()
    ws, count = weights(), refs.new_ref(0)
    got = outer(lambda ws, count, h: chain(run, ws, count, h))(ws, count, X)
    assert len(traces) == 1
    held = arrays()
    np.testing.assert_allclose(got, expected(held, np.float32(X)), rtol=1e-6)
    for w, want in zip(ws, held, strict=True):
        np.testing.assert_allclose(w[...], want, rtol=1e-6)
    assert int(count) == 4
    # Another outer function, and other types.
    refs.jit(lambda h: chain(run, ws, count, h))(X)
    assert len(traces) == 1
    refs.jit(lambda h: run(refs.new_ref(jnp.ones(5)), count, h))(jnp.ones(5))
    assert len(traces) == 2
    run.clear_cache()
    refs.jit(lambda h: chain(run, ws, count, h) * 2)(X)
    assert len(traces) == 3


def test_in_loops_branches_and_derivatives():
    run, traces = layer()
    x = 0.3 * X + 0.1  # where tanh isn't flat: its slope is a difference from one
    ws, count = weights(2), refs.new_ref(0)

    def loss(h):
        def step(_, h):
            return lax.cond(h[0] > 5, lambda: h, lambda: chain(run, ws, count, h))

        return (lax.fori_loop(0, 2, step, h) ** 2).sum()

    got = refs.jit(refs.grad(loss))(x)
    assert int(count) == 4
    assert len(traces) == 1
    plain = [np.asarray(w) for w in arrays(2)]

    def by_hand(h):
        ws = [*map(jnp.asarray, plain)]
        for _ in range(2):
            for k in range(2):
                ws[k] = ws[k].at[0].add(h[0])
                h = jnp.tanh(h * ws[k])
        return (h**2).sum()

    np.testing.assert_allclose(got, jax.grad(by_hand)(x), rtol=1e-5)


def test_in_lanes_and_out_of_them():
    run, _ = layer()
    total = refs.new_ref(jnp.zeros(3))

    @refs.jit
    def adds(total, x):
        total[...] += x
        return x * 2

    def both(x):
        out = refs.vmap(lambda x: adds(total, x))(x)
        return out, adds(total, x[0])

    out, last = refs.jit(both)(jnp.stack([X, X + 1]))
    np.testing.assert_array_equal(out, [X * 2, X * 2 + 2])
    np.testing.assert_array_equal(last, X * 2)
    np.testing.assert_array_equal(total[...], 3 * X + 1)

    ws, counts = refs.new_ref(jnp.stack([X, X])), refs.new_ref(jnp.zeros(2, int))
    refs.jit(refs.vmap(lambda w, c: run(w, c, X + 1)))(ws, counts)
    np.testing.assert_array_equal(ws[...], [[1, 1, 2]] * 2)
    assert counts[...].tolist() == [1, 1]


def test_a_ref_that_is_an_argument_and_closed_over():
    r = refs.new_ref(X, name="r")

    @refs.jit
    def twice(q):
        q[0] += 1
        r[0] *= 2
        return q[0]

    assert refs.jit(lambda: twice(r) + 0)() == 2
    other = refs.new_ref(X)
    assert refs.jit(lambda: twice(other) + 0)() == 1
    np.testing.assert_array_equal(r[...], [4, 1, 2])


def test_values_of_the_trace_around_it_are_not_kept():
    r = refs.new_ref(X)

    def outer(x):
        @refs.jit
        def inner(r, y):
            r[...] += x * y
            return r[0]

        return inner(r, 2.0) + inner(r, 3.0)

    assert refs.jit(outer)(1.0) == 2 + 5
    assert refs.jit(outer)(jnp.float32(10)) == 5 + 20 + 5 + 50


def test_refs_in_the_result():
    @refs.jit
    def makes(r, x):
        r[...] += x
        return {"new": refs.new_ref(x), "given": r, "sum": r[...].sum()}

    r = refs.new_ref(X)

    def outer(x):
        first, second = makes(r, x), makes(r, x)
        first["new"][0] += 5
        second["given"][1] += 7
        return first["new"][...], second["new"][...], second["sum"]

    first, second, total = refs.jit(outer)(X)
    np.testing.assert_array_equal(first, [5, 1, 2])
    np.testing.assert_array_equal(second, X)
    assert total == 9
    np.testing.assert_array_equal(r[...], [0, 10, 6])


def test_derivative_rules_that_touch_an_argument():
    @jax.custom_vjp
    def seen(g, x):
        return x

    seen.defvjp(lambda g, x: (x, g), lambda g, ct: (refs.addupdate(g, ..., ct), (None, ct))[1])

    @refs.jit
    def layer(g, x):
        return seen(g, jnp.sin(x))

    gs = [refs.new_ref(jnp.zeros(3)) for _ in range(2)]
    got = refs.jit(refs.grad(lambda x: layer(gs[1], layer(gs[0], x)).sum()))(X)
    np.testing.assert_allclose(gs[1][...], [1, 1, 1])
    np.testing.assert_allclose(gs[0][...], jnp.cos(jnp.sin(X)), rtol=1e-6)
    np.testing.assert_allclose(got, jnp.cos(jnp.sin(X)) * jnp.cos(X), rtol=1e-6)


def test_an_error_in_it_is_the_users():
    @refs.jit
    def fails(r):
        r[0] += 1
        raise ValueError("mine")

    r = refs.new_ref(X)
    with pytest.raises(ValueError, match="mine"):
        refs.jit(lambda: fails(r))()
    np.testing.assert_array_equal(r[...], X)


def test_a_number_that_no_array_holds():
    r = refs.new_ref(jnp.zeros(3))
    add = refs.jit(lambda r, x: r.addupdate(x))
    for call in (lambda: add(r, 2**70), refs.jit(lambda: add(r, 2**70))):
        with pytest.raises(OverflowError, match="too large"):
            call()
