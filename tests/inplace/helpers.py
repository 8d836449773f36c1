"""What the tests of the in-place pass share."""

import functools

import jax
import numpy as np

import refs
from refs._inplace import rewrite
from refs._inplace.flatten import at_each_level
from refs._inplace.normal import normal

# The tests' arrays are small; copies of less than 64 floats aren't prevented.
assert_in_place = functools.partial(refs.testing.assert_in_place, smaller_than=256)


def primitives(jaxpr):
    """The names of a jaxpr's operations, in order."""
    return [eqn.primitive.name for eqn in jaxpr.eqns]


def normal_form(jaxpr, is_one_cpu=False):
    """The jaxpr, and those in it, with accesses."""
    return at_each_level(jaxpr, lambda body: normal(body, is_one_cpu), lambda _: True)


def rewritten(fun, *args):
    """The pass's jaxpr of a function on a CPU; it computes the same, there and elsewhere."""
    closed = jax.make_jaxpr(fun)(*args)
    new = rewrite(closed.jaxpr)
    elsewhere = [rewrite(closed.jaxpr, *w) for w in ((False, False), (True, True), (False, True))]
    want, *others = (
        jax.core.eval_jaxpr(j, closed.consts, *args) for j in (closed.jaxpr, new, *elsewhere)
    )
    for got in others:
        for x, y in zip(want, got, strict=True):
            np.testing.assert_array_equal(x, y)
    return new
