"""Backward rules that write a ref argument which the forward rule gave them as a residual."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs

same = np.testing.assert_allclose


@jax.custom_vjp
def stash(r, x):
    return x


def stash_backward(r, g):
    r[...] = g
    return None, g


stash.defvjp(lambda r, x: (x, r), stash_backward)


def twice(r, x):
    x = stash(r, jnp.sin(x))
    return stash(r, jnp.sin(x))  # written first, by the backward pass


def in_scan(body):
    return lambda r, x: lax.scan(lambda x, _: (body(r, x), ()), x, None, length=1)[0]


PROGRAMS = {
    "alone": twice,
    "jax.jit": jax.jit(twice),
    "refs.jit": refs.jit(twice),
    "scan": in_scan(twice),
    "scan of remat": in_scan(jax.checkpoint(twice)),
    "refs.checkpoint": refs.checkpoint(twice),
    "cond": lambda r, x: lax.cond(x > 0, twice, lambda r, x: x, r, x),
}
WAYS = {
    "grad": lambda f: refs.grad(f, 1),
    "closed over": lambda f: lambda r, x: refs.grad(lambda x: f(r, x))(x),
    "vjp": lambda f: lambda r, x: refs.vjp(lambda x: f(r, x), x)[1](1.0)[0],
    "aux": lambda f: lambda r, x: refs.grad(lambda x: (f(r, x), x), has_aux=True)(x)[0],
    "of the ref too": lambda f: lambda r, x: refs.grad(f, (0, 1))(r, x)[1],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_ref_as_residual(program, way, jit):
    r = refs.new_ref(jnp.float32(0), name="r")
    slope = jit(WAYS[way](PROGRAMS[program]))(r, jnp.float32(1))
    same(slope, np.cos(np.sin(1)) * np.cos(1), rtol=1e-6)
    same(r[...], np.cos(np.sin(1)), rtol=1e-6)


def test_a_row_as_residual(jit):
    rows = refs.new_ref(jnp.zeros((2, 3)))

    def layers(rows, x):
        return lax.scan(lambda x, row: (stash(row, 2 * x), ()), x, rows)[0].sum()

    same(jit(refs.grad(layers, 1))(rows, jnp.ones(3)), [4, 4, 4])
    same(rows[...], [[2, 2, 2], [1, 1, 1]])


def test_lanes_accumulate_into_a_residual(jit):
    total = refs.new_ref(jnp.float32(0))
    f = jax.custom_vjp(lambda r, x: x)

    def backward(r, g):
        r[...] += g
        return None, g

    f.defvjp(lambda r, x: (x, r), backward)
    xs = jnp.array([1.0, 2.0, 3.0])
    jit(refs.grad(lambda xs: refs.vmap(lambda x: f(total, x * x))(xs).sum()))(xs)
    assert total[...] == 3


def test_each_lane_has_its_residual(jit):
    rows = refs.new_ref(jnp.zeros(3))
    xs = jnp.array([1.0, 2.0, 3.0])
    same(jit(refs.vmap(refs.grad(twice, 1)))(rows, xs), np.cos(np.sin(xs)) * np.cos(xs), rtol=1e-6)
    same(rows[...], np.cos(np.sin(xs)), rtol=1e-6)
