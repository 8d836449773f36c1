"""What exact modes ask of the compiler: what is added has the same bits each time."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import refs
from tests.reversible.common import loss_of

RNG = np.random.default_rng(0)
WEIGHTS = tuple(jnp.asarray(RNG.normal(size=(6, 128, 128)) / 16, jnp.float32) for _ in range(2))
STATE = jnp.asarray(np.round(RNG.normal(size=(64, 128)) * 2**10) / 2**10, jnp.float32)
MODES = [refs.Fixed(20), refs.Grid(2**-20)]


def layers(a, b, ws):
    def layer(_, w):
        a[...] += jnp.tanh(b[...] @ w[0])
        b[...] -= jnp.tanh(a[...] @ w[1])
        return _, None

    refs.scan(layer, None, ws)
    return jnp.sum(a[...] * b[...])


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


@pytest.mark.parametrize("program", [layers, nested])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_products_share_no_operand(program, mode):
    """On a GPU XLA makes one of those that do, and another product has another rounding."""
    gradient = refs.jit(refs.grad(loss_of(program, mode=mode), (0, 1)))
    text = gradient.lower(WEIGHTS, STATE).as_text(dialect="hlo")
    products = [re.search(r" dot\((\S+), (\S+)\), (.*)", how) for how in instructions(text)]
    operands = [(k, p[1 + k], p[3]) for p in products if p for k in (0, 1)]
    assert len(operands) >= 20
    assert len(operands) == len(set(operands))


def instructions(text):
    """Those of a program in HLO. Of those that compute the same there is one."""
    first, same = {}, {}
    for name, how in re.findall(r"^ +(?:ROOT )?(\S+) = (.*)$", text, re.MULTILINE):
        how = re.sub(r"[\w.-]+", lambda word: same.get(word[0], word[0]), how)
        same[name] = first.setdefault(name if " parameter(" in how else how, name)
    return list(first)


@pytest.mark.parametrize("program", [layers, nested])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_products_are_undone_to_the_bit(program, mode):
    """Or the gradient is NaN: no difference is tolerated."""
    found = refs.jit(refs.grad(loss_of(program, mode=mode, tolerance=0.0), (0, 1)))(WEIGHTS, STATE)
    by_hand = refs.jit(refs.grad(loss_of(program), (0, 1)))(WEIGHTS, STATE)
    for x, y in zip((*found[0], found[1]), (*by_hand[0], by_hand[1]), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-2 * np.abs(y).max())
