"""Transformations in transformations, with refs that are mapped, shared and differentiated.

`f` scales a ref row by row in a scan and sums what comes of it, counts its calls, and adds to a
total. Each nest of it is held against JAX's nest of the pure function, and the state against what
the calls must have left.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from tests import oracle

W = np.float32([1.0, 2.0, 3.0])
WS = np.stack([W, W + 1])
XS = np.float32([0.5, 0.7])


def pure(w, x):
    return jnp.sin(w * x).sum()


class State:
    """Refs, and `f` over them."""

    def __init__(self, wrap):
        self.calls = refs.new_ref(0, name="calls")
        self.total = refs.new_ref(jnp.zeros(3), name="total")
        self.w = refs.new_ref(W, name="w")
        self.ws = refs.new_ref(WS, name="ws")
        self.f = wrap(self._f)

    def _f(self, w, x):
        self.calls[...] += 1
        self.total[1] += x

        def step(c, i):
            w[i] = w[i] * x
            return c + jnp.sin(w[i]), None

        return lax.scan(step, 0.0, jnp.arange(3))[0]

    def restored(self, x):
        """`f` of the shared ref, as it was."""
        self.w[...] = W
        return self.f(self.w, x)


def vmap_of_grad(s):
    return refs.vmap(refs.grad(s.f, (0, 1)))


def grad_of_vmap(s):
    return refs.grad(lambda ws, xs: refs.vmap(s.f)(ws, xs).sum(), (0, 1))


def hessian(s):
    return lambda ws, xs: refs.hessian(s.f, (0, 1))(s.w, xs[0])


def forward_over_reverse(s):
    return lambda ws, xs: refs.jacfwd(refs.jacrev(s.f))(s.w, xs[0])


def linearize_in_scan(s):
    def step(c, x):
        return c + refs.linearize(s.restored, x)[1](1.0), None

    return lambda ws, xs: refs.scan(step, 0.0, xs)[0]


def grad_in_while_loop(s):
    """The predicate reads what the differentiated function writes."""

    def program(ws, xs):
        def body(c):
            return c[0] + 1, c[1] + refs.grad(s.restored)(xs[c[0]])

        return refs.while_loop(lambda c: s.calls[...] < 2, body, (0, 0.0))[1]

    return program


def grad_of_vmap_over_a_shared_ref(s):
    """The ref is read by every lane, and differentiated."""

    def lane(x):
        s.calls[...] += 1
        s.total[1] += x
        return jnp.sin(s.w[...] * x).sum()

    return lambda ws, xs: refs.grad(lambda w: refs.vmap(lane)(xs).sum())(s.w)


def of_both(f):
    return lambda ws, xs: sum(f(W, x) for x in xs)


# A nest -> what JAX makes of the pure function, how often `f` is called, which refs it scales.
NESTS = {
    vmap_of_grad: (jax.vmap(jax.grad(pure, (0, 1))), 2, "ws"),
    grad_of_vmap: (jax.grad(lambda ws, xs: jax.vmap(pure)(ws, xs).sum(), (0, 1)), 2, "ws"),
    hessian: (lambda ws, xs: jax.hessian(pure, (0, 1))(W, xs[0]), 1, "w"),
    forward_over_reverse: (lambda ws, xs: jax.hessian(pure)(W, xs[0]), 1, "w"),
    linearize_in_scan: (of_both(jax.grad(pure, 1)), 2, "w"),
    grad_in_while_loop: (of_both(jax.grad(pure, 1)), 2, "w"),
    grad_of_vmap_over_a_shared_ref: (of_both(jax.grad(pure)), 2, ""),
}
INNER = {"": oracle.as_is, "checkpoint": refs.checkpoint, "jax.checkpoint": jax.checkpoint}
OUTER = {"": oracle.as_is, "jit": refs.jit, "checkpoint": refs.checkpoint}


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("nest", NESTS, ids=lambda f: f.__name__)
def test_nest(nest, inner, outer):
    expected, calls, scaled = NESTS[nest]
    s = State(INNER[inner])
    got = OUTER[outer](nest(s))(s.ws, jnp.asarray(XS))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), got, expected(WS, XS)
    )
    assert s.calls[...] == calls
    np.testing.assert_allclose(s.total[...], [0, XS[:calls].sum(), 0], rtol=1e-6)
    np.testing.assert_allclose(s.ws[...], WS * (XS[:, None] if scaled == "ws" else 1), rtol=1e-6)
    np.testing.assert_allclose(s.w[...], W * (XS[calls - 1] if scaled == "w" else 1), rtol=1e-6)
