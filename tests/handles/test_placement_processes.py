"""Refs over the devices of two processes: each of them runs this file."""

import re
import sys

import jax
import numpy as np
import pytest
from jax import NamedSharding, P

import refs
from refs.errors import RefValueError
from tests.processes import run_together

X = np.arange(8.0, dtype=np.float32)


@pytest.mark.slow
def test_over_two_processes():
    found = run_together(2, "-m", "tests.handles.test_placement_processes")
    assert all(status == 0 for status, *_ in found), found


def run(number):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    r = refs.new_ref(X, sharding=split, name="r")
    if number == 0:  # Other processes needn't take part.
        assert re.match(r"Ref\(shape=\(8,\), dtype=float32, sharding=.*, name='r'\)", repr(r))
        np.testing.assert_array_equal(r.addressable_data(1), X[2:4])
    assert len(r.devices()) == len(r.global_shards) == 4
    assert len(r.addressable_shards) == 2
    assert not r.is_fully_addressable
    with pytest.raises(RefValueError, match="process_allgather"):
        np.asarray(r)

    count, key = refs.new_ref(0), refs.new_ref(jax.random.key(0))

    @refs.jit
    def step(r):
        key[...], _ = jax.random.split(key[...])
        r[...] += 1
        count[...] += 1

    for _ in range(3):
        step(r)
    assert count[...] == int(count) == 3
    assert count.sharding.is_equivalent_to(whole, 0)
    expected = jax.random.key(0)
    for _ in range(3):
        expected, _ = jax.random.split(expected)
    bits = jax.random.key_data(key[...])
    np.testing.assert_array_equal(bits, jax.random.key_data(expected))

    refs.reshard(r, whole)
    np.testing.assert_array_equal(r, X + 3)
    refs.reshard(r, split)
    np.testing.assert_array_equal(r.addressable_data(0), X[4 * number : 4 * number + 2] + 3)
    made = refs.empty_ref(X, sharding=split)
    step(made)
    np.testing.assert_array_equal(made.addressable_data(0), [1, 1])
    local = refs.new_ref(X)
    refs.reshard(local, split)
    step(local)
    np.testing.assert_array_equal(local.addressable_data(1), X[4 * number + 2 : 4 * number + 4] + 1)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address, n, k = sys.argv[1:]
    jax.distributed.initialize(address, int(n), int(k))
    run(int(k))
