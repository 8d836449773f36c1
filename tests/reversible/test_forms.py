"""Forms in which people write steps that can be undone: each is, and its gradient is the plain one.

Most come from programs for other libraries. `arrays` are steps `(a, b, w) -> (a, b)` of a loop over
arrays alone, `of_refs` steps over refs `a` and `b`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import refs
from refs._reversible import pieces, places
from refs.errors import NotReversibleError
from tests.platforms import as_on_cpu
from tests.reversible.common import FIXED, MODES, WS, X, agree

pytestmark = pytest.mark.usefixtures("x64")
HALF = 3


def f(w, x):
    return jnp.tanh(w[: x.shape[0]] * x)


def joined(step):
    """A step of one array, of two that are joined."""

    def of_two(a, b, w):
        x = step(jnp.concatenate([a, b]), jnp.concatenate([w, w]))
        return x[: a.shape[0]], x[a.shape[0] :]

    return of_two


def twice_the_same(a, b, w):
    return a + f(w, b), b + f(w, a + f(w, b))


def a_slice_written_twice(x, w):
    return jnp.concatenate([x[6:] + f(w, x[:6]), x[:6]])


def a_sum_at_a_slice(x, w):
    return x.at[6:].add(f(w, x[:6]))[::-1]


def a_difference_at_a_slice(x, w):
    return x.at[6:].subtract(f(w, x[:6]))[::-1]


def written_at_a_slice(x, w):
    return x.at[6:].set(x[6:] + f(w, x[:6]))[::-1]


def rows_that_change_places(x, w):
    x = x.at[jnp.array([0, 8])].set(x[jnp.array([8, 0])])
    return x.at[:6].add(f(w, x[6:]))


def placed(a, b, w):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return b, lax.with_sharding_constraint(a + f(w, b), place)


def named(a, b, w):
    return b, checkpoint_name(a + f(w, b), "sum")


def behind_a_barrier(a, b, w):
    return lax.optimization_barrier((b, a + f(w, b)))


def checkpointed(a, b, w):
    return jax.checkpoint(lambda a, b, w: (b, a + f(w, b)))(a, b, w)


def of_a_checkpoint(a, b, w):
    return b, a + jax.checkpoint(f)(w, b)


def telling(a, b, w):
    jax.debug.callback(lambda x: None, a[0])
    return b, a + f(w, b)


def by_lanes_that_search(a, b, w):
    def first(x):
        return lax.while_loop(lambda n: n < 10 * x, lambda n: n + 1.0, 0.0)

    return b, a + w * jax.vmap(first)(b)


ARRAYS = [
    twice_the_same, placed, named, behind_a_barrier, checkpointed, of_a_checkpoint, telling,
    by_lanes_that_search,
]  # fmt: skip
JOINED = [
    a_slice_written_twice, a_sum_at_a_slice, a_difference_at_a_slice, written_at_a_slice,
    rows_that_change_places,
]  # fmt: skip
STEPS = {step.__name__: step for step in ARRAYS} | {s.__name__: joined(s) for s in JOINED}


def over_arrays(step):
    def loss(ws):
        (a, b), _ = lax.scan(lambda c, w: (step(*c, w), None), (X, 2 * X), ws)
        return jnp.sum(jnp.sin(a) * b)

    return loss


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_arrays(name, mode):
    loss = over_arrays(STEPS[name])
    agree(jax.grad(refs.reversible(loss, mode=mode, tolerance=1e-12))(WS), jax.grad(loss)(WS), 1e-8)
    if mode == "float" or name in {step.__name__ for step in ARRAYS}:
        report = refs.testing.check_reversible(loss, WS, mode=mode)
        assert [loop.how for loop in report.loops] == ["undone"]


def momentum(a, v, w):
    v = 0.9 * v + f(w, a)
    return a - v, v


def with_a_loop(a, b, w):
    return b, a + lax.fori_loop(0, 3, lambda k, x: jnp.tanh(w * x + k), b)


def nearly_nothing(a, b, w):
    """What floats lose in each step."""
    a = a + 1e3 * f(w, b)
    return a, b + 1e-9 * jnp.sin(a)


@pytest.mark.parametrize("step", [momentum, with_a_loop, nearly_nothing])
def test_arrays_exactly(step):
    loss = over_arrays(step)
    undone = refs.reversible(loss, mode=FIXED, tolerance=0.0)
    agree(jax.grad(undone)(WS), jax.grad(loss)(WS), 1e-7)
    report = refs.testing.check_reversible(loss, WS, mode=FIXED, rtol=1e-6)
    assert report.loops[0].how == "undone"


@as_on_cpu
@pytest.mark.as_released
@pytest.mark.parametrize("name", STEPS)
def test_memory_of_arrays(name):
    def of(n):
        gradient = jax.jit(jax.grad(refs.reversible(over_arrays(STEPS[name]))))
        return gradient.lower(np.ones((n, 6))).compile().memory_analysis().temp_size_in_bytes

    assert of(400) <= 1.1 * of(40)


# --- Over refs


def sums_that_are_used_again(a, b, w):
    new = a[...] + f(w, b[...])
    a[...] = new
    b[...] += jnp.sin(new)


def a_pure_step(a, b, w):
    def leap(x, v):
        v = v - w * jnp.sin(x)
        return x + w * v, v

    a[...], b[...] = leap(a[...], b[...])


def lanes_of_two_refs(a, b, w):
    def lane(x, y, w):
        x[...] += jnp.sin(w * y[...])
        y[...] += jnp.sin(w * x[...])

    refs.vmap(lane)(a, b, w)


def elements_that_change_places(a, b, w):
    a[...] += f(w, b[...])
    b[[4, 1]] = b[[1, 4]]


def elements_by_an_array(a, b, w):
    a[...] += f(w, b[...])
    b[jnp.array([4, 1, 0])] = b[jnp.array([1, 0, 4])]


def sums_at_an_array(a, b, w):
    a[jnp.arange(2)] += w[:2] * b[jnp.array([5, 0])]
    b[...] += f(w, a[...])


OF_REFS = [
    sums_that_are_used_again, a_pure_step, lanes_of_two_refs, elements_that_change_places,
    elements_by_an_array, sums_at_an_array,
]  # fmt: skip


def over_refs(step):
    def program(a, b, ws):
        refs.scan(lambda _, w: (step(a, b, w), None), None, ws)
        return jnp.sum(jnp.sin(a[...]) * b[...])

    return program


@pytest.mark.parametrize("step", OF_REFS)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_refs(step, mode):
    def loss(wrap):
        return lambda ws: wrap(over_refs(step))(refs.new_ref(X), refs.new_ref(2 * X), ws)

    found = refs.grad(loss(lambda f: refs.reversible(f, mode=mode)))(WS)
    agree(found, refs.grad(loss(lambda f: f))(WS), 1e-8)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_scratch_ref(mode):
    def loss(wrap):
        def program(a, b, ws):
            scratch = refs.new_ref(X)

            def step(_, w):
                scratch[...] = a[...][::-1]
                b[...] += jnp.sin(w * scratch[...])
                a[...] += jnp.sin(b[...])
                return _, None

            refs.scan(step, None, ws)
            return jnp.sum(a[...])

        return lambda ws: wrap(program)(refs.new_ref(X), refs.new_ref(2 * X), ws)

    found = refs.grad(loss(lambda f: refs.reversible(f, mode=mode)))(WS)
    agree(found, refs.grad(loss(lambda f: f))(WS), 1e-8)


@pytest.mark.parametrize("step", [elements_that_change_places, sums_at_an_array])
def test_what_is_large_is_not_looked_at_element_by_element(step, monkeypatch):
    for module in (places, pieces):
        monkeypatch.setattr(module, "LARGEST", 5)

    def loss(ws):
        return refs.reversible(over_refs(step))(refs.new_ref(X), refs.new_ref(2 * X), ws)

    with pytest.raises(NotReversibleError, match="can't be undone"):
        refs.grad(loss)(WS)


def test_a_ref_that_is_an_argument_and_closed_over():
    """Outside of `jit`, too, where it would be JAX's error about the while_loop."""
    a, b = refs.new_ref(X), refs.new_ref(2 * X)

    def f(w, *refs_given):
        def step(k):
            a[...] += jnp.sin(w * b[...])
            b[...] += jnp.sin(w * a[...])
            return k + 1

        refs.while_loop(lambda k: k < 3, step, 0)
        return jnp.sum(a[...])

    def gradient(*given):
        a.set(X), b.set(2 * X)
        return refs.grad(refs.reversible(f))(0.3, *given)

    agree(gradient(a), gradient())
    agree(gradient(b, a), gradient())


