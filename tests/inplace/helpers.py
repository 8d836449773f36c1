"""What the tests of the in-place pass share."""

import jax
import numpy as np

from refs._inplace import rewrite


def rewritten(fun, *args):
    """The pass's jaxpr of a function on a CPU; it computes the same, there and elsewhere."""
    closed = jax.make_jaxpr(fun)(*args)
    new, elsewhere = rewrite(closed.jaxpr), rewrite(closed.jaxpr, on_cpu=False)
    want, *others = (
        jax.core.eval_jaxpr(j, closed.consts, *args) for j in (closed.jaxpr, new, elsewhere)
    )
    for got in others:
        for x, y in zip(want, got, strict=True):
            np.testing.assert_array_equal(x, y)
    return new
