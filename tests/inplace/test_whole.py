"""Buffers that are overwritten as a whole, and read beside that: their kernels run in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from refs._inplace import rewrite
from tests.inplace.helpers import assert_in_place

pytestmark = pytest.mark.as_released

N = 48  # Numbers are small integers, and quotients of them by powers of two: sums are exact.


def a_part_is_returned(n):
    old = n[2, 3]
    n[...] *= 0.5
    return old


def a_part_of_the_new(n):
    n[...] *= 0.5
    return n[2, 3]


def a_part_is_used_and_another_returned(n):
    old = n[2, 3]
    n[...] = n[...] * 0.5 - n[4]
    return old


def parts_of_both(n):
    n[...] = n[...] * 0.5 - n[4]
    return n[2, 3]


def twice(n):
    n[...] = n[...] * 0.5 - n[4]
    n[...] = n[...] * 0.5 - n[5]


def a_part_of_what_is_made_on_the_way(n):
    y = n[...] * 2
    n[...] = y + y[3]


def then_a_row_of_it(n):
    row = n[3]
    n[...] *= 0.5
    n[3] = row


def then_a_loop(n):
    row = n[3]
    n[...] *= 0.5
    lax.fori_loop(0, 4, lambda k, _: n.__setitem__(k, n[k + 1] + row), None)
    return row


def a_product(n):
    y = jnp.ones((N, N)) @ n[...]
    n[...] *= 0.5
    return y


def a_sum(n):
    total = n[...].sum()
    n[...] *= 0.5
    return total


def a_sum_is_used(n):
    n[...] -= n[...].sum(0)


def a_mean(n):
    """XLA divides in the kernel of the sum, when it likes."""
    mean = n[...].mean()
    n[...] *= 0.5
    return mean


def a_mean_goes_to_another(n, m):
    m[0, 0] = n[...].sum() / 4
    n[...] *= 0.5


def a_mean_before_a_row_is_written(n):
    mean = n[...].mean()
    n[3] = 0.0
    return mean


def a_product_before_a_row_is_written(n):
    y = jnp.round((jnp.ones((N, N)) @ n[...]) / 64) + 1
    n[3] = 0.0
    return y


def a_row_was_written_before(n):
    n[3] *= 2
    n[...] -= n[3]


def a_choice_by_a_row(n):
    n[...] = jnp.where(n[3] > 8, n[...] * 2, n[...])
    return n[3]


def two_that_read_each_other(n, m):
    n[...] += m[3]
    m[...] += n[3]


def a_moving_mean(n, m):
    n[...] -= n[...].max()
    m[...] = 0.5 * m[...] + n[...].sum(0)
    return m[0], n[...].max()


def steps_of_an_elimination(n, m):
    def step(k, _):
        factors = jnp.where(jnp.arange(N) > k, jnp.round(n[:, k] / 8), 0.0)
        m[:, k] = factors
        n[...] -= factors[:, None] * jnp.round(n[k] / 8)
        n[:, k] = factors

    lax.fori_loop(0, 6, step, None)


def steps_that_normalise(n, m):
    def step(k, _):
        m[...] = jnp.round((n[...] @ m[...]) / 64) % 8
        n[...] = n[...] * 0.5 + m[...][k]

    lax.fori_loop(0, 3, step, None)


def steps_with_products_of_the_new(n, m):
    def step(k, _):
        n[...] -= jnp.round((m[...] @ jnp.ones((N, N))) / 64)
        m[...] += jnp.round((jnp.ones((N, N)) @ (0.5 * n[...] + 1)) / 64)

    lax.fori_loop(0, 3, step, None)


ONE = [
    *(a_part_is_returned, a_part_of_the_new, a_part_is_used_and_another_returned, parts_of_both),
    *(twice, a_part_of_what_is_made_on_the_way, then_a_row_of_it, then_a_loop, a_product),
    *(a_sum, a_sum_is_used, a_choice_by_a_row, a_mean),
    a_row_was_written_before,
    *(a_mean_before_a_row_is_written, a_product_before_a_row_is_written),
]
TWO = [
    *(two_that_read_each_other, a_moving_mean, a_mean_goes_to_another),
    *(steps_of_an_elimination, steps_that_normalise, steps_with_products_of_the_new),
]
PROGRAMS = dict.fromkeys(ONE, 1) | dict.fromkeys(TWO, 2)


def arrays(n):
    return [jnp.arange(1.0 * N * N).reshape(N, N) % 16 + k for k in range(n)]


@pytest.mark.parametrize("fun", PROGRAMS, ids=lambda fun: fun.__name__)
def test_in_place(fun):
    n_refs = PROGRAMS[fun]
    assert_in_place(fun, *map(refs.new_ref, arrays(n_refs)))
    ours = [*map(refs.new_ref, arrays(n_refs))]
    closed = refs.discharge(refs.make_jaxpr(fun)(*ours))
    results = jax.tree.leaves(refs.jit(fun)(*ours))
    want = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *arrays(n_refs))
    for x, y in zip((*results, *(r[...] for r in ours)), want, strict=True):
        np.testing.assert_array_equal(x, y)


def test_products_of_the_new_wait_for_nothing():
    """A fence would keep what was subtracted until the product is there: memory for one more."""
    ours = [*map(refs.new_ref, arrays(2))]
    compiled = refs.jit(steps_with_products_of_the_new).lower(*ours).compile()
    assert "conditional" not in compiled.as_text()


# --- What can't be in place, or mustn't be taken for it, keeps its values ---


def several_results_of_one(n, i):
    half = (n * 0.5).at[i].set(0.0)
    return half, n * 0.25 + half[i + 1]


def a_result_that_needs_the_other(n, m):
    double = n * 2
    m = m + double.sum(0)
    return double + jnp.round((m @ jnp.ones((N, N))) / 64), m


def kernels_that_take_one_another(flags, m, i):
    """The one of flags begins when a row of the other's result has been read."""
    new = jnp.where(flags, m, 0.0).at[i].set(1.0)
    return flags ^ (new[i + 1] > 3), new, flags[0], m[2]


