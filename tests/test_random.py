"""Generators in refs: JAX's own numbers, under every transformation; in lanes those of the loop."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import random as jax_random
from jax.sharding import AxisType

import refs
from refs.random import stateful_rng

XS = jnp.arange(3.0)

DRAWS = [
    lambda rng: jax.random.key_data(rng.key()),
    lambda rng: jax.random.key_data(rng.key((2, 3))),
    lambda rng: rng.random(),
    lambda rng: rng.random([2]),
    lambda rng: rng.uniform(1, jnp.array([2.0, 3.0])),
    lambda rng: rng.uniform(size=(2, 1), dtype=jnp.float16),
    lambda rng: rng.normal(jnp.arange(3), 2.0),
    lambda rng: rng.normal(size=4),
    lambda rng: rng.integers(10),
    lambda rng: rng.integers(-5, jnp.array([5, 6]), dtype=jnp.int16),
    lambda rng: rng.split(3)._words if isinstance(rng, refs.random.StatefulPRNG) else words(rng, 3),
    lambda rng: [g.normal() for g in rng.spawn(3)],
]


def words(rng, n):
    """What our generator keeps, of one of JAX's."""
    base, counter = rng.split(n)._base_key, np.zeros((n, 1), np.uint32)
    return np.concatenate([jax.random.key_data(base), counter], 1)


def same(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-6)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("x64", [False, True])
def test_it_draws_what_jaxs_generator_draws(impl, x64):
    with jax.enable_x64(x64):
        ours, theirs = stateful_rng(7, impl=impl), jax_random.stateful_rng(7, impl=impl)
        for draw in 2 * DRAWS:
            same(draw(ours), draw(theirs))


def test_keys_are_of_its_seed_and_its_counter():
    rng, base = stateful_rng(5), jax.random.key(5)
    for k in range(3):
        same(rng.normal(size=2), jax.random.normal(jax.random.fold_in(base, k), 2))


def loop(rng):
    """Draws of one generator after the other."""
    return jnp.stack([rng.normal() for _ in range(4)])


def under_jit(rng):
    return refs.jit(loop)(rng)


def closed_over(rng):
    return refs.jit(lambda: loop(rng))()


def compiled_once(rng):
    draw = refs.jit(rng.normal)
    return jnp.stack([draw() for _ in range(4)])


def by_scan(rng):
    return refs.scan(lambda c, _: (c, rng.normal()), None, None, length=4)[1]


def by_fori_loop(rng):
    x = refs.new_ref(jnp.zeros(4))

    def step(i, _):
        x[i] = rng.normal()

    refs.fori_loop(0, 4, step, None)
    return x[...]


def by_while_loop(rng):
    x, i = refs.new_ref(jnp.zeros(4)), refs.new_ref(0)

    def step(_):
        x[i[...]] = rng.normal()
        i[...] += 1

    refs.while_loop(lambda _: i[...] < 4, step, None)
    return x[...]


def in_branches(rng):
    def one(k):
        return refs.cond(k % 2 == 0, rng.normal, lambda: 0.0 + rng.normal())

    return jnp.stack([refs.jit(one)(k) for k in range(4)])


def in_a_derivative(rng):
    return jnp.stack([refs.grad(lambda x: x * rng.normal())(1.0) for _ in range(4)])


def checkpointed(rng):
    """The derivative of exp(n x) by x is n exp(n x), if n is drawn the same when it runs again."""

    def f(x):
        return refs.checkpoint(lambda x: jnp.exp(x * rng.normal()))(x)

    both = [refs.value_and_grad(f)(1.0) for _ in range(4)]
    for y, dy in both:
        np.testing.assert_allclose(dy, y * jnp.log(y), rtol=1e-5)
    return jnp.stack([jnp.log(y) for y, _ in both])


def reversed_steps(rng):
    """The same, for steps that are undone."""
    a, b = refs.new_ref(1.0), refs.new_ref(1.0)

    @refs.reversible
    def f(x):
        def step(_, __):
            a[...] += x * b[...] * rng.normal()
            return None, None

        refs.scan(step, None, None, length=4)
        return a[...]

    return refs.grad(f)(1.0)


