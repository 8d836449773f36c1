"""Conditionals whose branches update buffers: each does so in conditionals of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from refs import _jax
from refs._inplace import rewrite
from tests.inplace.helpers import assert_in_place, primitives

pytestmark = pytest.mark.as_released

N = 2000  # 8 KB: smaller ones get no fences
BRANCHES = {}


def branches(*functions):
    BRANCHES[functions[0].__name__] = functions


def write(r, k, value):
    r[k] = value


def and_reads(w, u, k):
    write(w, k, 7.0)
    return w[k + 1]


branches(and_reads, lambda w, u, k: w[k])


def returns_what_was_there(w, u, k):
    return w.swap(u[k], idx=k)


branches(returns_what_was_there, lambda w, u, k: w[k] + u[k])


def adds(w, u, k):
    w[k] += u[k]
    return 0.0


branches(adds, lambda w, u, k: w[k])


def writes_a_few(w, u, k):
    w[3:6] = jnp.stack([w[k], 1.0, 2.0])
    return w[4]


branches(writes_a_few, lambda w, u, k: w[3], lambda w, u, k: w[4] + 1)


def reads_what_it_has_written(w, u, k):
    w[k] = 2.0 * u[k]
    u[k + 1] = w[k] + 1.0
    w[k + 2] += u[k + 1]
    return w[k] * u[k]


branches(reads_what_it_has_written, lambda w, u, k: w[k], lambda w, u, k: u[k])


def unlinks(w, u, k):
    """As in a list of which `w` has the next places and `u` the ones before."""
    after, before = w[k], u[k]
    w[before.astype(int)] = after
    u[after.astype(int)] = before
    return after


branches(unlinks, lambda w, u, k: w[k] + u[k])


def out_of_bounds(w, u, k):
    write(w, k + N - 3, 5.0)
    return w[k]


branches(out_of_bounds, lambda w, u, k: w[k])


def passes_values_on(w, u, k):
    x, y = jnp.sin(u[k]), k * 2
    w[k] = x
    return w[k] * x + y


branches(passes_values_on, lambda w, u, k: w[k])


def adds_and_reads(w, u, k):
    w[k] += 1.0
    return w[k + 1]


branches(adds_and_reads, lambda w, u, k: w[k])


def reads_what_it_has_made_of_it(w, u, k):
    w[k] = jnp.sin(w[k + 2])
    return w[k]


branches(reads_what_it_has_made_of_it, lambda w, u, k: w[k])


def one_after_the_other(w, u, k):
    for i in range(5):
        w[k + i + 1] = w[k + i] + 1.0
    return w[k]


branches(one_after_the_other, lambda w, u, k: w[k] + u[k])


def many_that_need_no_other(w, u, k):
    for i in range(12):
        w[k + i] = u[k + i]
    return w[k]


branches(many_that_need_no_other, lambda w, u, k: w[k])


def change_places(w, u, k):
    w[k], u[k] = u[k], w[k]
    return w[k + 1] + u[k + 2]


branches(change_places, lambda w, u, k: w[k], lambda w, u, k: u[k] + w[k])


def beside_a_writer_of_the_other(w, u, k):
    w[k] = w[k + 1] + 1.0
    return w[k]


def writes_the_other(w, u, k):
    u[k] = w[k] + 1.0
    return u[k + 1]


branches(beside_a_writer_of_the_other, lambda w, u, k: w[k] * u[k], writes_the_other)


def writes_when_the_old_value_has_been_read(w, u, k):
    u[k] = k * 2.0
    old = w[u[k].astype(int)]
    w[2 * k] = -1.0
    return old + w[2 * k]


branches(writes_when_the_old_value_has_been_read, lambda w, u, k: w[k] + u[k])


def only_writes(w, u, k):
    w[k] = u[k + 1]
    return 1.0


branches(only_writes, lambda w, u, k: 2.0, lambda w, u, k: 3.0)


def in_a_branch(w, u, k):
    lax.cond(k > 5, lambda: write(w, k, w[k + 1]), lambda: None)
    return w[k + 1]


branches(in_a_branch, lambda w, u, k: w[k])


def steps_of_a_branch_in_a_branch(w, u, k):
    def inner():
        w[k] = u[k + 1]
        u[k] = w[k] + w[k + 1]
        return u[k] + w[k + 2]

    return lax.cond(k > 5, inner, lambda: w[k + 1])


branches(steps_of_a_branch_in_a_branch, lambda w, u, k: w[k])


def in_a_loop(w, u, k):
    lax.fori_loop(0, 3, lambda i, _: write(w, k + i, 1.0), None)
    return u[k] + w[k]


branches(in_a_loop, lambda w, u, k: w[k])


def most_of_it(w, u, k):
    w[:1200] = u[100:1300]
    return 0.0


branches(most_of_it, lambda w, u, k: w[k])


def many_times(w, u, k):
    """Each waits for the one before it: more steps than a branch gets."""
    for i in range(12):
        w[k + i + 1] = w[k + i] + 1.0
    return w[k]


branches(many_times, lambda w, u, k: w[k])


def all_of_it(w, u, k):
    """What is passed on is as large as the ref."""
    x = jnp.cos(w[...])
    w[k] = 1.0
    return (w[...] * x).sum()


branches(all_of_it, lambda w, u, k: w[k])


def where_the_old_value_is_used(w, u, k):
    """A true second use."""
    old = w[...]
    w[k] = 1.0
    return old[w[k + 1].astype(int)] + old[k]


branches(where_the_old_value_is_used, lambda w, u, k: w[k])


def scales(w, u, k):
    """A branch that overwrites the buffer as a whole is one that writes it."""
    w[...] *= 0.5
    return 0.0


branches(scales, and_reads)


def scales_and_reads(w, u, k):
    w[...] *= 0.5
    return w[k]


branches(scales_and_reads, and_reads, lambda w, u, k: w[k])


def reads_and_scales(w, u, k):
    old = w[k]
    w[...] *= 0.5
    return old


branches(reads_and_scales, and_reads)


def fills(w, u, k):
    w[...] = jnp.full(N, u[k])
    return w[0]


branches(fills, lambda w, u, k: w[k])


def clears(w, u, k):
    w[...] = jnp.zeros(N)
    return 1.0


branches(clears, and_reads, lambda w, u, k: w[k])

COPIED = [many_times, all_of_it, where_the_old_value_is_used]


def loop_of(name):
    def loop(w, u):
        def step(k):
            return lax.switch(k % len(BRANCHES[name]), BRANCHES[name], w, u, k)

        return lax.map(step, jnp.arange(20))

    return loop


def arrays():
    return jnp.arange(1.0 * N) % 17, jnp.arange(1.0 * N) % 5


def refs_():
    return [*map(refs.new_ref, arrays())]


@pytest.mark.parametrize("name", BRANCHES)
def test_the_values_stay(name):
    w, u = refs_()
    closed = refs.discharge(refs.make_jaxpr(loop_of(name))(w, u))
    want, got = (
        jax.core.eval_jaxpr(jaxpr, closed.consts, *arrays())
        for jaxpr in (closed.jaxpr, rewrite(closed.jaxpr))
    )
    for x, y in zip(want, got, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("in_turn", [True, False], ids=["in_turn", "the_other_way_round"])
@pytest.mark.parametrize("name", [n for n in BRANCHES if BRANCHES[n][0] not in COPIED])
def test_in_place(name, in_turn, monkeypatch):
    if not in_turn:
        monkeypatch.setitem(BRANCHES, name, BRANCHES[name][::-1])
    assert_in_place(loop_of(name), *refs_())


def test_no_step_updates_what_a_later_one_reads_as_it_was():
    """One case of the table, which quick tests leave out: a planted fault is found by it."""
    assert_in_place(loop_of(writes_when_the_old_value_has_been_read.__name__), *refs_())


def test_branches_that_update_nothing_share_a_conditional():
    def program(w, k):
        readers = [lambda w, u, k: w[k], lambda w, u, k: w[k + 1] * 2, lambda w, u, k: 3.0]
        return lax.switch(k, [*readers, and_reads], w, None, k)

    closed = refs.discharge(refs.make_jaxpr(program)(refs.new_ref(arrays()[0]), 1))
    conditionals = [e for e in rewrite(closed.jaxpr).eqns if e.primitive.name == "cond"]
    assert [len(e.params["branches"]) for e in conditionals] == [4, 2, 2]


def test_two_branches_that_write_beside_one_that_reads():
    def loop(w, u):
        choices = [adds, lambda w, u, k: w.swap(0.0, idx=k), lambda w, u, k: w[k]]
        return lax.map(lambda k: lax.switch(k % 3, choices, w, u, k), jnp.arange(20))

    assert_in_place(loop, *refs_())


def test_a_branch_that_returns_all_of_what_it_has_written():
    def program(r, k):
        def write():
            r[k] = r[0] * 2
            return r[...]

        return lax.cond(k > 2, write, lambda: r[...] - r[k])

    x = jnp.arange(1000.0)
    for k in (1, 5):
        r = refs.new_ref(x)
        want = np.arange(1000.0, dtype=np.float32)
        if k > 2:
            want[k] = 0
        np.testing.assert_array_equal(refs.jit(program)(r, k), want if k > 2 else want - 1)
        np.testing.assert_array_equal(r, want)


def test_a_branch_that_only_writes_stays_as_it_is():
    """As in a queue: XLA copies neither buffer."""

    def push(seen, queue, tail, k):
        seen[k] = 1.0
        queue[tail[0]] = k * 1.0
        tail[0] += 1

    def loop(seen, queue, tail):
        def step(k, _):
            lax.cond(seen[k] != 1.0, lambda: push(seen, queue, tail, k), lambda: None)

        lax.fori_loop(0, 20, step, None)

    state = [*refs_(), refs.new_ref(jnp.zeros(1, int))]
    closed = refs.discharge(refs.make_jaxpr(loop)(*state))
    [scan] = (e for e in rewrite(closed.jaxpr).eqns if e.primitive.name == "scan")
    assert primitives(_jax.scan_params(scan).jaxpr.jaxpr).count("cond") == 1
    assert_in_place(loop, *state)
