"""Refs that are made where they belong. On eight devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

import refs
from refs.errors import RefValueError
from tests.placement import X, addresses, lies_at, several


@refs.jit
def add_one(ref):
    ref[...] += 1


@several
@pytest.mark.parametrize("value", [X, jnp.asarray(X), 3.0], ids=["numpy", "jax", "float"])
def test_made_there(split, whole, value):
    sharding = split if np.ndim(value) else whole
    r = refs.new_ref(value, sharding=sharding)
    assert lies_at(r, sharding)
    np.testing.assert_array_equal(r, value)
    add_one(r)
    assert lies_at(r, sharding)


@several
@pytest.mark.parametrize("device", [0, 1])
def test_refs_made_of_one_array_share_nothing(split, whole, device):
    x = jax.device_put(X, jax.devices()[device])
    for sharding in (whole, split, jax.devices()[device], jax.devices()[2]):
        a, b = (refs.new_ref(x, sharding=sharding) for _ in range(2))
        add_one(a)
        add_one(b)
        for found in (a, b, x + 1):
            np.testing.assert_array_equal(found, X + 1)


@several
def test_a_spec_over_the_mesh_in_force(mesh, split):
    with jax.set_mesh(mesh):
        made = refs.empty_ref(X, sharding=P("x"))
        for value in (X, jnp.asarray(X)):
            one = refs.new_ref(value, sharding=jax.devices()[3])
            assert {s.device for s in one.addressable_shards} == {jax.devices()[3]}
        assert lies_at(refs.new_ref(X, sharding=P("x")), split)
        inside = refs.jit(lambda: refs.empty_ref(X, sharding=P("x")))()
    assert lies_at(made, split)
    assert lies_at(inside, split)


@pytest.mark.as_released
@several
def test_the_error_for_an_array_that_lies_elsewhere(split):
    r = refs.new_ref(X, sharding=split, name="r")
    x = jax.device_put(X, jax.devices()[3])
    with pytest.raises(RefValueError, match=r"`r` .* lies on 8 .*; an array of shape \(16,\) lies"):
        refs.jit(lambda r, x: r.addupdate(x))(r, x)
    with pytest.raises(RefValueError, match=r"address of ref `r` .* refs\.tree\.borrow"):
        r.unsafe_buffer_pointer()


@pytest.mark.as_released
@several
def test_the_memory_of_numpy_arrays_is_not_the_refs(split):
    # JAX takes an array at an address like this one as it is.
    room = np.zeros(4096 + 16, np.float32)
    start = -room.ctypes.data % 64 // 4
    value = room[start : start + 4096]
    for sharding in (split, jax.devices()[0]):
        value[:] = 1
        r = refs.new_ref(value, sharding=sharding)
        where = addresses(r)
        value[:] = 0
        np.testing.assert_array_equal(r, np.ones(4096))
        add_one(r)
        assert addresses(r) == where


@several
def test_no_device_gets_more_than_its_part(split):
    # With the arrays themselves: of one that is gone, a new one may have the `id`.
    before = {id(x): x for x in jax.live_arrays()}
    r = refs.new_ref(np.zeros((8, 1000)), sharding=split)
    e = refs.empty_ref(jax.ShapeDtypeStruct((8, 1000), jnp.float32), sharding=split)
    new = [x for x in jax.live_arrays() if id(x) not in before]
    assert len(new) == 2
    for shard in (s for x in new for s in x.addressable_shards):
        assert shard.data.shape == (1, 1000)
    assert lies_at(r, split)
    assert lies_at(e, split)


@several
def test_an_array_is_copied_or_taken_over(split):
    x = jax.device_put(X, split)
    refs.new_ref(x, sharding=split)[0] = 5.0
    assert np.asarray(x)[0] == 0
    r = refs.new_ref(x, sharding=split, copy=False)
    r[0] = 5.0
    assert x.is_deleted()


@several
def test_made_in_a_program(split):
    def make(x):
        return refs.new_ref(2 * x, sharding=split)

    assert lies_at(refs.jit(make, out_shardings=split)(X), split)
    assert lies_at(refs.jit(lambda: refs.new_ref(jnp.zeros(16)), out_shardings=split)(), split)
    text = refs.jit(lambda x: refs.new_ref(x, sharding=split)[...] + 1).lower(X).as_text()
    assert re.search(r"sharding.*\"x\"|devices=\[8\]", text)