WAYS = [
    under_jit, closed_over, compiled_once, by_scan, by_fori_loop, by_while_loop, in_branches,
    in_a_derivative, checkpointed,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_it_draws_the_same_everywhere(way):
    rng, expected = stateful_rng(3), stateful_rng(3)
    np.testing.assert_allclose(way(rng), loop(expected), rtol=1e-5)
    same(rng.random(), expected.random())


def test_it_draws_the_same_where_steps_are_undone():
    rng, expected = stateful_rng(3), stateful_rng(3)
    np.testing.assert_allclose(reversed_steps(rng), sum(loop(expected)), rtol=1e-5)
    same(rng.random(), expected.random())


def test_without_jit():
    with jax.disable_jit():
        same(loop(stateful_rng(3)), loop(jax_random.stateful_rng(3)))


def test_it_is_an_argument_and_a_result():
    @refs.jit
    def made(seed):
        rng = stateful_rng(seed)
        rng.normal()
        return rng

    rng, expected = made(3), stateful_rng(3)
    expected.normal()
    same(rng.normal(), expected.normal())
    same(refs.vmap(lambda x: rng.normal())(XS), refs.vmap(lambda x: expected.normal())(XS))


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), refs.tree.copy],
    ids=["deepcopy", "pickle", "tree.copy"],
)
def test_copies_go_on_by_themselves(copied):
    rng = stateful_rng(3)
    rng.normal()
    other = copied(rng)
    same(loop(other), loop(rng))
    same(refs.vmap(lambda x: other.normal())(XS), refs.vmap(lambda x: rng.normal())(XS))


# -- Lanes ----------------------------------------------------------------------------------------


def lane(rng, x):
    return x + rng.normal(), rng.integers(1000, size=2)


def by_definition(f, rng, xs):
    """Each lane has a generator of its own: a Python loop."""
    results = [f(g, x) for g, x in zip(rng.spawn(len(xs)), xs, strict=True)]
    return jax.tree.map(lambda *rows: jnp.stack(rows), *results)


def both(seed=3):
    return stateful_rng(seed), stateful_rng(seed)


MAPPED = {
    "closed over": lambda f, rng, xs: refs.vmap(functools.partial(f, rng))(xs),
    "shared": lambda f, rng, xs: refs.vmap(f, in_axes=(None, 0))(rng, xs),
    "split": lambda f, rng, xs: refs.vmap(f)(rng.split(len(xs)), xs),
    "under jit": lambda f, rng, xs: refs.jit(refs.vmap(f, in_axes=(None, 0)))(rng, xs),
    "in a jit": lambda f, rng, xs: refs.vmap(refs.jit(functools.partial(f, rng)))(xs),
    "with a name": lambda f, rng, xs: refs.vmap(functools.partial(f, rng), axis_name="i")(xs),
}


def until(rng, x):
    """Lanes draw in different numbers."""
    n = refs.new_ref(0)

    def step(_):
        n[...] += 1

    refs.while_loop(lambda _: rng.uniform() < 0.2 + 0.2 * x, step, None)
    return n[...], rng.uniform()


def one_branch(rng, x):
    return refs.cond(x > 0.5, lambda: rng.normal() + rng.normal(), lambda: 0.0), rng.uniform()


def walk(rng, x):
    total = refs.new_ref(x)

    def step(_, __):
        total[...] += rng.normal()
        return _, total[...]

    return refs.scan(step, None, None, length=5)[1]


def slope(rng, x):
    return refs.value_and_grad(lambda x: jnp.exp(x * rng.normal()))(x), rng.uniform()


def lanes_in_lanes(rng, x):
    return rng.uniform(), refs.vmap(lambda y: x + y * rng.uniform())(XS), rng.uniform()


@pytest.mark.parametrize("f", [lane, until, one_branch, walk, slope, lanes_in_lanes])
@pytest.mark.parametrize("way", MAPPED.values(), ids=MAPPED)
def test_each_lane_draws_of_its_own(way, f):
    rng, expected = both()
    same(way(f, rng, XS), by_definition(f, expected, XS))
    same(rng.random(), expected.random())  # One key was taken, whatever the lanes have drawn.


