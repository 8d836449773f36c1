"""What the tests of where refs lie have in common."""

import jax
import numpy as np
import pytest

import refs

X = np.arange(16.0, dtype=np.float32)
N = jax.device_count()
several = pytest.mark.skipif(N != 8, reason="test_several_devices.py runs this on eight")


def lies_at(ref, sharding):
    """Whether it does, and says so everywhere."""
    shards = ref.addressable_shards
    return (
        ref.sharding.is_equivalent_to(sharding, ref.ndim)
        and ref[...].sharding.is_equivalent_to(sharding, ref.ndim)
        and ref.devices() == sharding.device_set
        and ref.is_fully_replicated == sharding.is_fully_replicated
        and ref.is_fully_addressable
        and {s.device for s in shards} == sharding.device_set
        and all(np.array_equal(s.data, np.asarray(ref)[s.index]) for s in shards)
    )


def addresses(tree):
    """Those of all parts of all refs of a tree."""
    with refs.tree.borrow(tree) as arrays:
        return [
            shard.data.unsafe_buffer_pointer()
            for x in jax.tree.leaves(arrays)
            for shard in x.addressable_shards
        ]
