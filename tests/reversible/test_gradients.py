"""`refs.reversible`: the gradient is the plain one, and all else is as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from tests.reversible import programs
from tests.reversible.common import FIXED, MODES, RNG, WS, X, Y, agree, gradients

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize("program", programs.EXACT + programs.ROUNDED)
def test_gradient(program):
    agree(gradients(refs.reversible(program)), gradients(program))


@pytest.mark.parametrize("program", programs.EXACT)
def test_exact_gradient(program):
    agree(gradients(refs.reversible(program, mode=FIXED)), gradients(program), 1e-7)


@pytest.mark.parametrize("anchors", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_gradient_with_anchors(mode, anchors):
    got = gradients(refs.reversible(programs.sums, mode=mode, anchors=anchors))
    agree(got, gradients(programs.sums), 1e-7)


@pytest.mark.parametrize("program", programs.EXACT)
def test_value_and_state(program):
    def run(program):
        a, b = refs.new_ref(X), refs.new_ref(Y)
        return program(a, b, jnp.asarray(WS)), a[...], b[...]

    agree(run(refs.reversible(program)), run(program), 1e-15)
    agree(run(refs.reversible(program, mode=FIXED)), run(program), 1e-8)


def test_refs_of_the_outside_are_left_as_by_the_plain_function():
    def run(program):
        a, b = refs.new_ref(X), refs.new_ref(Y)
        got = refs.grad(lambda ws: program(a, b, ws))(WS)
        return got, a[...], b[...]

    agree(run(refs.reversible(programs.sums)), run(programs.sums))


def test_gradient_with_respect_to_refs():
    def of(program):
        return refs.grad(program, argnums=(0, 1, 2))(refs.new_ref(X), refs.new_ref(Y), WS)

    agree(of(refs.reversible(programs.sums)), of(programs.sums))


def test_a_ref_given_twice():
    def program(a, b, also_a):
        def step(w):
            a[...] += jnp.sin(b[...]) * w
            b[...] += jnp.sin(also_a[...])

        programs.scan(step, WS)
        return a[0]

    def of(program):
        a = refs.new_ref(X)
        return refs.grad(lambda y: program(a, refs.new_ref(y), a))(Y)

    agree(of(refs.reversible(program)), of(program))


def test_a_loop_of_no_steps_returns_what_it_is_given():
    """Each step would overwrite that."""

    def looped(a, b, ws):
        a[...] += jnp.sin(b[...])
        first = 0, b[...] ** 2
        _, y = refs.while_loop(lambda c: c[0] < 0, lambda c: (c[0] + 1, ws[0]), first)
        return jnp.sum(y * a[...])

    def plain(a, b, ws):
        a[...] += jnp.sin(b[...])
        return jnp.sum(b[...] ** 2 * a[...])

    agree(gradients(refs.reversible(looped)), gradients(plain))


def test_a_while_loop_has_a_gradient():
    def stepped(a, b, ws):
        def step(k):
            a[...] += jnp.sin(b[...]) * ws[0]
            b[...] -= jnp.cos(a[...]) * ws[k % 5]
            return k + 1

        n = refs.while_loop(lambda k: (k < 7) & (a[0] < 100), step, 0)
        return a[0] * b[1] + 0 * n

    def counted(a, b, ws):
        def step(k, _):
            a[...] += jnp.sin(b[...]) * ws[0]
            b[...] -= jnp.cos(a[...]) * ws[k % 5]

        refs.fori_loop(0, 7, step, None)
        return a[0] * b[1]

    agree(gradients(refs.reversible(stepped)), gradients(counted))
    agree(gradients(refs.reversible(stepped, mode=FIXED)), gradients(counted), 1e-8)


def test_a_while_loop_in_a_scan_and_in_a_branch():
    def stepped(a, b, ws):
        def layer(w):
            def step(k):
                a[...] += jnp.sin(b[...]) * w
                b[...] -= jnp.cos(a[...])
                return k + 1

            def loop():
                refs.while_loop(lambda k: k < 2 + (w[0] > 0), step, 0)

            refs.cond(w[1] > 0, loop, lambda: None)

        programs.scan(layer, ws)
        return a[0] * b[1]

    def by_python(a, b, ws):
        for w, known in zip(ws, WS, strict=True):
            for _ in range((2 + (known[0] > 0)) * (known[1] > 0)):
                a[...] += jnp.sin(b[...]) * w
                b[...] -= jnp.cos(a[...])
        return a[0] * b[1]

    agree(gradients(refs.reversible(stepped)), gradients(by_python))


def test_what_the_gradient_does_not_need_is_not_undone():
    """A log, a running average, a maximum: nothing is asked of them."""
    n, log = refs.new_ref(0), refs.new_ref(np.zeros(5))
    mean, worst = refs.new_ref(np.zeros(6)), refs.new_ref(np.zeros(6))

    def program(a, b, ws):
        def layer(w):
            i = n[...]
            n[...] += 1
            key = jax.random.fold_in(jax.random.key(0), n[...])
            kept = jax.random.bernoulli(key, 0.5, (6,))  # the same when it is run again
            a[...] += jnp.sin(b[...]) * w * kept
            b[...] -= jnp.cos(a[...]) * kept
            log[i] = a[...].sum()
            mean[...] = 0.9 * mean[...] + 0.1 * (a[...] - mean[...]) ** 2
            worst[...] = jnp.maximum(worst[...], jnp.abs(a[...]))

        programs.scan(layer, ws)
        return a[0] * b[1]

    def of(program):
        for r in (n, log, mean, worst):
            r[...] = jnp.zeros_like(r[...])
        return gradients(program), n[...], log[...], mean[...], worst[...]

    if getattr(jax.config, "jax_custom_jvp3", False):
        # JAX's new form makes arrays of the zeros that nothing asks for.
        with pytest.raises(refs.errors.NotReversibleError, match="the old value is lost"):
            of(refs.reversible(program))
    else:
        agree(of(refs.reversible(program)), of(program))


def test_a_prologue_may_overwrite():
    def program(a, b, ws):
        a[...] = jnp.tanh(ws[0])
        b[...] = jnp.sin(ws[1]) * 2
        programs.sums(a, b, ws)
        return a[0] * b[1]

    agree(gradients(refs.reversible(program)), gradients(program))


def test_exact_products_of_many_steps():
    ws = RNG.normal(size=(1032, 6)) * 0.02

    def descent(v, p, ws):
        def step(w):
            v[...] *= 0.9
            v[...] -= jnp.sin(p[...]) * w
            p[...] += 0.1 * v[...]

        programs.scan(step, ws)
        return p[1] * p[0]

    want = gradients(descent, X, Y, ws)
    agree(gradients(refs.reversible(descent, mode=FIXED), X, Y, ws), want, 1e-8)
    for k in gradients(refs.reversible(descent), X, Y, ws):
        assert np.isnan(k).all()  # the floats that 0.9 has shrunk can't be restored


@pytest.mark.parametrize("factor", [0.9, -0.75, 0.001, 1.5, 3.0, 0.5, 1 / 3])
def test_exact_products_in_loops_and_branches(factor):
    def program(a, b, ws):
        def layer(k, w):
            def yes():
                a[...] *= factor
                a[:2] += jnp.sin(b[:2])

            def no():
                a[1:3] = factor * a[1:3] - jnp.sin(b[1:3]) * w[1:3]

            refs.fori_loop(0, 2, lambda _, __: refs.cond(k % 2 == 0, yes, no), None)
            b[...] += jnp.sin(a[...])
            return k + 1, None

        refs.scan(layer, 0, ws)
        return a[0] * b[1]

    got = gradients(refs.reversible(program, mode=refs.Fixed(36)))
    agree(got, gradients(program), 1e-6)


def test_float32_and_bfloat16():
    x, y, ws = (np.asarray(v, np.float32) for v in (X, Y, WS))
    want = gradients(programs.sums, x, y, ws)
    for mode in ("float", refs.Fixed(24)):
        agree(gradients(refs.reversible(programs.sums, mode=mode), x, y, ws), want, 1e-3)

    def half(a, b, ws):
        def layer(w):
            a[...] += (jnp.tanh(b[...].astype(jnp.bfloat16)) * w.astype(jnp.bfloat16)).astype(
                jnp.float32
            )
            b[...] += (jnp.sin(a[...].astype(jnp.bfloat16))).astype(jnp.float32)

        programs.scan(layer, ws)
        return a[0] * b[1]

    want = gradients(half, x, y, ws)
    for mode in ("float", refs.Fixed(20)):
        agree(gradients(refs.reversible(half, mode=mode), x, y, ws), want, 3e-2)
    halves = [jnp.asarray(v, jnp.bfloat16) for v in (X, Y, WS)]
    want = [np.asarray(g, np.float32) for g in gradients(programs.sums, x, y, ws)]
    got = gradients(refs.reversible(programs.sums, mode=refs.Fixed(8)), *halves)
    agree([np.asarray(g, np.float32) for g in got], want, 0.1)
