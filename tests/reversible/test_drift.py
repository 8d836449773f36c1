"""The check of what was restored that each gradient makes: what is off is NaN."""

import jax.numpy as jnp
import numpy as np
import pytest

import refs
from tests.reversible import programs
from tests.reversible.common import FIXED, WS, X, Y, agree

pytestmark = pytest.mark.usefixtures("x64")


def loss_of(program):
    return lambda x, y, ws: program(refs.new_ref(x), refs.new_ref(y), ws)


def plain(program, *args):
    return refs.grad(loss_of(program), argnums=(0, 1, 2))(*(args or (X, Y, WS)))


def gradients(program, *args, **options):
    return plain(refs.reversible(program, **options), *args)


def test_all_gradients_are_nan():
    for g in gradients(programs.expanding):
        assert np.isnan(g).all()


def test_all_gradients_are_nan_in_a_trace():
    for g in refs.jit(lambda *args: gradients(programs.expanding, *args))(X, Y, WS):
        assert np.isnan(g).all()
    lanes = refs.vmap(
        refs.grad(loss_of(refs.reversible(programs.expanding)), (0, 1, 2)), in_axes=(0, 0, None)
    )
    for g in lanes(np.stack([X, Y]), np.stack([Y, X]), WS):
        assert np.isnan(g).all()


def test_only_the_lane_that_is_off():
    """What is 0 in `a` loses nothing."""
    zero = np.zeros(6)

    def program(a, b, s):
        def step(_, __):
            a[...] += b[...] * s
            b[...] += a[...] * s

        refs.fori_loop(0, 10, step, None)
        return jnp.sum(a[...])

    of = refs.vmap(refs.grad(lambda s: loss_of(refs.reversible(program))(X, zero, s)))
    found = of(np.array([0.1, 1e10]))
    assert np.isfinite(found[0])
    assert np.isnan(found[1])


def test_without_a_tolerance_they_are_finite():
    for anchors in (None, 2):
        for g in gradients(programs.expanding, tolerance=None, anchors=anchors):
            assert np.isfinite(g).all()


def test_a_tolerance_of_nothing():
    """`Fixed` restores to the bit; floats don't."""
    agree(gradients(programs.sums, mode=FIXED, tolerance=0), plain(programs.sums), 1e-8)
    assert np.isnan(gradients(programs.sums, tolerance=0)[0]).all()


def test_a_large_tolerance():
    for g in gradients(programs.expanding, tolerance=np.inf):
        assert np.isfinite(g).all()


def test_second_derivatives_are_nan_too():
    along = np.ones_like(WS)
    _, of = refs.jvp(lambda ws: gradients(programs.expanding, X, Y, ws)[2], (WS,), (along,))
    assert np.isnan(of).all()


def test_a_state_that_is_not_finite():
    x = X.copy()
    x[2] = np.inf
    assert all(np.isnan(g).all() for g in gradients(programs.sums, x, Y, WS))
    x[2] = np.nan
    assert all(np.isnan(g).all() for g in gradients(programs.sums, x, Y, WS))


def test_anchors_restore_what_is_lost():
    """From anchor to anchor little is lost."""

    def program(a, b, ws):
        def layer(w):
            a[...] *= 0.03
            a[...] += jnp.sin(b[...]) * w
            b[...] += a[...] ** 2

        programs.scan(layer, ws)
        return jnp.sum(a[...] + b[...])

    args = X, Y, np.concatenate([WS] * 6)
    assert np.isnan(gradients(program, *args)[0]).all()
    agree(gradients(program, *args, anchors=2, tolerance=1e-6), plain(program, *args), 1e-8)


@pytest.mark.parametrize("anchors", [1, 2])
def test_anchors_of_a_loop_with_an_index(anchors):
    agree(gradients(programs.counted, anchors=anchors), plain(programs.counted), 1e-8)


@pytest.mark.parametrize("anchors", [1, 2, 3])
def test_anchors_where_products_have_lost_bits(anchors):
    got = gradients(descent, mode=FIXED, anchors=anchors)
    agree(got, plain(descent), 1e-8)


# --- Refs that are zero at first


def leapfrog(x, v, ws):
    def step(w):
        v[...] -= 0.1 * jnp.sin(x[...]) * (1 + w)
        x[...] += 0.1 * v[...]

    programs.scan(lambda _: programs.scan(step, ws), jnp.zeros(5))
    return jnp.sum(x[...] ** 2)


def descent(x, v, ws):
    def step(w):
        v[...] = 0.9 * v[...] - 0.1 * (x[...] - w)
        x[...] += v[...]

    programs.scan(step, ws)
    return jnp.sum(x[...] ** 2)


def driven(a, b, ws):
    def layer(w):
        a[...] += jnp.sin(b[...] + w)
        b[...] -= jnp.sin(a[...] - w)

    programs.scan(layer, ws)
    return jnp.sum(a[...] * b[...])


ZERO = np.zeros(6)


@pytest.mark.parametrize("anchors", [None, 1, 3])
@pytest.mark.parametrize(
    ("program", "x", "y"),
    [
        (leapfrog, X, ZERO),
        (leapfrog, X * 1e-20, ZERO),
        (leapfrog, X * 1e15, ZERO),
        (descent, X, ZERO),
        (descent, X * 1e8, ZERO),
        (driven, ZERO, ZERO),
        (driven, ZERO, Y),
        (programs.sums, ZERO, ZERO),
    ],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_a_state_that_starts_at_zero(program, x, y, anchors):
    agree(gradients(program, x, y, WS, anchors=anchors), plain(program, x, y, WS), 1e-8)


@pytest.mark.parametrize("program", [leapfrog, driven])
def test_a_state_that_starts_at_zero_is_exact(program):
    x = X if program is leapfrog else ZERO
    agree(gradients(program, x, ZERO, WS, mode=FIXED), plain(program, x, ZERO, WS), 1e-8)


def test_arrays_of_no_elements():
    empty = np.zeros(0)
    ws = np.zeros((3, 0))
    got = gradients(programs.sums, empty, empty, ws)
    assert [g.shape for g in got] == [(0,), (0,), (3, 0)]
    got = gradients(programs.sums, X, Y, np.zeros((0, 6)))
    agree(got, plain(programs.sums, X, Y, np.zeros((0, 6))), 1e-8)
    got = gradients(programs.sums, X, Y, np.zeros((0, 6)), anchors=2)
    agree(got, plain(programs.sums, X, Y, np.zeros((0, 6))), 1e-8)
