"""Conditionals of which one branch updates buffers: the update is taken out of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from refs import _jax
from refs._inplace import rewrite
from refs._inplace.flatten import flatten
from refs._inplace.normal import normal
from refs._inplace.predicate import predicate
from tests.inplace.helpers import assert_in_place

pytestmark = pytest.mark.as_released

N = 1000
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


def in_a_loop(w, u, k):
    """The loop updates it, and that can't be taken out."""
    lax.fori_loop(0, 3, lambda i, _: write(w, k + i, 1.0), None)
    return u[k]


branches(in_a_loop, lambda w, u, k: w[k])


def many_times(w, u, k):
    """Each waits for the one before it: more parts than are taken out."""
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


def most_of_it(w, u, k):
    """What it writes costs as much as a copy."""
    w[:600] = u[100:700]
    return 0.0


branches(most_of_it, lambda w, u, k: w[k])

STAY = [in_a_loop, many_times, all_of_it, where_the_old_value_is_used, most_of_it]


def loop_of(name):
    def loop(w, u):
        def step(k):
            return lax.switch(k % len(BRANCHES[name]), BRANCHES[name], w, u, k)

        return lax.map(step, jnp.arange(20))

    return loop


def arrays():
    return jnp.arange(1.0 * N) % 17, jnp.arange(1.0 * N) % 5


@pytest.mark.parametrize("name", BRANCHES)
def test_the_values_stay(name):
    w, u = map(refs.new_ref, arrays())
    closed = refs.discharge(refs.make_jaxpr(loop_of(name))(w, u))
    taken_out = predicate(normal(flatten(closed.jaxpr, {}), True, {}), {})
    want, *others = (
        jax.core.eval_jaxpr(jaxpr, closed.consts, *arrays())
        for jaxpr in (closed.jaxpr, taken_out, rewrite(closed.jaxpr))
    )
    for got in others:
        for x, y in zip(want, got, strict=True):
            np.testing.assert_array_equal(x, y)
    [scan] = (e for e in taken_out.eqns if e.primitive.name == "scan")
    body = _jax.scan_params(scan).jaxpr.jaxpr
    assert any(map(has_updates, body.eqns)) == (BRANCHES[name][0] in STAY)


def has_updates(eqn):
    """Whether a branch updates a buffer."""
    return eqn.primitive.name == "cond" and any(
        e.primitive.name in ("update_block", "scan", "while")
        for inner in _jax.jaxprs_in(eqn.params)
        for e in inner.jaxpr.eqns
    )


@pytest.mark.parametrize("name", [n for n in BRANCHES if BRANCHES[n][0] not in STAY])
def test_in_place(name):
    assert_in_place(loop_of(name), *map(refs.new_ref, arrays()))


def test_two_branches_that_write_beside_one_that_reads():
    """Their updates aren't taken out: each gets a conditional of its own, with every XLA."""

    def loop(w, u):
        choices = [adds, lambda w, u, k: w.swap(0.0, idx=k), lambda w, u, k: w[k]]
        return lax.map(lambda k: lax.switch(k % 3, choices, w, u, k), jnp.arange(20))

    assert_in_place(loop, *map(refs.new_ref, arrays()))


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


def test_a_branch_that_only_writes_keeps_its_updates():
    """As in a queue: XLA copies neither buffer, and to take the updates out costs small copies."""

    def push(seen, queue, tail, k):
        seen[k] = 1.0
        queue[tail[0]] = k * 1.0
        tail[0] += 1

    def loop(seen, queue, tail):
        def step(k, _):
            lax.cond(seen[k] != 1.0, lambda: push(seen, queue, tail, k), lambda: None)

        lax.fori_loop(0, 20, step, None)

    state = [*map(refs.new_ref, arrays()), refs.new_ref(jnp.zeros(1, int))]
    closed = refs.discharge(refs.make_jaxpr(loop)(*state))
    taken_out = predicate(normal(flatten(closed.jaxpr, {}), True, {}), {})
    [scan] = (e for e in taken_out.eqns if e.primitive.name == "scan")
    body = _jax.scan_params(scan).jaxpr.jaxpr
    assert any(map(has_updates, body.eqns))
    assert_in_place(loop, *state)
