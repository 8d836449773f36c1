"""Reads and updates of blocks, under all of JAX's transformations: as JAX's own operations are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.experimental import checkify, jet
from jax.interpreters import ad

import refs
from refs import _jax
from refs._indexing.access import Access, Place
from refs._indexing.accesses import in_lax, read, read_p, update, update_p

SHAPE = 5, 4
PLACES = [Place(), Place(drops=True), Place(wraps=False), Place(wraps=False, drops=True)]


@st.composite
def some_access(draw):
    """An access to a part of an array of `SHAPE`, and how many operands it has."""
    sizes = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    starts = tuple(
        draw(st.sampled_from(PLACES) | st.integers(0, n - size))
        for n, size in zip(SHAPE, sizes, strict=True)
    )
    if all(isinstance(start, int) for start in starts):
        starts = PLACES[0], starts[1]
    return Access(starts, sizes), sum(isinstance(start, Place) for start in starts)


def oracle_places(access, operands):
    """Where a block begins, and whether it counts."""
    rest, counts, starts = iter(operands), True, []
    for start, size, n in zip(access.starts, access.sizes, SHAPE, strict=True):
        if isinstance(start, Place):
            place = int(next(rest))
            place += n if start.wraps and place < 0 else 0
            counts &= not start.drops or 0 <= place <= n - size
            start = min(max(place, 0), n - size)
        starts.append(slice(start, start + size))
    return tuple(starts), counts


@given(st.data())
def test_as_an_oracle_says(data):
    access, n = data.draw(some_access())
    operands = [np.int32(data.draw(st.integers(-8, 8))) for _ in range(n)]
    mask = data.draw(st.sampled_from([None, True, False]))
    method = data.draw(st.sampled_from(["set", "add"]))
    x, value = np.arange(20.0).reshape(SHAPE), np.full(access.sizes, 9.0)
    where, counts = oracle_places(access, operands)
    np.testing.assert_array_equal(
        read(jnp.asarray(x), operands, access), x[where] if counts else np.zeros(access.sizes)
    )
    flag = None if mask is None else jnp.bool_(mask)
    got = update(jnp.asarray(x), jnp.asarray(value), operands, access, method, flag)
    if counts and mask is not False:
        x[where] = value + x[where] if method == "add" else value
    np.testing.assert_array_equal(got, x)


def program(access, n, method):
    """A function that reads, updates under a mask, and reads back what it has written."""

    def run(x, value, mask, *places):
        here, there = places[:n], places[n:]
        block = read(x, here, access)
        x = update(x, value * block, there, access, method, mask)
        return x, read(x * x, there, access) + block

    return run


def gradient(run):
    def loss(x, value, *rest):
        x, block = run(x, value, *rest)
        return (x * x).sum() + (block**3).sum()

    return jax.grad(loss, (0, 1))


def tangents(run):
    return lambda x, value, *rest: jax.jvp(
        lambda x, value: run(x, value, *rest), (x, value), (value.sum() * x, value)
    )


TRANSFORMED = {
    "values": lambda run: run,
    "jvp": tangents,
    "gradient": gradient,
    "second derivative": lambda run: tangents(gradient(run)),
    "of the array": lambda run: (
        lambda x, *rest: jax.grad(lambda x: (run(x, *rest)[0] ** 2).sum())(x)
    ),
    "linear in one": lambda run: (
        lambda x, value, *rest: jax.grad(lambda value: (run(x, value, *rest)[0] * x).sum())(value)
    ),
    "checkpoint": lambda run: gradient(jax.checkpoint(run)),
}


@given(st.data())
def test_as_by_jaxs_operations(data):
    """Alone, and in lanes in lanes, along any axis of any operands."""
    access, n = data.draw(some_access())
    run = data.draw(st.sampled_from([*TRANSFORMED.values()]))(
        program(access, n, data.draw(st.sampled_from(["set", "add"])))
    )
    shapes = [SHAPE, access.sizes, (), *[()] * 2 * n]
    lanes = data.draw(st.integers(0, 2))
    for size in (2, 3)[:lanes]:
        axes = [
            data.draw(st.none() | st.integers(0, len(shape))) if k or size == 2 else 0
            for k, shape in enumerate(shapes)
        ]
        if all(axis is None for axis in axes):
            axes[0] = 0
        run = jax.vmap(run, axes)
        shapes = [
            shape if axis is None else (*shape[:axis], size, *shape[axis:])
            for shape, axis in zip(shapes, axes, strict=True)
        ]
    numbers = np.random.default_rng(data.draw(st.integers(0, 99)))
    x, value = (jnp.asarray(numbers.integers(-3, 4, s), "float32") for s in shapes[:2])
    mask = jnp.asarray(numbers.random(shapes[2]) < 0.7)
    places = [jnp.asarray(numbers.integers(-7, 7, s), "int32") for s in shapes[3:]]
    args = x, value, mask, *places

    def in_jax(*args):
        with in_lax():
            return run(*args)

    is_jitted = data.draw(st.booleans())
    ours, theirs = (jax.jit(f) if is_jitted else f for f in (run, in_jax))
    jax.tree.map(np.testing.assert_array_equal, ours(*args), theirs(*args))


def test_lanes_in_lanes():
    x, i = np.arange(2 * 3 * 5.0).reshape(2, 3, 5), np.array([[1, 4, -1], [7, 0, 2]])

    def lane(x, i):
        access = Access((Place(drops=True),), (1,))
        old = read(x, [i], access.clipped)
        return old, update(x, old + 100, [i], access)

    old, new = jax.vmap(jax.vmap(lane))(jnp.asarray(x), jnp.asarray(i, "int32"))
    for a, b in np.ndindex(2, 3):
        assert old[a, b, 0] == x[a, b, min(i[a, b], 4)]
        x[a, b, i[a, b] : i[a, b] + 1 or None] += 100
    np.testing.assert_array_equal(new, x)


def test_the_gradient_of_what_is_overwritten_is_zero():
    access = Access((Place(drops=True),), (2,))
    for i, want in ((1, [1, 0, 0, 1]), (3, [1, 1, 1, 1])):
        write = lambda x, i=i: update(x, x[:2] * 0, [jnp.int32(i)], access).sum()  # noqa: E731
        np.testing.assert_array_equal(jax.grad(write)(jnp.ones(4)), want)


def test_cotangents_that_are_zero_stay_symbolic():
    x, value, i = jnp.ones(4), jnp.ones(1), jnp.int32(0)
    access, undefined = Access((Place(),), (1,)), lambda x: ad.UndefinedPrimal(jax.typeof(x))
    of_read = ad.primitive_transposes[read_p]
    of_update = ad.primitive_transposes[update_p]
    zero = ad.Zero(jax.typeof(x))
    cts = [
        *of_read(ad.Zero(jax.typeof(value)), undefined(x), i, access=access),
        *of_update(zero, undefined(x), undefined(value), i, access=access, method="set"),
    ]
    assert [type(ct) for ct in cts if ct is not None] == [ad.Zero] * 3


def test_without_jit():
    x, access = jnp.arange(4.0), Access((Place(),), (1,))
    with jax.disable_jit():
        np.testing.assert_array_equal(read(x, [jnp.int32(-1)], access), [3])
        new = update(x, jnp.ones(1), [jnp.int32(2)], access)
    np.testing.assert_array_equal(new, [0, 1, 1, 3])


def names(closed):
    return {str(eqn.primitive) for eqn in _jax.all_equations(closed.jaxpr.eqns)}


def step(r, i):
    r[i] = r[i] * r[i + 1]
    refs.fori_loop(0, 2, lambda k, _: r.at[k].add(r[i]), None)


OURS = {str(read_p), str(update_p)}


def test_what_leaves_our_hands_is_in_jaxs_operations():
    r, i = refs.new_ref(jnp.arange(6.0)), jnp.int32(2)
    assert names(refs.jit(step).trace(r, i).jaxpr) >= OURS
    discharged = refs.discharge(refs.make_jaxpr(step)(r, i))
    pure = functools.partial(refs.functionalize(step), r[...])
    for closed in (discharged, jax.make_jaxpr(pure)(i)):
        assert not OURS & names(closed)
        assert {"dynamic_slice", "dynamic_update_slice"} <= names(closed)


def test_jaxs_other_transformations_take_a_pure_function():
    def step(r, i):  # without a loop: jet has no rule for one
        r[i] = r[i] * r[i + 1]
        r[:3] += r[i]

    pure = refs.functionalize(step)
    x, i = jnp.arange(1.0, 7.0), jnp.int32(2)
    (_, want), along = jax.jvp(lambda x: pure(x, i), (x,), (jnp.ones(6),))
    (_, got), (_, [first]) = jet.jet(lambda x: pure(x, i), (x,), ([jnp.ones(6)],))
    np.testing.assert_allclose(got, want)
    np.testing.assert_allclose(first, along[1])
    error, (_, got) = jax.jit(checkify.checkify(pure, checkify.float_checks))(x, i)
    error.throw()
    np.testing.assert_allclose(got, want)


def test_other_places_need_no_compilation_outside_of_jit(caplog):
    x = jnp.arange(100.0)

    def gradient(k):
        def run(x):
            w = refs.new_ref(x)
            w[k] = w[k] * 2
            return w[k + 1 : k + 3].sum()

        return refs.grad(run)(x)

    def compiled():
        return sum("Compiling jit(update_block)" in r.getMessage() for r in caplog.records)

    jax.clear_caches()
    with jax.log_compiles():
        gradient(1), gradient(2)
        before = compiled()
        for k in range(3, 9):
            gradient(k)
    assert compiled() == before > 0


def test_an_access_says_what_it_reads():
    jaxpr = jax.make_jaxpr(lambda x, i: read(x, [i], Access((Place(), 1), (1, 3))))(
        jnp.zeros(SHAPE), 0
    )
    assert "read_block[access=[clip:+1, clip:+3]]" in str(jaxpr)
    assert "along 0:+1" in str(jax.make_jaxpr(jax.vmap(lanes_read))(*LANES))


LANES = jnp.zeros((2, 3)), jnp.zeros(2, "int32")


def lanes_read(x, i):
    return read(x, [i], Access((Place(drops=True),), (1,)))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_lanes_leave_out_rows_on_a_cpu_only(platform):
    """On a GPU XLA copies for a scatter that leaves out rows."""

    def lane(x, i, mask):
        return update(x, jnp.ones(1), [i], Access((Place(),), (1,)), "set", mask)

    args = jnp.zeros((40, 300)), jnp.zeros(40, "int32"), jnp.ones(40, bool)
    text = jax.jit(jax.vmap(lane)).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    assert text.count('"stablehlo.scatter"(') == 1
    assert text.count('"stablehlo.gather"(') == (platform == "cuda")


def test_keys_are_moved_by_jaxs_operations():
    r = refs.new_ref(jax.random.split(jax.random.key(0), 4))

    def move(i):
        r[i] = r[i + 1]

    jaxpr = refs.jit(move).trace(jnp.int32(0)).jaxpr
    refs.jit(move)(jnp.int32(0))
    assert not OURS & names(jaxpr)
    assert jnp.array_equal(jax.random.key_data(r[0]), jax.random.key_data(r[1]))
    assert lax.dynamic_slice_p.name in names(jaxpr)


def test_steps_in_lanes_that_diverge():
    def lane(x, takes_part):
        w = refs.new_ref(x)

        def write():
            w[::2] = 9.0
            w.at[1::2].add(1.0)

        lax.cond(takes_part, write, lambda: None)
        return w[...]

    x, flags = np.arange(10.0).reshape(2, 5), np.array([True, False])
    got = refs.vmap(lane)(jnp.asarray(x), jnp.asarray(flags))
    np.testing.assert_array_equal(got, [[9, 2, 9, 4, 9], x[1]])
