"""Compiled programs over refs copy none of them: optimized HLO, on every supported JAX.

Each program is compiled for refs that are large enough to matter; `refs.testing.assert_in_place`
reads what XLA made of it. What programs mean is held elsewhere: these are not run.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import refs
from refs import _jax, errors
from refs._inplace import rewrite
from tests.inplace.helpers import assert_in_place

pytestmark = pytest.mark.as_released

N = 10_000


def loop(step):
    lax.fori_loop(0, 20, lambda k, _: step(k), None)


def swapping(r):
    def swap(i, j):
        r[i], r[j] = r[j], r[i]

    return swap


PROGRAMS = {}


def program(*shapes):
    def add(fun):
        PROGRAMS[fun.__name__] = fun, shapes
        return fun

    return add


# --- Reads and writes in loops ---


@program((N,))
def swap_neighbours(r):
    loop(lambda k: swapping(r)(k, k + 1))


@program((100, 100))
def swap_rows(r):
    loop(lambda k: swapping(r)(k, k + 1))


@program((100, 100))
def swap_columns(r):
    def step(k):
        r[:, k], r[:, k + 1] = r[:, k + 1], r[:, k]

    loop(step)


@program((N,))
def swap_scattered(r):
    def step(k):
        swapping(r)(jnp.arange(4) + k, 2 * jnp.arange(4) + k)

    loop(step)


@program((N,))
def swap_in_an_inner_jit(r):
    loop(jax.jit(lambda k: swapping(r)(k, k + 1)))


@program((N,), (N,))
def read_one_and_write_another(r, q):
    def step(k):
        q[k] = r[k + 1]
        r[k] = 2.0

    loop(step)


@program((N,))
def read_back(r):
    def step(k):
        r[k] = r[k] * 2
        r[k + 1] = r[k] - r[k + 3]

    loop(step)


@program((100, 100), (100,))
def row_statistics(r, s):
    def step(k):
        s[k] = r[k].sum()
        r[k] = r[k] * s[k]
        r[k + 1] = r[k] - s[k]

    loop(step)


@program((N,), ())
def the_sum_before_a_write(r, total):
    def step(k):
        total[...] += (r[...] ** 2).sum()
        r[k] = 2.0

    loop(step)


@program((N,))
def a_product_before_a_write(r):
    def step(k):
        y = jnp.ones((3, N)) @ r[...]
        r[k] = 1.0
        r[k + 1] = y[0]

    loop(step)


@program((N,))
def sorted_before_a_write(r):
    def step(k):
        y = jnp.sort(r[...])
        r[k] = 1.0
        r[k + 1] = y[0]

    loop(step)


@program((N,))
def half_moved(r):
    def step(k):
        r[: N // 2] = r[N // 2 :] * 2

    loop(step)


@program((N,), (1,))
def a_counter_says_where(r, count):
    def step(k):
        i = count[0].astype(int)
        r[i] = r[i + 1]
        count[0] += 1
        r[i + 1] = r[i] + 1

    loop(step)


@program((N,))
def loops_in_a_loop(r):
    def step(k):
        x = r[k]
        lax.fori_loop(0, 5, lambda j, _: r.at[k + j].set(r[k + j + 1] + x), None)
        r[k] = x

    loop(step)


@program((N,))
def a_predicate_that_reads(r):
    def step(k):
        r[k] = r[k] + r[k + 1] + 1
        return k

    lax.while_loop(lambda k: r[k] < 5, step, 0)


@program((N,))
def results_that_were_read(r):
    def step(carry, k):
        x = r[k]
        r[k] = carry
        return x, x * 2

    return lax.scan(step, 0.0, jnp.arange(10))


@program((N,), (N,))
def used_after_the_loop(r, q):
    x = r[3]

    def step(k):
        r[k] = x + q[k]

    loop(step)
    q[0] = r[5] + x


@program((N,))
def returned_from_a_known_place(r):
    x = r[3]
    r[3] = 5.0
    return x


@program((N,))
def with_side_effects(r):
    def step(k):
        jax.debug.callback(lambda x: None, r[k])
        swapping(r)(k, k + 1)

    loop(step)


@program((N,), (N,))
def unlinking_of_a_list(after, before):
    def step(k):
        left, right = before[k].astype(int), after[k].astype(int)
        after[left], before[right] = right, left

    loop(step)


# --- Branches ---


@program((N,))
def one_branch_writes(r):
    loop(lambda k: lax.cond(r[k] > 0, lambda: r.at[k].set(r[k + 1] * 2), lambda: None))


@program((N,))
def both_branches_write(r):
    loop(
        lambda k: lax.cond(
            r[k] > 0, lambda: r.at[k].set(r[k + 1] * 2), lambda: r.at[k + 1].set(r[k] + 1)
        )
    )


@program((N,))
def both_branches_swap(r):
    swap = swapping(r)
    loop(lambda k: lax.cond(k % 2 == 0, lambda: swap(k, k + 1), lambda: swap(k, k + 2)))


@program((N,))
def a_switch_of_several(r):
    def step(k, j):
        r[k] = r[j] * 2
        r[j] = r[k] + 1

    loop(
        lambda k: lax.switch(k % 3, [lambda: step(k, k + 1), lambda: step(k, k + 2), lambda: None])
    )


@program((N,), (N,))
def branches_that_write_what_the_other_reads(r, q):
    loop(lambda k: lax.cond(r[k] > 0, lambda: r.at[k].set(q[k]), lambda: q.at[k].set(r[k] * 2)))


@program((N,))
def branches_that_return(r):
    def step(k):
        def left():
            r[k] = r[k + 1]
            return r[k] * 2, True

        def right():
            r[k + 1] = r[k]
            return r[k] + 1, False

        x, flag = lax.cond(r[k] > r[k + 1], left, right)
        r[k + 2] = jnp.where(flag, x, -x)

    loop(step)


@program((N,))
def before_and_after_a_branch(r):
    def step(k):
        x = r[k]
        lax.cond(x > 0, lambda: r.at[k].set(x * 2), lambda: None)
        r[k + 1] = x + r[k]

    loop(step)


# --- All of it at once ---


@program((N,))
def all_of_it_with_an_element(r):
    loop(lambda k: r.set(r[...] * 0.5 - r[k]))


@program((100, 100))
def a_step_of_an_elimination(m):
    def step(k):
        factors = jnp.where(jnp.arange(100) > k, m[:, k] / m[k, k], 0.0)
        m[...] -= factors[:, None] * m[k]

    loop(step)


@program((N,))
def an_element_whose_place_is_an_element(r):
    loop(lambda k: r.set(r[...] + r[r[k].astype(int)] * r[k + 1]))


@program((N,), (N,))
def two_that_read_each_other(r, q):
    def step(k):
        x, y = r[k], q[k]
        r[...] = r[...] * y
        q[...] = q[...] + x

    loop(step)


# --- Lanes ---


@program((8, N))
def lanes_that_swap(r):
    refs.vmap(lambda r: loop(lambda k: swapping(r)(k, k + 1)))(r)


@program((8, N))
def lanes_that_choose_a_place(r):
    """The choice is a call of `jit`, which XLA inlines."""

    def step(r, k):
        i = lax.cond(k % 3 == 0, lambda: k, lambda: r[5].astype(int))
        r[i] = r[k] + 1
        r[k] = r[i]

    refs.vmap(lambda r: loop(lambda k: step(r, k)))(r)


@program((8, N))
def lanes_that_part_in_a_branch(r):
    refs.vmap(one_branch_writes)(r)


@program((8, N))
def lanes_that_end_at_different_times(r):
    refs.vmap(a_predicate_that_reads)(r)


@pytest.mark.parametrize("name", PROGRAMS)
def test_in_place(name):
    fun, shapes = PROGRAMS[name]
    assert_in_place(fun, *(refs.new_ref(jnp.ones(s)) for s in shapes))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_second_pass_puts_up_no_more_fences(name):
    fun, shapes = PROGRAMS[name]
    refs_ = [refs.new_ref(jnp.ones(s)) for s in shapes]
    once = rewrite(refs.discharge(refs.make_jaxpr(fun)(*refs_)).jaxpr)
    assert fences(rewrite(once)) == fences(once)


def fences(jaxpr):
    """How many equations in a jaxpr may be fences, those of the jaxprs in it included."""
    inner = (inner.jaxpr for eqn in jaxpr.eqns for inner in _jax.jaxprs_in(eqn.params))
    own = sum(eqn.primitive.name in ("cond", "optimization_barrier") for eqn in jaxpr.eqns)
    return own + sum(map(fences, inner))


# --- The check itself ---


def test_what_has_to_be_copied_is_found():
    r = refs.new_ref(jnp.ones(N), name="r")

    def keeps_the_old_value():
        old = r[...]
        r[0] = 2.0
        return old

    with pytest.raises(AssertionError, match=r"10,000 elements of float32, as many as ref `r`"):
        assert_in_place(keeps_the_old_value)


def test_nothing_to_check():
    with pytest.raises(errors.RefValueError, match="updates nothing"):
        assert_in_place(lambda r: r[0], refs.new_ref(jnp.ones(N)))