@pytest.mark.parametrize("anchors", [None, 1, 2, 3, 50])
def test_a_ref_that_is_zero_and_stays_so_at_first(anchors):
    def loss(wrap):
        def program(x, v, rates):
            def step(_, rate):
                v[...] -= rate * jnp.sin(x[...])
                x[...] += rate * v[...]
                return _, None

            refs.scan(step, None, rates)
            return jnp.sum(x[...] ** 2)

        return lambda rates: wrap(program)(refs.new_ref(X), refs.new_ref(0 * X), rates)

    rates = jnp.array([0.0, 0.1, 0.1, 0.1, 0.1, 0.1])
    found = refs.grad(loss(lambda f: refs.reversible(f, anchors=anchors)))(rates)
    agree(found, refs.grad(loss(lambda f: f))(rates))


@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
def test_numbers_that_are_not_finite_and_masked(bad):
    def loss(wrap):
        def program(a, b, ws):
            def step(_, w):
                a[...] += jnp.sin(w * jnp.where(jnp.isfinite(b[...]), b[...], 0.5))
                b[...] += a[...]
                return _, None

            refs.scan(step, None, ws)
            return jnp.sum(a[...])

        start = np.where(np.arange(6) == 2, bad, X)
        return lambda ws: wrap(program)(refs.new_ref(X), refs.new_ref(start), ws)

    agree(refs.grad(loss(refs.reversible))(WS), refs.grad(loss(lambda f: f))(WS))


