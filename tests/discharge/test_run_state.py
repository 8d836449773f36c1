"""run_state, JAX's internal "arrays in, refs inside, final values out": for_loop is made of it."""

import jax
import jax.numpy as jnp
import numpy as np

import refs
from refs import _jax
from tests.discharge.helpers import agree, primitives

X = np.arange(4, dtype=np.float32)


def run_state(jaxpr, args):
    """The equation that JAX's own `run_state` makes."""
    return _jax.run_state_p.bind(
        *args,
        jaxpr=jaxpr.jaxpr,
        which_linear=(False,) * len(args),
        is_initialized=(True,) * len(args),
    )


def body(r, s):
    r[...] += s[0]
    s[1] = r[1] * 2


def plain_body(a, b):
    a += b[0]
    b[1] = a[1] * 2


def traced(fun, n):
    return jax.make_jaxpr(fun)(*(jax.new_ref(X) for _ in range(n)))


def test_arrays_in_and_out():
    jaxpr = traced(body, 2)

    def program(r, y):
        a, b = run_state(jaxpr, [r[...], y])
        r[...] = a
        return b

    def plain(a, y):
        y = y.copy()
        plain_body(a, y)
        return y

    pure = agree(program, plain, [X], X + 1)
    assert "run_state" not in primitives(pure)


def test_within_loops():
    jaxpr = traced(body, 2)

    def program(r, y):
        def step(c, _):
            r[...], y = run_state(jaxpr, [r[...], c])
            return y, r[0]

        return jax.lax.scan(step, y, length=2)

    def plain(a, y):
        y, out = y.copy(), []
        for _ in range(2):
            plain_body(a, y)
            out.append(a[0].copy())
        return y, np.stack(out)

    agree(program, plain, [X], X + 1)


def test_refs_made_inside():
    def inner(r):
        mine = jax.new_ref(jnp.zeros(4))
        mine[1] = 5.0
        r[...] += mine[...]

    jaxpr = traced(inner, 1)
    [out] = refs.jit(lambda x: run_state(jaxpr, [x]))(X)
    np.testing.assert_array_equal(out, X + np.float32([0, 5, 0, 0]))


def test_in_lanes():
    jaxpr = traced(body, 2)
    count = refs.new_ref(0, name="count")

    def lane(x):
        count[...] += 1
        return run_state(jaxpr, [x, x + 1])

    xs = np.stack([X, 2 * X, 3 * X])
    a, b = refs.vmap(lane)(xs)
    for k, x in enumerate(xs):
        want = x.copy(), x + 1
        plain_body(*want)
        np.testing.assert_array_equal(a[k], want[0])
        np.testing.assert_array_equal(b[k], want[1])
    assert count[...] == len(xs)