def two_in_one_loop(n, m, i):
    def step(k, state):
        n, m = state
        return n.at[k].set(m[k + 1]), m.at[k].set(n[k + 1])

    return lax.fori_loop(0, 5, step, (n * 0.5 - n[i], m * 0.5 - m[i]))


def the_two_change_places(n, m, i):
    return m * 0.5 + n[i], n * 0.5 + m[i], n[i], m[i + 1]


def neighbours(n):
    return n * 0.5 + jnp.roll(n, 1), n[3]


def the_old_one_where_the_new_one_says(n, i):
    new = (n * 0.5).at[i].set(2.0)
    return new, n[new[i, 0].astype(int)]


def a_row_spread_and_turned(n, i):
    return n - jnp.broadcast_to(n[i], (N, N))[:, ::-1], n[0]


def a_long_chain(n, i):
    """Longer than is looked at."""
    first = n[i]
    for k in range(120):
        n = (n + first[k % 3]) % 16
    return n, first


def much_that_was_read(n, i):
    rows = [n[i + k] * 0.5 for k in range(120)]
    return n - sum(rows), rows[3]


def keys(n, i):
    """Keys don't pass through conditionals."""
    keys = jax.random.wrap_key_data(n.astype(jnp.uint32)[:, :2])
    return jnp.where(n[0, 0] > 0, keys, keys[i]), n[i]


VALUES = {
    **dict.fromkeys([several_results_of_one, a_long_chain, much_that_was_read, keys], "ni"),
    **dict.fromkeys([the_old_one_where_the_new_one_says, a_row_spread_and_turned], "ni"),
    **dict.fromkeys([two_in_one_loop, the_two_change_places], "nmi"),
    kernels_that_take_one_another: "bmi",
    a_result_that_needs_the_other: "nm",
    neighbours: "n",
}


@pytest.mark.parametrize("fun", VALUES, ids=lambda fun: fun.__name__)
def test_the_values_stay(fun):
    n, m = arrays(2)
    args = [{"n": n, "m": m, "b": n > 8, "i": 3}[name] for name in VALUES[fun]]
    closed = jax.make_jaxpr(fun)(*args)
    want = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)
    compiled = jax.jit(refs.in_place(fun))
    ways = [compiled(*args)]
    ways += [
        jax.core.eval_jaxpr(rewrite(closed.jaxpr, *how), closed.consts, *args)
        for how in ((True, False), (False, False), (True, True))
    ]
    for got in ways:
        for x, y in zip(want, got, strict=True):
            assert x.dtype == y.dtype
            if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
                x, y = map(jax.random.key_data, (x, y))
            np.testing.assert_array_equal(x, y)


def test_nothing_is_put_up_where_the_kernel_needs_what_is_read():
    """As in training: what overwrites a weight is made of a product with it."""

    def step(w, x):
        return w - w * (x @ w).sum()

    n = arrays(1)[0]
    new = rewrite(jax.make_jaxpr(step)(n, n).jaxpr)
    assert not any(e.primitive.name in ("cond", "select_n", "overwrite") for e in new.eqns)