def test_forward_mode_of_a_function_that_makes_its_refs():
    @refs.reversible
    def f(x):
        a = refs.new_ref(x)
        a[...] += 1.0
        return jnp.sum(a[...] ** 2)

    agree(refs.jacfwd(f)(X), 2 * (X + 1))
    agree(jax.jacfwd(f)(X), 2 * (X + 1))


def test_weak_types_stay():
    f = refs.reversible(jnp.sin)
    assert f(1.0).weak_type
    assert jax.grad(f)(1.0).weak_type


def test_static_arguments():
    f = refs.reversible(
        lambda x, how, *, often=1: x**often if how == "power" else x,
        static_argnums=1,
        static_argnames="often",
    )
    agree(refs.grad(f)(3.0, "power", often=2), 6.0)
    agree(jax.jit(jax.grad(f), static_argnums=1)(3.0, "as it is"), 1.0)


# --- Explicit meshes: types have shardings


def swapped(a, b, w):
    a[...], b[...] = b[...], a[...]
    a[...] += f(w, b[...])


def scaled(a, b, w):
    a[...] *= 0.5
    b[...] += f(w, a[...])


def turned(a, b, w):
    a[...] = a[...][::-1]
    b[...] += f(w, a[...])


@pytest.mark.parametrize("step", [swapped, scaled, turned])
@pytest.mark.parametrize("options", [{}, {"mode": FIXED}, {"anchors": 2}], ids=str)
def test_explicit_meshes(step, options):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    place = jax.NamedSharding(mesh, jax.P("d"))

    def loss(wrap):
        def of(ws):
            a, b = (refs.new_ref(jax.device_put(x, place)) for x in (X, 2 * X))
            return wrap(over_refs(step))(a, b, ws)

        return refs.jit(refs.grad(of))

    with jax.set_mesh(mesh):
        found = loss(lambda f: refs.reversible(f, **options))(WS)
        agree(found, loss(lambda f: f)(WS), 1e-8)


def test_lanes_over_an_explicit_mesh():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))

    def f(x):
        def step(c, _):
            return (c[1], c[0] + jnp.sin(c[1])), None

        (a, b), _ = lax.scan(step, (x, x), None, length=3)
        return jnp.sum(a * b)

    with jax.set_mesh(mesh):
        xs = jax.device_put(WS, jax.P("d"))
        undone = refs.reversible(f)
        agree(jax.vmap(jax.grad(undone))(xs), jax.vmap(jax.grad(f))(xs))
        total = jax.grad(lambda xs: jax.vmap(undone)(xs).sum())
        agree(total(xs), jax.grad(lambda xs: jax.vmap(f)(xs).sum())(xs))
