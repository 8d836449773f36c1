"""Deposits, added where they belong: see `refs/_inplace/accumulate.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from tests.inplace.helpers import primitives, rewritten

pytestmark = pytest.mark.as_released

X = jnp.arange(512.0).reshape(8, 64)
INDICES = jnp.array([1, 3, 5])


def test_cotangents_of_reads_are_added_where_they_belong():
    def loss(x):
        return x[3, 5] ** 2 + x[1, 7] * x[3, 5] + lax.dynamic_slice(x, (2, 2), (2, 3)).sum()

    new = rewritten(jax.grad(loss), X)
    sums = [e for e in new.eqns if e.primitive.name in ("add", "add_any")]
    assert all(e.outvars[0].aval.size < 10 for e in sums)


def test_cotangents_with_gaps_between_them():
    """Of a slice with a stride: they are no block."""

    def loss(x):
        return (lax.slice(x, (0, 1), (8, 64), (2, 3)) ** 2).sum() + x[3, 5] ** 2

    rewritten(jax.grad(loss), X)


def test_what_is_used_twice_is_no_deposit():
    def program(x):
        put = jnp.zeros_like(x).at[2].set(5.0)
        return x + put, put.sum()

    rewritten(program, X)


def test_zeros_are_not_added():
    new = rewritten(lambda x: (x + jnp.zeros_like(x)).at[0].set(1.0), X)
    assert "add" not in primitives(new)


def test_a_loop_that_only_adds_starts_from_what_it_is_added_to():
    def program(x, steps):
        def step(total, k):
            return total + jnp.zeros_like(x).at[k].set(1.0), None

        return x + lax.scan(step, jnp.zeros_like(x), steps)[0]

    new = rewritten(program, X, jnp.arange(8))
    [scan] = [e for e in new.eqns if e.primitive.name == "scan"]
    assert any(v is new.invars[0] for v in scan.invars)
    assert "add" not in primitives(new)


def test_not_if_what_it_is_added_to_needs_the_loop():
    def program(x, steps):
        def step(carry, k):
            total, n = carry
            return (total + jnp.zeros_like(x).at[k].set(1.0), n + 1.0), None

        total, n = lax.scan(step, (jnp.zeros_like(x), 0.0), steps)[0]
        return x * n + total

    rewritten(program, X, jnp.arange(8))


def added_in_a_loop(base, n):
    zeros = jnp.zeros_like(base)
    return base + lax.scan(lambda c, _: (c.at[0].add(1), None), zeros, jnp.arange(n))[0]


def added_in_a_branch(base, n):
    zeros = jnp.zeros_like(base)
    return lax.cond(base[1] > 0, lambda: added_in_a_loop(zeros, n), lambda: zeros) + base


def added_one_by_one(base, n):
    total = jnp.zeros_like(base)
    for _ in range(n):
        total += jnp.zeros_like(base).at[0].add(1)
    return base + total


def added_by_a_scatter(base, n):
    return base + jnp.zeros_like(base).at[jnp.zeros(n, int)].add(jnp.ones(n, base.dtype))


def added_by_a_gradient(base, n):
    def loss(x):
        total, _ = lax.scan(lambda c, _: (c + x[0].astype(float), None), 0.0, jnp.arange(n))
        return total + (x * base).astype(float).sum()

    return jax.grad(loss)(base)


@pytest.mark.parametrize(
    "add",
    [added_in_a_loop, added_in_a_branch, added_one_by_one, added_by_a_scatter, added_by_a_gradient],
)
@pytest.mark.parametrize("dtype, base", [("bfloat16", 1000), ("float16", 4096)])
def test_short_floats_lose_no_small_terms(dtype, base, add):
    """Beside the base each is rounded off, but not their sum."""

    def run(x):
        return add(x, 16)

    x = jnp.full(200, base, dtype)
    want, got = (np.asarray(jax.jit(f)(x), float) for f in (run, refs.in_place(run)))
    np.testing.assert_array_equal(got, want)
    if add is not added_by_a_scatter:  # XLA may scatter to the base itself.
        np.testing.assert_array_equal(got, [base + 16, *[base] * 199])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_what_is_added_once_is_added_in_place(dtype):
    def loss(x):
        return (x[3, 5] ** 2).astype(float) + (lax.dynamic_slice(x, (2, 2), (2, 3)) ** 2).sum()

    def once(x):
        return x + jnp.zeros_like(x).at[INDICES].add(1, unique_indices=True)

    x = X.astype(dtype)
    for fun in (once,) if dtype == "int8" else (once, jax.grad(loss)):
        new = rewritten(fun, x)
        sums = [e for e in new.eqns if e.primitive.name in ("add", "add_any")]
        assert all(e.outvars[0].aval.size < 300 for e in sums)
