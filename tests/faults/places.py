"""Where callbacks over refs are called from: ways to make a step of a body."""

import jax
import jax.numpy as jnp
from jax import lax

import refs

SMALL, LARGE = 3, 100_000


def ref(name="r", n=SMALL):
    return refs.new_ref(jnp.zeros(n, jnp.int32), name=name)


def at_top(body):
    return body


def in_jit(body):
    return refs.jit(body)


def in_a_loop(body):
    return refs.jit(lambda *args: refs.fori_loop(0, 3, lambda _, c: (body(*args), c)[1], 0))


def in_a_loop_at_top(body):
    return lambda *args: refs.fori_loop(0, 3, lambda _, c: (body(*args), c)[1], 0)


def in_a_branch(body):
    return refs.jit(lambda *args: lax.cond(True, lambda: body(*args), lambda: None))


def in_a_branch_at_top(body):
    return lambda *args: refs.cond(jnp.array(True), lambda: body(*args), lambda: None)


def in_a_scan_at_top(body):
    return lambda *args: refs.scan(lambda c, _: (c, body(*args)), 0, None, length=2)


def in_an_inner_jit(body):
    return refs.jit(lambda *args: jax.jit(lambda: refs.jit(body)(*args))())


def in_a_gradient(body):
    return lambda *args: (refs.grad(lambda x: (body(*args), x)[1])(1.0), None)[1]


PLACES = [
    *(at_top, in_jit, in_a_loop, in_a_loop_at_top, in_a_branch, in_a_branch_at_top),
    *(in_a_scan_at_top, in_an_inner_jit, in_a_gradient),
]


def steps(place):
    """How often one call of the place makes the body."""
    return {in_a_loop: 3, in_a_loop_at_top: 3, in_a_scan_at_top: 2}.get(place, 1)
