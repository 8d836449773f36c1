"""`refs.scan`, `while_loop`, `fori_loop`, `cond`, `switch`, `map` and `checkpoint`."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.tree_util import Partial

import refs
from refs.errors import RefEscapeError, RefTypeError

same = np.testing.assert_array_equal


@pytest.fixture
def table():
    return refs.new_ref(jnp.arange(6).reshape(3, 2), name="table")


def test_scan_over_refs(jit, table, n):
    def step(carry, x):
        row, again, i = x
        row[0] += again[1]
        n[...] += i
        return carry + row[0], row[...]

    scan = jit(lambda: refs.scan(step, 0, (table, table, jnp.arange(3)), reverse=True, unroll=2))
    total, rows = scan()
    assert total == 1 + 5 + 9
    same(rows, [[1, 1], [5, 3], [9, 5]])
    same(table[...], rows)
    assert n[...] == 3


def test_scan_without_inputs(n):
    assert refs.scan(lambda c, _: (c + 1, n.at[...].add(1)), 0, length=4)[0] == 4
    assert n[...] == 4


def test_while_loop_whose_predicate_reads_what_its_body_writes(jit, n):
    def body(x):
        n[...] += 1
        return 2 * x

    assert jit(lambda: refs.while_loop(lambda _: n[...] < 5, body, 1))() == 32
    assert n[...] == 5


@pytest.mark.parametrize("bounds", [(1, 4), (jnp.int32(1), 4)], ids=["static", "traced"])
def test_fori_loop(jit, bounds, n):
    def body(i, x):
        n[...] += i
        return x * 2

    assert jit(lambda: refs.fori_loop(*bounds, body, 1))() == 8
    assert n[...] == 6


def test_branches_take_refs_and_views_any_number_of_times(jit, table, n):
    def some(a, b, view, x):
        a[0, 0] = x
        b[0, 1] = a[0, 0] + 1
        view.set(7)
        return n[...]

    def other(a, b, view, x):
        n[...] += x
        return x

    cond = jit(lambda p: refs.cond(p, some, other, table, table, table.at[2], 10))
    assert cond(True) == 0
    assert cond(False) == 10
    same(table[...], [[10, 11], [2, 3], [7, 7]])
    switch = jit(lambda i: refs.switch(i, [other, some], table, table, table.at[1], 20))
    assert switch(5) == 10
    same(table[...], [[20, 21], [7, 7], [7, 7]])


@pytest.mark.parametrize("batch_size", [None, 2, 3, 5])
def test_map(jit, batch_size, n):
    def f(x):
        n[...] += x
        return {"double": 2 * x}

    mapped = jit(lambda xs: refs.map(f, xs, batch_size=batch_size))
    same(mapped(jnp.arange(5))["double"], [0, 2, 4, 6, 8])
    assert n[...] == 10


def test_map_over_a_ref(table):
    refs.map(lambda row: row.at[0].set(row[1]), table)
    same(table[...], [[1, 1], [3, 3], [5, 5]])
    with pytest.raises(RefTypeError, match="map with batch_size"):
        refs.map(lambda row: None, table, batch_size=2)


def test_a_body_returns_no_ref(table):
    for loop in (
        lambda: refs.scan(lambda c, _: (c, table), 0, length=2),
        lambda: refs.cond(True, lambda: table, lambda: table),
    ):
        with pytest.raises(RefEscapeError, match="cannot be returned"):
            loop()


def test_an_error_leaves_everything_as_it_was(n):
    def body(x):
        n[...] += 1
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        refs.while_loop(lambda x: True, body, 0)
    assert n[...] == 0


def test_loops_are_differentiated(table):
    w = refs.new_ref(jnp.array([1.0, 2.0]))

    def loss(w):
        def step(total, r):
            r[...] *= 3
            return total + r[...] ** 2, None

        return refs.scan(step, 0.0, w)[0]

    same(refs.grad(loss)(w), [18, 36])


# --- checkpoint ---


@pytest.mark.parametrize("checkpoint", [refs.checkpoint, refs.remat, jax.checkpoint])
def test_effects_happen_once_however_often_it_is_recomputed(jit, checkpoint, n):
    @checkpoint
    def layer(x):
        n[...] += 1
        return jnp.sin(jnp.sin(x))

    def loss(x):
        return lax.cond(x > 0, layer, lambda x: x, layer(x))

    got = jit(refs.grad(loss))(0.5)
    want = jax.grad(lambda x: jnp.sin(jnp.sin(jnp.sin(jnp.sin(x)))))(0.5)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert n[...] == 2


def test_checkpoint_takes_jaxs_keywords(table, n):
    def layer(ref, view, x, y, power, *, flag):
        assert flag
        n[...] += 1
        return jnp.sin(x) ** power * view.get().sum() * ref[0, 1] + y

    made = refs.checkpoint(
        layer,
        prevent_cse=(True, True, False, True, True),
        policy=jax.checkpoint_policies.everything_saveable,
        static_argnums=4,
        static_argnames="flag",
    )
    value, gradient = refs.value_and_grad(made, 2)(table, table.at[1], 0.5, 1.0, 2, flag=True)
    np.testing.assert_allclose(value, np.sin(0.5) ** 2 * 5 + 1, rtol=1e-6)
    np.testing.assert_allclose(gradient, 2 * np.sin(0.5) * np.cos(0.5) * 5, rtol=1e-6)
    assert n[...] == 1


@pytest.mark.parametrize(
    "prevent_cse", [({"W": False, "x": True},), ((False, True),), [[False, True]]], ids=str
)
def test_checkpoint_has_a_flag_for_each_part_of_an_argument(prevent_cse):
    @functools.partial(refs.checkpoint, prevent_cse=prevent_cse)
    def layer(given):
        return jnp.sin(given["x"] @ given["W"])

    gradient = refs.jit(refs.grad(lambda W, x: layer({"W": W, "x": x}).sum()))
    text = gradient.lower(jnp.ones((3, 3)), jnp.ones(3)).as_text()
    assert re.search(r"optimization_barrier %[a-z0-9]+, %[a-z0-9]+ :", text)  # W isn't held back.


def test_checkpoint_recomputes():
    w = refs.new_ref(jnp.float32(2))
    f = refs.checkpoint(lambda x: jnp.sin(jnp.sin(x) * w[...]))
    text = str(refs.make_jaxpr(refs.grad(f))(1.0))
    assert text.count(" sin ") == 3  # two forwards, and the inner one again


def test_checkpoint_of_refs_returned(table):
    out, again = refs.checkpoint(lambda r: (refs.new_ref(r[...] * 2), r))(table)
    same(out[...], 2 * np.arange(6).reshape(3, 2))
    assert again is table


def test_a_ref_without_rows(jit):
    empty = refs.new_ref(jnp.zeros((0, 2)))

    def step(c, row):
        row[...] += 1
        return c + row[0], row[...]

    carry, rows = jit(lambda r: refs.scan(step, 3.0, r))(empty)
    assert carry == 3
    assert rows.shape == (0, 2)
    assert jit(lambda r: refs.map(lambda row: row[0], r))(empty).shape == (0,)


# --- What JAX's own take ------------------------------------------------------------------------

XS, ZERO = jnp.arange(5.0), jnp.int32(0)
CALLS = {
    "map in batches": lambda m, b: m.map(b, XS, batch_size=2),
    "map in whole batches": lambda m, b: m.map(b, XS[:4], batch_size=2),
    "map in one batch": lambda m, b: m.map(b, XS, batch_size=5),
    "map in too large a batch": lambda m, b: m.map(b, XS, batch_size=9),
    "map, all at once": lambda m, b: m.map(b, XS, batch_size=0),
    "map over nothing": lambda m, b: m.map(b, XS[:0]),
    "map over nothing in batches": lambda m, b: m.map(b, XS[:0], batch_size=2),
    "scan over nothing": lambda m, b: m.scan(lambda c, x: (c + 1, b(x)), 0, XS[:0]),
    "scan, no steps": lambda m, b: m.scan(lambda c, x: (c + 1, x), 0, length=0),
    "scan, a length": lambda m, b: m.scan(lambda c, x: (b(c), x), 0.0, None, 3),
    "scan, both": lambda m, b: m.scan(lambda c, x: (c + b(x), x), 0.0, XS, length=5),
    "scan, backwards": lambda m, b: m.scan(lambda c, x: (c + b(x), c), 0.0, XS, reverse=True),
    "scan, unrolled": lambda m, b: m.scan(lambda c, x: (c + b(x), c), 0.0, XS, unroll=True),
    "scan, not unrolled": lambda m, b: m.scan(lambda c, x: (c + b(x), c), 0.0, XS, unroll=False),
    "scan, split": lambda m, b: m.scan(lambda c, x: (c, b(x)), 0, XS, _split_transpose=True),
    "fori_loop, no steps": lambda m, b: m.fori_loop(3, 0, lambda i, c: b(c), 1.0),
    "fori_loop, array bounds": lambda m, b: m.fori_loop(
        ZERO, np.int32(3), lambda i, c: b(c), 1.0, unroll=2
    ),
    "fori_loop, keywords": lambda m, b: m.fori_loop(
        lower=0, upper=3, body_fun=lambda i, c: b(c), init_val=1.0
    ),
    "while_loop, keywords": lambda m, b: m.while_loop(
        cond_fun=lambda c: c < 9, body_fun=lambda c: b(c) + 1, init_val=1.0
    ),
    "cond, operand": lambda m, b: m.cond(True, b, lambda x: x, operand=2.0),
    "cond, operand None": lambda m, b: m.cond(False, lambda _: 1.0, lambda _: b(2.0), operand=None),
    "cond, an operand each": lambda m, b: m.cond(False, 1.0, b, 2.0, lambda x: b(x) * 3),
    "cond, a callable operand": lambda m, b: m.cond(
        True, lambda x, f: b(x) + f(x), lambda x, f: x, 2.0, Partial(jnp.multiply, 3.0)
    ),
    "cond, callable operands": lambda m, b: m.cond(
        False, lambda f, g: 1.0, lambda f, g: f(b(2.0)), *[Partial(jnp.multiply, 3.0)] * 2
    ),
    "cond, a callable operand each": lambda m, b: m.cond(
        True, jnp.ones(2), b, Partial(jnp.multiply, 3.0), lambda f: f(jnp.ones(2))
    ),
    "switch, a callable operand": lambda m, b: m.switch(
        1, [lambda f: 1.0, lambda f: f(b(2.0))], Partial(jnp.multiply, 3.0)
    ),
    "switch, operand": lambda m, b: m.switch(1, [lambda x: x, b], operand=2.0),
    "switch, too large": lambda m, b: m.switch(index=7, branches=[lambda: 1.0, lambda: b(2.0)]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_as_jax(jit, call):
    scale = refs.new_ref(2.0)
    got = jit(lambda: call(refs, lambda x: x * scale[...]))()
    jax.tree.map(same, got, call(lax, lambda x: x * 2.0))


REFUSED = {
    "map over no tree": lambda m: m.map(lambda x: x, (), batch_size=2),
    "map over rows of several lengths": lambda m: m.map(sum, (XS, XS[:3])),
    "scan, no length": lambda m: m.scan(lambda c, x: (c, x), 0),
    "scan, another length": lambda m: m.scan(lambda c, x: (c, x), 0, XS, 3),
    "scan, another carry": lambda m: m.scan(lambda c, x: ((c, c), x), 0.0, XS),
    "switch, no branches": lambda m: m.switch(0, []),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_refused_as_by_jax(call):
    with pytest.raises((TypeError, ValueError)) as native:
        call(lax)
    with pytest.raises(type(native.value)) as ours:
        call(refs)
    assert str(ours.value) == str(native.value)


NO_FUNCTION = {
    "scan": lambda: refs.scan(3, 0, XS),
    "map": lambda: refs.map(3, XS),
    "while_loop": lambda: refs.while_loop(lambda x: x < 3, 3, 0),
    "fori_loop": lambda: refs.fori_loop(0, 3, 3, 0),
    "cond": lambda: refs.cond(True, 3, lambda: 0),
    "switch": lambda: refs.switch(0, [lambda: 0, 3]),
}


@pytest.mark.parametrize("name", NO_FUNCTION)
def test_what_is_no_function(name):
    with pytest.raises(RefTypeError, match=f"Expected a callable value, got 3, for {name}"):
        NO_FUNCTION[name]()


def test_where_the_bounds_are_known_there_is_a_gradient():
    r = refs.new_ref(2.0)

    def loop(x):
        return refs.fori_loop(ZERO, np.int32(3), lambda i, c: c * r[...], x)

    assert refs.grad(loop)(1.0) == 8


@pytest.mark.parametrize("prevent_cse", [(True, False), (False, False)])
def test_checkpoint_with_flags_in_a_derivative_in_jit(prevent_cse):
    """What is recomputed stands behind a barrier where that is wanted; the values are the same."""
    r = refs.new_ref(jnp.arange(300.0))

    def f(x, y):
        r[0] = jnp.sin(x)
        r[1] = jnp.sin(r[0]) * r[2]
        return (jnp.sin(r[...]) * y).sum()

    x, y = jnp.float32(0.5), jnp.ones(300)
    got = refs.jit(refs.grad(refs.checkpoint(f, prevent_cse=prevent_cse)))(x, y)
    a = np.sin(0.5)
    want = np.cos(0.5) * (np.cos(a) + np.cos(np.sin(a) * 2) * 2 * np.cos(a))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(r[:3], [a, np.sin(a) * 2, 2], rtol=1e-6)
