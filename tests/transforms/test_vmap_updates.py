"""Lanes that multiply a ref they share, or take its minimum or maximum with what they have.

The order of the lanes doesn't matter: what comes of it is what a loop over them leaves.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs.errors import RefValueError

LANES = jnp.array([0, 1, 0, 2])
X = np.array([3, 1, 5, 2])

UFUNCS = {"multiply": jnp.multiply, "min": jnp.minimum, "max": jnp.maximum}
methods = pytest.mark.parametrize("method", UFUNCS)


def do(method, view, x):
    getattr(view, method)(x)


def element(method, r, i, x):
    do(method, r.at[i, 0], x)


def whole(method, r, i, x):
    do(method, r.at[...], x)


def row_by_operator(method, r, i, x):
    if method == "multiply":
        r[i] *= x
    else:
        r[i] = UFUNCS[method](x, r[i])


def backwards(method, r, i, x):
    do(method, r.at[i, ::-1], jnp.arange(1, 4).astype(r.dtype) * x)


def named_twice(method, r, i, x):
    do(method, r.at[jnp.stack([i, i, 2])], x)


def arrays_and_slices(method, r, i, x):
    do(method, r.at[jnp.stack([i, 0, i]), 1:], x)
    do(method, r.at[:2, jnp.stack([i, 0, i])], x)


def moving_slice(method, r, i, x):
    do(method, r.at[:, jax.ds(i, 2)], x)


def out_of_bounds(method, r, i, x):
    do(method, r.at[i + 1, i], x)


def in_a_branch(method, r, i, x):
    refs.cond(x > 1, lambda: do(method, r.at[i], x), lambda: None)


def in_a_switch_of_all(method, r, i, x):
    refs.switch(1, [lambda: None, lambda: do(method, r.at[i], x)])


def in_a_loop_that_ends_for_each(method, r, i, x):
    def step(k):
        do(method, r.at[i], (k + 1).astype(r.dtype))
        return k + 1

    refs.while_loop(lambda k: k < i + 1, step, 0)


def in_a_scan(method, r, i, x):
    refs.scan(lambda _, k: (None, do(method, r.at[k], x)), None, jnp.arange(3))


def in_rows_of_a_scan(method, r, i, x):
    refs.scan(lambda _, row: (None, do(method, row.at[i], x)), None, r)


def in_calls(method, r, i, x):
    jax.jit(lambda x: do(method, r.at[i], x))(x)
    refs.checkpoint(lambda x: do(method, r.at[2], x))(x)
    refs.jit(lambda r, x: do(method, r.at[2], x))(r, x)


def in_more_lanes(method, r, i, x):
    refs.vmap(lambda k, y: do(method, r.at[k, i], y))(jnp.arange(3), jnp.stack([x] * 3))
    refs.vmap(lambda k: do(method, r.at[jnp.stack([k, k, 0])], x))(jnp.arange(3))


def under_a_derivative(method, r, i, x):
    def loss(y):
        do(method, r.at[i], x)
        return y**2

    assert refs.grad(loss)(2.0).shape == ()


PROGRAMS = [
    element,
    whole,
    row_by_operator,
    backwards,
    named_twice,
    arrays_and_slices,
    moving_slice,
    out_of_bounds,
    in_a_branch,
    in_a_switch_of_all,
    in_a_loop_that_ends_for_each,
    in_a_scan,
    in_rows_of_a_scan,
    in_calls,
    in_more_lanes,
    under_a_derivative,
]


def by_lanes(program, method, start, xs):
    """What a loop over the lanes leaves."""

    @refs.jit
    def loop(r):
        for k in range(len(xs)):
            program(method, r, LANES[k], xs[k])

    r = refs.new_ref(start)
    loop(r)
    return r[...]


@methods
@pytest.mark.parametrize("program", PROGRAMS)
def test_all_contributions_arrive(program, method):
    start = jnp.array([[2.0, 4.0, 1.0]] * 3)
    xs = jnp.asarray(X, jnp.float32)
    expected = by_lanes(program, method, start, xs)
    given, closed_over = refs.new_ref(start), refs.new_ref(start)
    refs.vmap(lambda r, i, x: program(method, r, i, x), in_axes=(None, 0, 0))(given, LANES, xs)
    np.testing.assert_allclose(given[...], expected, rtol=1e-6)
    refs.jit(refs.vmap(lambda i, x: program(method, closed_over, i, x)))(LANES, xs)
    np.testing.assert_allclose(closed_over[...], expected, rtol=1e-6)


@methods
@pytest.mark.parametrize("dtype", [np.int8, np.uint32, jnp.bfloat16, bool])
@pytest.mark.parametrize("program", [whole, element, named_twice, in_a_branch, in_more_lanes])
def test_of_any_type(program, method, dtype):
    start = jnp.array([[2, 1, 1]] * 3).astype(dtype)
    xs = jnp.asarray(X > 2 if dtype is bool else X, dtype)
    r = refs.new_ref(start)
    refs.vmap(lambda i, x: program(method, r, i, x))(LANES, xs)
    rtol = 2e-2 if dtype is jnp.bfloat16 else 0  # it is rounded after each product
    expected = by_lanes(program, method, start, xs)
    np.testing.assert_allclose(r[...] * 1.0, expected * 1.0, rtol=rtol)


@methods
@pytest.mark.parametrize("program", [whole, element, named_twice, in_a_branch])
def test_nan_and_infinity_are_as_in_a_loop(program, method):
    for start in (jnp.ones((3, 3)), jnp.full((3, 3), jnp.nan), jnp.full((3, 3), -jnp.inf)):
        for x in (jnp.nan, jnp.inf, -jnp.inf):
            xs = jnp.array([2.0, x, 3.0, 2.0])
            r = refs.new_ref(start)
            refs.vmap(lambda i, x, r=r: program(method, r, i, x))(LANES, xs)
            np.testing.assert_array_equal(r[...], by_lanes(program, method, start, xs))


@methods
def test_what_is_the_same_in_every_lane_arrives_once_for_each(method):
    r = refs.new_ref(jnp.array(3.0))
    refs.vmap(lambda x: do(method, r.at[...], 2.0))(X)
    assert r[...] == {"multiply": 48, "min": 2, "max": 3}[method]
    refs.vmap(lambda x: do(method, r.at[...], x))(jnp.ones(0))
    assert r[...] == {"multiply": 48, "min": 2, "max": 3}[method]


def test_flags():
    """`|=` and `&=` of truth values."""
    some, every = refs.new_ref(jnp.zeros(3, bool)), refs.new_ref(jnp.ones(3, bool))

    def lane(i, x):
        some[i] |= x > 2
        every[i] &= x > 2

    refs.vmap(lane)(LANES, X)
    np.testing.assert_array_equal(some[...], [True, False, False])
    np.testing.assert_array_equal(every[...], [True, False, False])


def test_a_sum_after_an_overwrite_would_depend_on_the_order():
    r = refs.new_ref(jnp.zeros(3), name="r")

    def lane(x):
        r[...] = 0
        refs.addupdate(r, ..., x)

    with pytest.raises(RefValueError, match=r"accumulation, besides other uses, into ref `r`"):
        refs.vmap(lane)(X * 1.0)
    assert r[...].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "update",
    [
        lambda r, x: r.__setitem__(..., r[...] | x),
        lambda r, x: refs.addupdate(r, np.array([0, 2]), x),
        lambda r, x: r.at[1].add(x),
        lambda r, x: r.at[::2].max(x),
    ],
)
def test_the_ways_to_raise_flags_go_together(update):
    def lane(r, x):
        r[...] += x
        update(r, ~x)

    loop, lanes = refs.new_ref(jnp.zeros(3, bool)), refs.new_ref(jnp.zeros(3, bool))
    xs = jnp.array([False, False])
    for x in xs:
        lane(loop, x)
    refs.vmap(lane, in_axes=(None, 0))(lanes, xs)
    assert loop[...].any()
    np.testing.assert_array_equal(lanes, loop)


def test_several_refs_each_in_its_own_way():
    total, best, worst, product = (refs.new_ref(jnp.ones(2)) for _ in range(4))

    def lane(i, x):
        total.at[i % 2].add(x)
        best.at[i % 2].max(x)
        worst.at[i % 2].min(x)
        product.at[i % 2].multiply(x)

    refs.vmap(lane)(LANES, X * 1.0)
    got = [list(map(float, r[...])) for r in (total, best, worst, product)]
    assert got == [[11, 2], [5, 1], [1, 1], [30, 1]]


@methods
@pytest.mark.parametrize("where", ["outside", "inside", "by the state"])
def test_derivatives(method, where):
    """Of a shared ref, where no two lanes tie, those of NumPy's reduction."""
    xs, start = jnp.array([3.0, 1.0, 5.0, 2.0]), 1.5

    def reduced(start, xs):
        if method == "multiply":
            return start * jnp.prod(xs)
        return UFUNCS[method](start, getattr(jnp, method)(xs))

    def loss(start, xs):
        r = refs.new_ref(start)
        refs.vmap(lambda x: do(method, r.at[...], x))(xs)
        return r[...]

    def loss_of_ref(r, xs):
        refs.vmap(lambda x: do(method, r.at[...], x))(xs)
        return r[...]

    expected = jax.grad(reduced, (0, 1))(start, xs)
    if where == "outside":
        got = refs.grad(loss, (0, 1))(start, xs)
    elif where == "inside":
        got = refs.jit(refs.grad(loss, (0, 1)))(start, xs)
    else:
        got = refs.grad(loss_of_ref, (0, 1))(refs.new_ref(start), xs)
    jax.tree.map(np.testing.assert_allclose, got, expected)


def test_a_loop_over_what_another_transformation_leaves():
    """A transaction within a lane starts from what is neutral, and is taken up by the ref."""
    best = refs.new_ref(jnp.zeros(2))

    def lane(x):
        def step(k, total):
            best.at[k].max(x * (k + 1))
            return total + x

        value, slope = refs.jvp(lambda x: refs.fori_loop(0, 2, step, x), (x,), (1.0,))
        return value + slope

    out = refs.vmap(lane)(jnp.array([1.0, 3.0, 2.0]))
    np.testing.assert_allclose(out, 3 * np.array([1.0, 3.0, 2.0]) + 1)
    np.testing.assert_allclose(best[...], [3, 6])


def test_two_results_of_one_operation_are_different_indices():
    """So what is read isn't what is written, and the lanes would read what others write."""
    r = refs.new_ref(jnp.arange(4.0))

    def lane(x):
        low, high = jax.jit(lambda x: (jnp.argmin(x), jnp.argmax(x)))(x)
        r[low] = r[high] + 1

    with pytest.raises(refs.errors.RefValueError, match="what other lanes write"):
        refs.vmap(lane)(jnp.arange(6.0).reshape(2, 3))
    np.testing.assert_array_equal(r[...], jnp.arange(4.0))
