"""What `refs.Fixed` asks of the compiler: what is added has the same bits each time."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from tests.reversible.common import loss_of
from tests.reversible.programs import net

RNG = np.random.default_rng(0)
WEIGHTS = tuple(jnp.asarray(RNG.normal(size=(6, 128, 128)) / 16, jnp.float32) for _ in range(2))
STATE = jnp.asarray(np.round(RNG.normal(size=(64, 128)) * 2**10) / 2**10, jnp.float32)
FIXED = refs.Fixed(20)


def nested(a, b, ws):
    def layer(_, w):
        def inner(k, _):
            a[...] += jnp.tanh(b[...] @ w[0])
            b[...] -= jnp.tanh(a[...] @ w[1])

        refs.fori_loop(0, 2, inner, None)
        refs.cond(w[0][0, 0] > 0, lambda: refs.addupdate(a, ..., 0.1 * b[...] @ w[0]), lambda: None)
        return _, None

    refs.scan(layer, None, ws)
    return jnp.sum(a[...] * b[...])


@pytest.mark.as_released
@pytest.mark.parametrize("program", [net, nested])
def test_products_share_no_operand(program):
    """On a GPU XLA makes one of those that do, and another product has another rounding."""
    gradient = jax.jit(refs.grad(loss_of(program, mode=FIXED), (0, 1)))
    lowered = gradient.trace(WEIGHTS, STATE).lower(lowering_platforms=("cuda",))
    text = lowered.as_text(dialect="hlo")
    products = [re.search(r" dot\((\S+), (\S+)\), (.*)", how) for how in instructions(text)]
    operands = [(k, p[1 + k], p[3]) for p in products if p for k in (0, 1)]
    assert len(operands) >= 16
    assert len(operands) == len(set(operands))


def instructions(text):
    """Those of a program in HLO. Of those that compute the same there is one."""
    first, same = {}, {}
    for name, how in re.findall(r"^ +(?:ROOT )?(\S+) = (.*)$", text, re.MULTILINE):
        how = re.sub(r"[\w.-]+", lambda word: same.get(word[0], word[0]), how)
        same[name] = first.setdefault(name if " parameter(" in how else how, name)
    return list(first)


@pytest.mark.parametrize("program", [net, nested])
def test_products_are_undone_to_the_bit(program):
    """Or the gradient is NaN: no difference is tolerated."""
    found = refs.jit(refs.grad(loss_of(program, mode=FIXED, tolerance=0.0), (0, 1)))(WEIGHTS, STATE)
    by_hand = refs.jit(refs.grad(loss_of(program), (0, 1)))(WEIGHTS, STATE)
    for x, y in zip((*found[0], found[1]), (*by_hand[0], by_hand[1]), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-2 * np.abs(y).max())


def gradient_descent(v, w, rates):
    """Products and sums, which a CPU may round once or twice."""
    scale, goal = jnp.array([1.0, 2.0, 3.0]), jnp.array([0.6, -1.4, 2.2])

    def step(_, rate):
        slope = jax.grad(lambda w: jnp.sum(scale * (w - goal) ** 2) + jnp.sum(jnp.cos(w)))(w[...])
        v[...] -= 0.1 * slope
        w[...] += rate * v[...]
        return _, None

    refs.scan(step, None, rates)
    return jnp.sum(w[...] ** 2)


@pytest.mark.parametrize("wrap", [lambda f: f, refs.jit], ids=["top level", "jit"])
def test_sums_are_undone_to_the_bit(wrap):
    def gradient(**options):
        return wrap(refs.grad(loss_of(gradient_descent, **options), (0, 1)))

    args = jnp.full(30, 0.1), jnp.array([0.3, -0.7, 1.1])
    for got, want in zip(gradient(mode=refs.Fixed(24))(*args), gradient()(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-3 * np.abs(want).max())


def test_functions_of_a_closed_over_array():
    """At top level a loop that comes again is compiled: the array isn't a constant of it."""
    w, x = WEIGHTS[0][0], STATE.T
    a, b = refs.new_ref(x), refs.new_ref(x)

    @refs.reversible(mode=refs.Fixed(24))
    def program(k):
        def step(_, __):
            a[...] += k * (jax.nn.softmax(w) @ b[...])
            b[...] += k * a[...]
            return _, None

        refs.scan(step, None, None, length=4)
        return jnp.mean(a[...] ** 2)

    found = []
    for _ in range(3):
        found.append(refs.grad(program)(0.1))
        a[...], b[...] = x, x
    np.testing.assert_allclose(found, found[0], rtol=1e-5)
    assert np.isfinite(found).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_short_floats(dtype):
    """Of numbers with few digits, so that nothing is rounded."""

    def program(a, b, w):
        a[...] += w * b[...]
        return jnp.sum(a[...])

    loss = loss_of(program, mode=refs.Fixed(4))
    x = jnp.ones(3, dtype)
    assert loss(dtype(0.5), x) == 6
    got = refs.grad(loss, (0, 1))(dtype(0.5), x)
    assert got[0] == 6
    assert (got[1] == 2).all()
    assert got[1].dtype == dtype


def test_refs_that_begin_as_numbers():
    @refs.reversible
    def program(x):
        a, b = refs.new_ref(1.0), refs.new_ref(2.0)
        a[...] += x * b[...]
        return a[...]

    assert refs.grad(program)(0.5) == 2


def test_options_are_numbers_of_any_kind():
    f = loss_of(gradient_descent, mode=refs.Fixed(np.int32(5)), anchors=np.int64(2), tolerance=None)
    assert refs.grad(f)(jnp.full(3, 0.5), jnp.ones(3)).shape == (3,)
