"""What gives an old value back: factors, conversions, and inverses that the user declares."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs.errors import NotReversibleError
from tests.reversible.common import FIXED, agree, gradients
from tests.reversible.programs import end, scan, shift, stretch

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize(
    "factor",
    [np.arange(1.0, 7.0), np.pi, 0.0, np.inf, 1e-9, np.array(np.nan)],
    ids=["several", "pi", "zero", "infinite", "small", "nan"],
)
def test_factors_that_are_no_fractions(factor):
    """Exact modes can't undo them."""

    def program(a, b, ws):
        def layer(w):
            a[...] = a[...] * factor
            b[...] += jnp.sin(a[...])
            a[...] += jnp.sin(b[...]) * w

        scan(layer, ws)
        return end(a, b)

    with pytest.raises(NotReversibleError, match="the old value is lost"):
        gradients(refs.reversible(program, mode=FIXED))


def test_a_product_with_zero():
    def program(a, b, ws):
        a[...] += jnp.sin(b[...])
        b[...] += jnp.sin(a[...])
        a[...] *= 0.0
        return end(a, b)

    with pytest.raises(NotReversibleError, match="the old value is lost"):
        gradients(refs.reversible(program))


def test_factors_in_a_loop_of_unknown_length():
    def program(a, b, ws):
        def step(k):
            a[...] *= 0.9
            a[...] += jnp.sin(b[...])
            b[...] += jnp.sin(a[...])
            return k + 1

        refs.while_loop(lambda k: k < 3, step, 0)
        return end(a, b)

    with pytest.raises(NotReversibleError, match="the old value is lost"):
        gradients(refs.reversible(program, mode=FIXED))


@pytest.mark.parametrize("mode", ["float", FIXED], ids=["float", "fixed"])
def test_other_factors_of_float(mode):
    """-1, a power of two, a division, a constant on the left."""

    def program(a, b, ws):
        def layer(w):
            a[...] = -1 * a[...]
            b[...] = 2 * b[...] + jnp.sin(a[...])
            b[...] = b[...] / 4
            a[...] += jnp.sin(b[...]) * w

        scan(layer, ws)
        return end(a, b)

    agree(gradients(refs.reversible(program, mode=mode)), gradients(program), 1e-7)


def test_inverses_at_the_top_level_and_in_forward_mode():
    x = np.arange(3.0)
    np.testing.assert_array_equal(shift(x, 1), [2, 0, 1])
    np.testing.assert_array_equal(jax.vmap(shift, (0, None))(np.stack([x, x]), 1)[1], [2, 0, 1])
    np.testing.assert_array_equal(jax.vmap(shift, (None, 0))(x, np.array([0, 1]))[1], [2, 0, 1])
    np.testing.assert_array_equal(jax.vmap(lambda _: shift(x, 1))(x)[2], [2, 0, 1])
    np.testing.assert_array_equal(jax.jvp(lambda x: shift(x, 1), (x,), (x,))[1], [2, 0, 1])
    np.testing.assert_array_equal(jax.grad(lambda x: shift(x, 1)[0] ** 2)(x), [0, 0, 4])
    tripled = refs.inverse(lambda x: 3 * x, lambda y: y / 3)
    assert tripled(2.0) == 6
    factor = jnp.full(3, 2.0)
    closed = refs.inverse(lambda x: x * factor, lambda y: y / factor)
    agree(jax.jit(closed)(x), 2 * x)


def test_inverses_of_batches():
    def program(a, b, ws):
        def layer(w):
            a[...] = jax.vmap(stretch, (0, 0))(a[...], jnp.sin(b[...]) * w)
            b[...] = jax.vmap(stretch, (1, None), 1)(b[...].reshape(2, 3), 0.1).reshape(6)
            b[...] += jnp.sum(jax.vmap(stretch, (None, 0))(a[...], w[:2]), 0)

        scan(layer, ws)
        return end(a, b)

    agree(gradients(refs.reversible(program)), gradients(program))


@pytest.mark.parametrize(
    ("old", "new", "is_lossless"),
    [
        (np.bool_, np.int32, True),
        (np.bool_, np.float64, True),
        (np.int32, np.int64, True),
        (np.int32, np.float64, True),
        (np.float32, np.float64, True),
        (np.int64, np.float64, False),
        (np.int32, np.float32, False),
        (np.int64, np.int32, False),
        (np.int32, np.bool_, False),
        (np.float64, np.int64, False),
        (np.float64, np.float32, False),
        (np.float64, np.complex128, False),
    ],
)
def test_conversions(old, new, is_lossless):
    """What a ref held is found where it has been converted to, if that has lost nothing."""

    x = refs.new_ref(jnp.zeros(6, old))
    kept = refs.new_ref(jnp.zeros(6, new))

    def program(k):
        y = jnp.sum(jnp.exp(x[...] * k).real)
        kept[...] = x[...].astype(new)
        x[...] = jnp.zeros(6, old)
        return y

    def gradient(program):
        x[...] = jnp.asarray([1, 0, 1, 1, 0, 0], old)
        return refs.grad(program)(0.7)

    if is_lossless:
        agree(gradient(refs.reversible(program)), gradient(program))
    else:
        with pytest.raises(NotReversibleError, match="the old value is lost"):
            gradient(refs.reversible(program))
