"""Which updates are put behind a fence, and which don't need one: optimized HLO."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import refs
from refs import _jax
from refs._inplace import model
from tests.inplace.helpers import assert_in_place, rewritten
from tests.platforms import as_on_cpu

pytestmark = pytest.mark.as_released

N = 10_000


def conditionals(fun, *args):
    """How many there are in the optimized HLO."""
    return refs.jit(fun).lower(*args).compile().as_text().count(" conditional(")


def loop(step):
    def fun(r, places):
        lax.fori_loop(0, 20, lambda k, _: step(r, *places[k]), None)

    fun.__name__ = step.__name__
    return fun


def several_writes(r, i, j):
    r[i] = 1.0
    r[j] = 2.0
    r[i + j] = 3.0


def two_writes_at_one_place(r, i, j):
    r[i] = r[j] * 2
    r[i] = 3.0


def a_sum_and_a_write(r, i, j):
    r[i] += 1.0
    r[j] = 2.0


def a_write_and_a_sum(r, i, j):
    """XLA would write again in order to read."""
    r[i] = 1.0
    r[j] += 2.0


def writes_before_a_read(r, i, j):
    r[i] = 1.0
    r[j] = 2.0
    r[i + j] = r[i + 1] + r[j + 1]


@as_on_cpu
@pytest.mark.parametrize(
    "step, fences",
    [
        (several_writes, 0),
        (two_writes_at_one_place, 0),
        (a_sum_and_a_write, 0),
        (a_write_and_a_sum, 1),
        (writes_before_a_read, 1),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
@pytest.mark.parametrize("shape", [(N,), (100, 100)], ids=str)
def test_a_write_that_may_be_out_of_bounds_needs_no_fence_before_it(step, fences, shape):
    """It reads only what it overwrites itself."""
    args = refs.new_ref(jnp.ones(shape)), jnp.ones((20, 2), jnp.int32)
    assert_in_place(loop(step), *args)
    assert conditionals(loop(step), *args) == fences


def test_what_was_there_may_also_be_returned():
    """Then both updates need a fence."""

    def program(x, i, j, is_old):
        x = lax.dynamic_update_slice_p.bind(x, jnp.ones(1), i)
        old = lax.dynamic_slice_p.bind(x, j, slice_sizes=(1,))
        new = lax.select(i < j, jnp.zeros(1), old)
        return lax.dynamic_update_slice_p.bind(x, new, j), old if is_old else new

    args = jnp.arange(100.0), jnp.int32(3), jnp.int32(5)
    for is_old in (False, True):
        eqns = rewritten(functools.partial(program, is_old=is_old), *args).eqns
        assert sum(eqn.primitive.name == "cond" for eqn in eqns) == 2


@as_on_cpu
def test_the_fences_of_a_body_share_their_predicate():
    def swaps(x, places):
        for i, j in places:
            x = x.at[i].set(x[j]).at[j].set(x[i])
        return x

    def in_a_loop(x, places):
        return lax.fori_loop(0, 3, lambda _, x: swaps(x, places), x)

    args = jnp.arange(100.0), jnp.array([[3, 5], [5, 7], [7, 3]])
    for program in (swaps, in_a_loop):
        text = jax.jit(refs.in_place(program)).lower(*args).compile().as_text()
        assert text.count(" conditional(") > 2
        assert text.count(" popcnt(") == 1


@as_on_cpu
@pytest.mark.parametrize("dtype", ["bool", "complex64"])
def test_a_predicate_can_be_made_of_any_dtype(dtype):
    def swap(x):
        x[0], x[1] = x[1], x[0]

    ref = refs.new_ref(jnp.zeros(N, dtype).at[0].set(True))
    refs.jit(swap)(ref)
    assert (ref[0], ref[1]) == (0, 1)
    assert conditionals(swap, ref) == 1


def test_what_must_be_seen_decides_itself():
    """A fence waits for a large value by a predicate of its own."""

    def program(x, y, i):
        total = lax.cumsum(x)  # It reads all of `x`; XLA computes it once.
        x = x.at[i].set(y[i]).at[i + 1].set(y[i] * 2)
        first = x[i]
        x = x.at[i + 2].set(first)
        return x, total, first

    args = jnp.arange(100.0), jnp.ones(100), jnp.int32(3)
    eqns = rewritten(program, *args).eqns
    names = [eqn.primitive.name for eqn in eqns]
    assert (names.count("cond"), names.count("population_count")) == (3, 2)


@as_on_cpu
def test_small_buffers_are_copied_outside_of_loops(monkeypatch):
    """There a fence takes longer than a copy of 4 KiB; in a loop it doesn't, but on old jaxlibs."""
    monkeypatch.setattr(model, "SMALLEST_FENCED", 4096)  # as outside the tests

    def swap(x):
        x[0], x[1] = x[1], x[0]

    def swaps(x):
        lax.fori_loop(0, 3, lambda k, _: swap(x), None)

    assert conditionals(swap, refs.new_ref(jnp.zeros(1000))) == 0
    assert conditionals(swap, refs.new_ref(jnp.zeros(1024))) == 1
    assert conditionals(swaps, refs.new_ref(jnp.zeros(100))) == (not _jax.xla_merges_slices)


@as_on_cpu
def test_branches_on_small_buffers_take_turns_in_loops(monkeypatch):
    """Without fences between them they would copy more than as they are."""
    monkeypatch.setattr(model, "SMALLEST_FENCED", 4096)

    def write(x):
        lax.cond(x[1] > x[2], lambda: x.at[0].set(x[3]), lambda: x.at[4].add(x[5]))

    def writes(x):
        lax.fori_loop(0, 3, lambda k, _: write(x), None)

    ref = refs.new_ref(jnp.zeros(1000))
    assert conditionals(write, ref) == 1
    assert (conditionals(writes, ref) > 1) == (not _jax.xla_merges_slices)
