"""Refs as operands of what shows them, orders them, or has a batching rule of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from tests.discharge.helpers import agree

X = np.arange(1, 5, dtype=np.float32)
same = np.testing.assert_array_equal


# --- jax.debug -----------------------------------------------------------------------------------


def shown(function, *args):
    seen = []

    def show(*values, **named):
        seen.append([np.array(v) for v in (*values, *named.values())])

    function(show, *args)
    jax.effects_barrier()
    return seen


def step(show, r):
    jax.debug.callback(show, r, name=r[0], ordered=True)
    r[0] = 7.0
    jax.debug.callback(show, r, ordered=True)


def test_debug_callbacks_show_what_a_ref_holds_then():
    r = refs.new_ref(X)
    seen = shown(lambda show: refs.jit(lambda: step(show, r))())
    same(seen[0][0], X)
    same(seen[0][1], 1)
    same(seen[1][0], [7, 2, 3, 4])


def test_debug_callbacks_in_a_loop_and_a_gradient():
    r = refs.new_ref(X)
    seen = shown(lambda show: refs.fori_loop(0, 2, lambda i, _: step(show, r), None))
    same([s[0][0] for s in seen], [1, 7, 7, 7])

    def loss(show, x):
        jax.debug.callback(show, r)
        return x * r[1]

    seen = shown(lambda show: same(refs.grad(lambda x: loss(show, x))(1.0), 2))
    same(seen[0][0], [7, 2, 3, 4])


def test_debug_callbacks_in_lanes(jit):
    rows, shared = refs.new_ref(jnp.stack([X, X + 1])), refs.new_ref(X)

    def mapped(show):
        jit(refs.vmap(lambda row: jax.debug.callback(show, row, shared)))(rows)

    seen = sorted(shown(mapped), key=lambda s: s[0][0])
    same([s[0] for s in seen], rows[...])
    same([s[1] for s in seen], [X, X])


def test_debug_print_of_a_ref(capfd):
    r = refs.new_ref(X)

    @refs.jit
    def f(r):
        jax.debug.print("before {}", r)
        r[0] = 7.0
        jax.debug.print("after {r}", r=r)

    f(r)
    jax.effects_barrier()
    assert capfd.readouterr().out == "before [1. 2. 3. 4.]\nafter [7. 2. 3. 4.]\n"


def test_what_is_only_shown_is_not_written():
    r = refs.new_ref(X)
    text = refs.jit(lambda: jax.debug.callback(lambda x: None, r)).lower().as_text()
    assert "donor" not in text
    assert "aliasing" not in text


# --- optimization_barrier ------------------------------------------------------------------------


def behind_a_barrier(r, s):
    _, y = lax.optimization_barrier((r, s[...] * 2))
    r[0] = y[1]
    return r[...]


@pytest.mark.parametrize("wrap", [refs.jit, refs.checkpoint])
def test_a_barrier(wrap):
    r, s = refs.new_ref(X), refs.new_ref(X)
    same(wrap(behind_a_barrier)(r, s), [4, 2, 3, 4])
    same(r[...], [4, 2, 3, 4])
    same(s[...], X)


def test_a_barrier_in_lanes_and_loops():
    rows, shared, total = refs.new_ref(jnp.stack([X, X])), refs.new_ref(X), refs.new_ref(0.0)

    def lane(row):
        total[...] += row[0]
        lax.optimization_barrier((total, shared))
        lax.fori_loop(0, 1, lambda i, _: behind_a_barrier(row, shared), row[...])

    refs.vmap(lane)(rows)
    same(rows[...], [[4, 2, 3, 4]] * 2)
    same(total[...], 2)


def test_a_barrier_is_differentiated():
    def loss(x, r):
        r[...] *= x
        return lax.optimization_barrier((r, r[...]))[1].sum()

    same(refs.grad(loss)(2.0, refs.new_ref(X)), X.sum())


def passed_by(q, x):
    return lax.optimization_barrier((q, x))[-1]


def test_a_barrier_in_a_function_that_only_reads():
    inner = jax.jit(lambda q, x: passed_by(q, x) + q[1])
    agree(inner, lambda a, x: x + a[1], [X], np.float32(1), ways=["passed"])


@pytest.mark.parametrize("reads", [False, True])
def test_a_barrier_over_rows(reads):
    """Of a ref that the loop reads, and of one that it only hands on."""

    def program(r, x):
        def step(c, q):
            return passed_by(q, c) + (q[...] if reads else 1), None

        return refs.scan(step, x, r)[0]

    total = X.sum() if reads else len(X)
    agree(program, lambda a, x: x + total, [X], np.float32(1), ways=["passed"])


# --- custom_vmap ---------------------------------------------------------------------------------

# The oldest JAX doesn't trace a custom_vmap function that takes refs.
needs_newest = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX's own limit")


@jax.custom_batching.custom_vmap
def exchange(x, r):
    old = r[0]
    r[1] = x
    return old + x


@exchange.def_vmap
def exchange_rule(size, is_batched, x, r):
    assert is_batched == [True, True]
    old = r[:, 0]
    r[:, 1] = x * 100  # to tell it from the function
    return old + x, True


@jax.custom_batching.sequential_vmap
def one_by_one(x, r):
    r[0] += x
    return r[0] * x


@needs_newest
def test_a_custom_vmap_function_over_a_ref():
    r = refs.new_ref(X)
    assert refs.jit(exchange)(2.0, r) == 3
    same(r[...], [1, 2, 3, 4])
    out, tangent = refs.jit(
        lambda: refs.jvp(lambda x: exchange(x, refs.new_ref(X)), (2.0,), (1.0,))
    )()
    assert (out, tangent) == (3, 1)


@needs_newest
def test_the_batching_rule_gets_refs(jit):
    rows, xs = refs.new_ref(jnp.stack([X, X + 1])), jnp.array([10.0, 20.0])
    same(jit(refs.vmap(exchange))(xs, rows), [11, 22])
    same(rows[...], [[1, 1000, 3, 4], [2, 2000, 4, 5]])
    same(jit(refs.vmap(refs.jit(one_by_one)))(xs, rows), [110, 440])
    same(rows[:, 0], [11, 22])
