"""`refs.reversible` in lanes and in scans: those that share refs, and those that diverge."""

import jax.numpy as jnp
import numpy as np
import pytest

import refs
from tests.reversible import programs
from tests.reversible.common import (
    BOTH,
    FIXED,
    LANES,
    WS,
    X,
    agree,
    along,
    loss_of,
    total,
)

pytestmark = pytest.mark.usefixtures("x64")


def scanned(f):
    def g(ws, xs):
        def body(c, x):
            return c + f(ws, x), None

        return refs.scan(body, 0.0, xs)[0]

    return g


def scanned_nonlinear(f):
    def g(ws, xs):
        def body(c, x):
            return c + jnp.sin(f(ws, x) * c), None

        return refs.scan(body, 0.1, xs)[0]

    return g


ON_LANES = {
    "vmap": lambda f: refs.vmap(f, in_axes=(None, 0)),
    "vmap of grad": lambda f: refs.vmap(refs.grad(f, BOTH), in_axes=(None, 0)),
    "jit of vmap of grad": lambda f: refs.jit(refs.vmap(refs.grad(f, BOTH), in_axes=(None, 0))),
    "grad of vmap": lambda f: refs.grad(total(f), BOTH),
    "jvp of vmap": lambda f: along(total(f)),
    "jvp of grad of vmap": lambda f: along(refs.grad(total(f))),
    "vmap of jvp of grad": lambda f: refs.vmap(along(refs.grad(f)), in_axes=(None, 0)),
    "grad of scan": lambda f: refs.grad(scanned(f), BOTH),
    "grad of a nonlinear scan": lambda f: refs.jit(refs.grad(scanned_nonlinear(f), BOTH)),
    "vmap along another axis": lambda f: (
        lambda ws, xs: refs.vmap(refs.grad(f, BOTH), (None, 1), (2, 1))(ws, xs.T)
    ),
}


@pytest.mark.parametrize("way", ON_LANES)
def test_under_with_lanes(way):
    transform = ON_LANES[way]
    plain, undone = loss_of(programs.sums), loss_of(programs.sums, mode="float")
    want = transform(plain)(WS, LANES)
    agree(transform(undone)(WS, LANES), want)


def test_cotangents_of_lanes_along_another_axis():
    def transform(f):
        return refs.grad(lambda ws, xs: refs.vmap(f, in_axes=(None, 1))(ws, xs).sum(), BOTH)

    undone = transform(loss_of(programs.sums, mode="float"))
    agree(undone(WS, LANES.T), transform(loss_of(programs.sums))(WS, LANES.T))


@pytest.mark.parametrize("way", ["vmap of grad", "grad of vmap", "grad of a nonlinear scan"])
def test_lanes_exactly(way):
    transform = ON_LANES[way]
    plain, undone = loss_of(programs.sums), loss_of(programs.sums, mode=FIXED)
    agree(transform(undone)(WS, LANES), transform(plain)(WS, LANES), 1e-8)


@pytest.mark.parametrize("way", ["vmap of grad", "grad of vmap", "jvp of grad of vmap"])
def test_anchors_with_lanes(way):
    transform = ON_LANES[way]
    plain, undone = loss_of(programs.sums), loss_of(programs.sums, anchors=2)
    want = transform(plain)(WS, LANES)
    agree(transform(undone)(WS, LANES), want)


@pytest.mark.parametrize("way", ["vmap of grad", "grad of vmap"])
@pytest.mark.parametrize(
    "program", [programs.branching, programs.by_inverses, programs.scattered, programs.carried]
)
def test_other_programs_with_lanes(program, way):
    transform = ON_LANES[way]
    plain, undone = loss_of(program), loss_of(program, mode="float")
    want = transform(plain)(WS, LANES)
    agree(transform(undone)(WS, LANES), want)


# --- Lanes that share refs, and lanes that diverge


def test_lanes_that_share_a_counter():
    def of(wrap):
        n = refs.new_ref(np.zeros(()))

        @wrap
        def program(a, ws):
            def layer(w):
                n[...] += jnp.sum(a[...]) * w[0]
                a[...] += jnp.sin(w) * w

            programs.scan(layer, ws)
            return jnp.sum(a[...] ** 2)

        def loss(ws, xs):
            out = refs.vmap(lambda x: program(refs.new_ref(x), ws))(xs)
            return jnp.sum(out) + n[...] ** 2

        def run(ws, xs):
            n[...] = 0.5
            return refs.grad(loss, BOTH)(ws, xs), n[...]

        return run(WS, LANES)

    agree(of(refs.reversible), of(lambda f: f))


def test_lanes_that_each_read_a_ref():
    def of(wrap):
        b = refs.new_ref(X)

        @wrap
        def program(a, ws):
            programs.scan(lambda w: a.at[...].add(jnp.sin(b[...]) * w), ws)
            return jnp.sum(a[...] ** 2)

        def loss(ws, xs):
            return jnp.sum(refs.vmap(lambda x: program(refs.new_ref(x), ws))(xs))

        return refs.grad(loss, BOTH)(WS, LANES)

    agree(of(refs.reversible), of(lambda f: f))


@pytest.mark.parametrize("transform", [refs.grad, along, lambda f: refs.jit(refs.grad(f))])
def test_lanes_that_diverge(transform):
    def of(wrap):
        inner = wrap(programs.sums)

        def one(ws, x):
            a, b = refs.new_ref(x), refs.new_ref(2 * x)
            refs.cond(x[0] > 0, lambda: inner(a, b, ws), lambda: inner(b, a, 2 * ws))
            return jnp.sum(a[...] * b[...])

        return transform(total(one))(WS, LANES)

    agree(of(refs.reversible), of(lambda f: f))


@pytest.mark.parametrize("mode", ["float", FIXED], ids=str)
def test_lanes_that_diverge_in_it(mode):
    def program(a, b, ws):
        c = refs.new_ref(b[0])  # which stays, so that the choice is known

        def layer(w):
            def even():
                a[...] += jnp.sin(b[...]) * w

            def odd():
                b[...] -= jnp.cos(a[...]) * w

            refs.cond(c[...] + w[0] > 0, even, odd)

        programs.scan(layer, ws)
        return jnp.sum(a[...] * b[...])

    plain = refs.grad(total(loss_of(program)), BOTH)(WS, LANES)
    agree(refs.grad(total(loss_of(program, mode=mode)), BOTH)(WS, LANES), plain, 1e-8)
