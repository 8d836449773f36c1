"""Users' own "hi" primitives and types, beside refs."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import hijax

import refs
from tests.tracing.hi_types import Pair, PairType

HiPrim = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive
X = np.arange(1, 4, dtype=np.float32)
close = np.testing.assert_allclose


class MakePair(HiPrim):
    def __init__(self, one):
        self.in_avals, self.out_aval, self.params = (one, one), PairType(one), {}
        super().__init__()

    def expand(self, first, second):
        return Pair(first, second)


class Total(HiPrim):
    def __init__(self, pair):
        self.in_avals, self.out_aval, self.params = (pair,), pair.one, {}
        super().__init__()

    def expand(self, pair):
        return pair.first + pair.second

    def vjp_fwd(self, nonzeros, pair):
        return self(pair), ()

    def vjp_bwd_retval(self, _, g):
        return (MakePair(jax.typeof(g))(g, g * 10),)


class Square(HiPrim):
    """With a derivative that is three times too large, to tell it from that of x²."""

    def __init__(self, x):
        self.in_avals, self.out_aval, self.params = (x,), x, {}
        super().__init__()

    def expand(self, x):
        return x**2

    def vjp_fwd(self, nonzeros, x):
        return self(x), x

    def vjp_bwd_retval(self, x, g):
        return (6 * x * g,)

    def batch(self, axis_data, args, dims):
        [x], [d] = args, dims
        return Square(jax.typeof(x))(x), d


def square(x):
    return Square(jax.typeof(x))(x)


def total_of_pair(x, y):
    pair = MakePair(jax.typeof(x))(x, y)
    return Total(jax.typeof(pair))(pair)


def test_values_of_a_type(jit):
    r = refs.new_ref(X)

    def step(r):
        r[...] = total_of_pair(r[...], r[...] * 2)
        return r[0]

    assert jit(step)(r) == 3
    close(r[...], X * 3)
    refs.fori_loop(0, 2, lambda i, c: step(r), jnp.float32(0))
    close(r[...], X * 27)
    close(jax.jit(refs.in_place(lambda x: total_of_pair(x, x)))(X), 2 * X)
    close(refs.checkpoint(step)(r), 81)


def test_an_argument_of_a_type(jit):
    r = refs.new_ref(X)

    def add(pair):
        r[...] += Total(jax.typeof(pair))(pair)

    jit(add)(Pair(jnp.asarray(X), jnp.asarray(X)))
    close(r[...], 3 * X)


def test_a_constant_of_a_type(jit):
    """A function closes over a value of a user's type, and returns it."""
    r, pair = refs.new_ref(X), Pair(jnp.asarray(X), jnp.asarray(X))

    def step(x):
        r[...] *= 2
        return x, pair, ml_dtypes.bfloat16(1)

    once = refs.reversible(lambda: step(())[1])
    rows = refs.vmap(lambda x: (x + r[0], pair), out_axes=(0, None))
    for out in (jit(step)(()), jit(refs.jit(step))(()), refs.jit(step)(())):
        assert out[2].dtype == "bfloat16"
        close(out[1].first, X)
    for found in (jit(once)(), jit(rows)(X)[1], rows(X)[1]):
        close(found.second, X)
    close(r[...], 16 * X)


def test_a_primitive_with_rules(jit):
    r = refs.new_ref(X)

    def loss(x):
        r[...] = square(r[...] * x)
        return r[...].sum()

    close(jit(loss)(2.0), (4 * X**2).sum())
    close(r[...], 4 * X**2)
    r[...] = X
    close(jit(refs.grad(loss))(2.0), (6 * X * 2 * X).sum())
    rows = refs.new_ref(jnp.stack([X, X + 1]))
    jit(refs.vmap(lambda row: row.set(square(row[...]))))(rows)
    close(rows[...], [X**2, (X + 1) ** 2])
    _, ys = jit(lambda: refs.scan(lambda c, x: (c, square(x + rows[0, 0])), 0, jnp.ones(2)))()
    close(ys, [4, 4])


def test_derivatives_with_respect_to_a_type(jit):
    r, pair = refs.new_ref(X), Pair(jnp.asarray(X), jnp.asarray(X))

    def loss(pair):
        y = Total(jax.typeof(pair))(pair) * r[...]
        r[...] = y
        return y.sum()

    gradient = jit(refs.grad(loss))(pair)
    close(gradient.first, X)
    close(gradient.second, 10 * X)
    close(r[...], 2 * X * X)
    shape = refs.jit(lambda p: (r[0], MakePair(jax.typeof(r[0]))(r[0], 1.0))).eval_shape(pair)
    assert shape[1].one.shape == ()
    out, pullback = refs.vjp(loss, pair)
    close(out, (4 * X**3).sum())
    close(pullback(1.0)[0].first, 2 * X * X)
    with pytest.raises(refs.errors.RefTypeError, match=r"cotangent of type .*Pair"):
        pullback.with_refs(r)
