"""`refs.reversible` on several devices.

Run on as many devices as there are; `tests/test_several_devices.py` runs this file on four.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax
from jax.sharding import AxisType, NamedSharding

import refs
from tests.reversible import programs
from tests.reversible.common import BOTH, FIXED, MODES, agree

N = len(jax.devices())
RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 6))
WS = RNG.normal(size=(5, 2, 6, 6)) * 0.3
pytestmark = pytest.mark.usefixtures("x64")
unchecked = pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])


def mesh(kind=AxisType.Auto):
    n = N if N in (2, 4) else 1
    return jax.make_mesh((n,), ("d",), axis_types=(kind,), devices=jax.devices()[:n])


def net(a, b, ws):
    def layer(w):
        a[...] += jnp.tanh(b[...] @ w[0])
        b[...] += jnp.tanh(a[...] @ w[1])

    programs.scan(layer, ws)
    return jnp.sum(a[...] * b[...])


def whole(ws, x):
    return net(refs.new_ref(x), refs.new_ref(2 * x), ws)


def over_devices(program, check_vma=True):
    """The same with the rows split over the devices, and the weights shared."""

    def local(ws, x):
        return lax.psum(program(refs.new_ref(x), refs.new_ref(2 * x), ws), "d")

    specs = (P(), P("d"))
    return refs.shard_map(local, mesh=mesh(), in_specs=specs, out_specs=P(), check_vma=check_vma)


WANT = refs.grad(whole, BOTH)


@unchecked
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("anchors", [None, 2])
def test_gradient(mode, anchors, check_vma):
    loss = over_devices(refs.reversible(net, mode=mode, anchors=anchors), check_vma)
    agree(refs.jit(refs.grad(loss, BOTH))(WS, X), WANT(WS, X), 1e-8)


@unchecked
def test_op_by_op(check_vma):
    loss = over_devices(refs.reversible(net), check_vma)
    agree(loss(WS, X), whole(WS, X))
    agree(refs.grad(loss, BOTH)(WS, X), WANT(WS, X))


@unchecked
def test_without_a_tolerance(check_vma):
    loss = over_devices(refs.reversible(net, tolerance=None), check_vma)
    agree(refs.jit(refs.grad(loss, BOTH))(WS, X), WANT(WS, X))


@unchecked
def test_forward_mode(check_vma):
    def of(loss):
        return refs.jit(lambda ws, x: refs.jvp(loss, (ws, x), (ws, x)))(WS, X)

    agree(of(over_devices(refs.reversible(net), check_vma)), of(whole))


@unchecked
def test_a_hessian_vector_product(check_vma):
    def of(loss):
        return refs.jit(lambda ws, x: refs.jvp(lambda w: refs.grad(loss)(w, x), (ws,), (ws,)))(
            WS, X
        )

    agree(of(over_devices(refs.reversible(net), check_vma)), of(whole))


def sums_over_devices(a, b, ws):
    """What is added depends on all devices."""

    def layer(w):
        a[...] += jnp.tanh(b[...] @ w[0]) + 0.1 * lax.psum(jnp.sum(b[...]), "d")
        b[...] += jnp.tanh(a[...] @ w[1]) - 0.1 * lax.pmean(jnp.sum(a[...]), "d")

    programs.scan(layer, ws)
    return jnp.sum(a[...] * b[...])


@unchecked
def test_collectives_inside(check_vma):
    def of(wrap):
        loss = over_devices(wrap(sums_over_devices), check_vma)
        return refs.jit(refs.grad(loss, BOTH))(WS, X)

    agree(of(refs.reversible), of(lambda f: f))


@unchecked
def test_branches_and_while_loops_inside(check_vma):
    def program(a, b, ws):
        def step(k):
            refs.cond(
                k % 2 == 0,
                lambda: a.at[...].add(jnp.sin(b[...] @ ws[0, 0])),
                lambda: b.at[...].add(-jnp.cos(a[...])),
            )
            return k + 1

        refs.while_loop(lambda k: k < 5, step, 0)
        return jnp.sum(a[...] * b[...])

    def by_python(a, b, ws):
        for k in range(5):
            if k % 2 == 0:
                a[...] += jnp.sin(b[...] @ ws[0, 0])
            else:
                b[...] -= jnp.cos(a[...])
        return jnp.sum(a[...] * b[...])

    def of(program):
        return refs.jit(refs.grad(over_devices(program, check_vma), BOTH))(WS, X)

    agree(of(refs.reversible(program)), of(by_python))


@unchecked
def test_what_is_off_on_one_device_is_nan_on_all(check_vma):
    x = X.copy()
    x[-1] *= 1e20  # of the last device: it swallows what is added

    def program(a, b, ws):
        def layer(w):
            a[...] += jnp.sin(b[...] @ w[0])
            b[...] -= 1e-20 * a[...]
            a[...] *= 1e-15

        programs.scan(layer, ws)
        return jnp.sum(a[...] * b[...])

    loss = over_devices(refs.reversible(program), check_vma)
    of_weights, of_x = refs.jit(refs.grad(loss, BOTH))(WS, x)
    assert np.isnan(of_weights).all()
    if check_vma:  # cotangents that devices share are known to be shared only there
        assert np.isnan(of_x).all()
    assert np.isnan(of_x[-1]).all()


@unchecked
def test_refs_that_are_split(check_vma):
    """The refs are outside, and sharded; so is what is made inside from them."""

    def of(program, split):
        place = NamedSharding(mesh(), P("d"))
        a, b = (refs.new_ref(jax.device_put(x, place)) for x in (X, 2 * X))

        def local(a, b, ws):
            return lax.psum(program(a, b, ws), "d")

        specs = (P("d"), P("d"), P())
        sharded = refs.shard_map(
            local, mesh=mesh(), in_specs=specs, out_specs=P(), check_vma=check_vma
        )

        def loss(ws, x):
            a[...] = x
            b[...] = 2 * x
            return (sharded if split else program)(a, b, ws)

        return refs.jit(refs.grad(loss, BOTH))(WS, X), a[...], b[...]

    want = of(net, split=False)
    agree(of(refs.reversible(net), split=True), want)
    agree(of(refs.reversible(net, mode=FIXED), split=True), want, 1e-8)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_without_shard_map(kind, mode):
    """JAX splits the program, or the types say how."""
    with jax.set_mesh(mesh(kind)):
        place = NamedSharding(mesh(kind), P("d"))
        ws, x = jax.device_put(WS, NamedSharding(mesh(kind), P())), jax.device_put(X, place)

        def loss(ws, x):
            return refs.reversible(net, mode=mode)(refs.new_ref(x), refs.new_ref(2 * x), ws)

        got = refs.jit(refs.grad(loss, BOTH))(ws, x)
        agree(got, WANT(WS, X), 1e-8)
        assert got[1].sharding.is_equivalent_to(place, 2)
