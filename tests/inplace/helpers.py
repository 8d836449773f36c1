"""What the tests of the in-place pass share."""

import jax
import numpy as np

from refs._inplace import rewrite


def rewritten(fun, *args):
    """The pass's jaxpr of a function, after making sure that it computes the same."""
    closed = jax.make_jaxpr(fun)(*args)
    new = rewrite(closed.jaxpr)
    want, got = (jax.core.eval_jaxpr(j, closed.consts, *args) for j in (closed.jaxpr, new))
    for x, y in zip(want, got, strict=True):
        np.testing.assert_array_equal(x, y)
    return new
