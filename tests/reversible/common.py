"""What the tests of `refs.reversible` share: numbers, losses, and how derivatives agree."""

import jax
import jax.numpy as jnp
import numpy as np

import refs

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=6), RNG.normal(size=6)
WS = RNG.normal(size=(5, 6)) * 0.3
LANES = np.stack([X, Y])
LANES[:, 0] = 0.5, -0.5
FIXED = refs.Fixed(40)
MODES = ["float", FIXED]
BOTH = (0, 1)


def agree(got, want, tolerance=1e-10):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.isfinite(b).all()
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max(initial=0)))


def loss_of(program, **options):
    """A function that makes the refs itself; reversible, if options are given."""
    wrapped = refs.reversible(program, **options) if options else program

    def loss(ws, x):
        return wrapped(refs.new_ref(x), refs.new_ref(2 * x), ws)

    return loss


def loss_with_state(program):
    """The program as a function of the refs' contents, of which its final state is a part, too."""

    def loss(x, y, ws):
        a, b = refs.new_ref(x), refs.new_ref(y)
        out = program(a, b, ws)
        return out + jnp.sum(jnp.sin(a[...])) + jnp.sum(jnp.cos(b[...]))

    return loss


def gradients(program, *args):
    return refs.grad(loss_with_state(program), argnums=(0, 1, 2))(*(args or (X, Y, WS)))


def with_outside_refs(program, transform):
    """The result of `transform(f)(WS)`, f over refs that it closes over, and their contents."""
    a, b = refs.new_ref(X), refs.new_ref(2 * X)
    out = transform(lambda ws: program(a, b, ws))(WS)
    return out, a[...], b[...]


def total(f):
    """The sum over lanes."""
    return lambda ws, xs: jnp.sum(refs.vmap(f, in_axes=(None, 0))(ws, xs))


def along(f):
    """The derivative along the first argument itself."""
    return lambda ws, x: refs.jvp(lambda ws: f(ws, x), (ws,), (ws,))
