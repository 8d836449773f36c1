"""Branches and loops in `refs.shard_map` that write a ref where each device decides for itself.

Run on as many devices as there are; `tests/test_several_devices.py` runs this file on four.
"""

import jax
import numpy as np
import pytest
from jax import lax

from refs.errors import RefValueError
from tests.transforms.test_shard_map import SPLIT, N, X, everywhere, over_devices, split, whole


def until(n, r):
    def step(k):
        r[...] += 1
        return k + 1

    lax.while_loop(lambda k: k < n, step, n * 0)


def if_large(n, r):
    lax.cond(n > 1, lambda: r.addupdate(1), lambda: None)


DECIDING = {
    "cond": if_large,
    "switch": lambda n, r: lax.switch(n, [lambda: None, lambda: r.addupdate(1)]),
    "while": until,
    "in a jit": jax.jit(if_large),
}


@everywhere
@pytest.mark.parametrize("name", DECIDING)
def test_devices_that_decide_for_themselves(name, wrap):
    """What a ref holds is the same on every device, so all of them write it, or none."""
    shared, own = whole(np.float32(0)), split()

    def alone(x):
        DECIDING[name](x[0].astype(int), shared)

    def together(x, own):
        n = lax.pmax(x[0].astype(int), "d")
        DECIDING[name](n, shared)
        DECIDING[name](x[0].astype(int), own)

    with pytest.raises(RefValueError, match="as its predicate varies over mesh axis 'd'"):
        wrap(over_devices(alone, in_specs=SPLIT, out_specs=None))(X)
    assert shared[...] == 0
    wrap(over_devices(together, in_specs=(SPLIT, SPLIT), out_specs=None))(X, own)
    n = X[-8 // N]
    expected = n if name == "while" else n > 1
    assert {float(s.data) for s in shared.addressable_shards} == {expected}
    first = X[:: 8 // N]
    added = first if name == "while" else first >= 1 if name == "switch" else first > 1
    np.testing.assert_array_equal(own[...], X + np.repeat(added, 8 // N))