def test_lanes_draw_different_numbers():
    rng = stateful_rng(0)
    drawn = refs.vmap(lambda _: rng.random())(jnp.zeros(1000))
    assert len(set(drawn.tolist())) > 990


def test_the_derivative_of_lanes():
    rng, expected = both()
    slopes = refs.grad(lambda x: jnp.sum(refs.vmap(lambda x: x * rng.normal())(x)))(XS)
    same(slopes, by_definition(lambda g, _: g.normal(), expected, XS))


def test_no_lanes():
    rng, expected = both()
    assert refs.vmap(lambda x: x + rng.normal())(jnp.zeros(0)).shape == (0,)
    same(rng.random(), expected.random())


def test_lanes_of_lanes_by_shape():
    rng, expected = both()
    got = refs.vmap(refs.vmap(lambda g: g.normal()))(rng.split((2, 3)))
    keys = expected.key((2, 3))
    want = [[jax.random.normal(jax.random.fold_in(k, 0)) for k in row] for row in keys]
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_other_refs_of_lanes_are_as_ever():
    rng, total = stateful_rng(0), refs.new_ref(0.0)

    def f(x):
        y = x * rng.normal()
        total[...] += y
        return y

    got = refs.vmap(f)(XS)
    np.testing.assert_allclose(total[...], jnp.sum(got), rtol=1e-6)


# -- Devices --------------------------------------------------------------------------------------

N = len(jax.devices())
everywhere = pytest.mark.parametrize("wrap", [lambda f: f, refs.jit], ids=["top level", "jit"])


def over_devices(f, **options):
    mesh = jax.make_mesh((N,), ("d",), axis_types=(AxisType.Auto,))
    return refs.shard_map(f, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"), **options)


@everywhere
@pytest.mark.parametrize("check_vma", [True, False])
def test_all_devices_draw_the_same(wrap, check_vma):
    rng, expected = both()
    got = wrap(over_devices(lambda x: x + rng.normal(), check_vma=check_vma))(jnp.zeros(N))
    same(got, jnp.full(N, expected.normal()))
    same(rng.random(), expected.random())


@everywhere
def test_lanes_on_devices(wrap):
    rng, expected = both()
    f = over_devices(refs.vmap(lambda x: x + rng.normal()))
    drawn = [g.normal() for g in expected.spawn(2)]
    same(wrap(f)(jnp.zeros(2 * N)), jnp.stack(N * drawn))


@everywhere
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_lanes_that_devices_divide(wrap, kind):
    with jax.set_mesh(jax.make_mesh((N,), ("d",), axis_types=(kind,))):
        rng, expected = both()
        place = jax.NamedSharding(jax.sharding.get_mesh(), jax.P("d"))
        xs = jax.device_put(jnp.zeros(2 * N), place)
        got = wrap(refs.vmap(lambda x: x + rng.normal()))(xs)
        same(got, jnp.stack([g.normal() for g in expected.spawn(2 * N)]))
        assert got.sharding.is_equivalent_to(place, 1)


# -- Itself ---------------------------------------------------------------------------------------


def test_without_a_seed_no_two_are_the_same():
    assert stateful_rng().random() != stateful_rng().random()


def test_its_text_says_what_it_holds():
    assert repr(stateful_rng(3)) == (
        "StatefulPRNG(Ref([0, 3, 0], dtype=uint32), impl='threefry2x32')"
    )


def test_a_refused_draw_raises_what_jaxs_does_and_counts_nothing():
    rng, jaxs = stateful_rng(0), jax_random.stateful_rng(0)
    wanted = []
    for draw in (rng.normal, jaxs.normal):
        with pytest.raises(TypeError, match="incompatible shapes") as told:
            draw(np.ones(3), size=2)
        wanted.append(str(told.value))
    assert wanted[0] == wanted[1]
    same(rng.normal(), stateful_rng(0).normal())
