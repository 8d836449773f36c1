"""Host callbacks under JAX's settings for debugging."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs.errors import CallbackError

same = np.testing.assert_array_equal


def halves_and_fails(v):
    v[...] /= 2
    raise ValueError


@pytest.mark.parametrize("setting", [jax.debug_nans, jax.debug_infs])
@pytest.mark.parametrize("keep_old", [None, False, True])
@pytest.mark.parametrize("adds", [False, True], ids=["only calls", "adds"])
def test_a_failure_loses_nothing_where_nothing_is_donated(setting, keep_old, adds):
    w = refs.new_ref(jnp.ones(3))

    @refs.jit
    def step():
        if adds:
            w.at[1].add(1.0)
        refs.io_callback(halves_and_fails, None, w, keep_old=keep_old)

    with setting(True), pytest.raises(CallbackError, match=r"keep their old values$"):
        step()
    same(w[...], np.ones(3))


ROW = jax.ShapeDtypeStruct((), jnp.float32)
WAYS = {
    "grad": lambda call: refs.grad(lambda x: (call(), x * 2)[1]),
    "jvp": lambda call: lambda x: refs.jvp(lambda x: (call(), x * 2)[1], (x,), (x,)),
    "vmap": lambda call: lambda x: refs.vmap(lambda _: call())(jnp.ones(1)),
    "checkpoint": lambda call: refs.checkpoint(lambda _: call()),
    "scan": lambda call: lambda x: refs.scan(lambda *_: (None, call()), None, length=1),
    "jit": lambda call: refs.jit(lambda _: call()),
}


@pytest.mark.parametrize("way", WAYS)
def test_without_jit(way):
    n = refs.new_ref(jnp.float32(1))

    def read(v):
        return v + 1

    def both():
        refs.io_callback(lambda: seen.append(1), None)
        refs.pure_callback(read, ROW, n[...], vmap_method="sequential")

    for is_disabled in (False, True):
        seen = []
        with jax.disable_jit(is_disabled):
            WAYS[way](both)(2.0)
        assert seen == [1]


def test_lanes_without_jit():
    r = refs.new_ref(jnp.zeros(3))
    with jax.disable_jit():
        refs.vmap(lambda row: refs.io_callback(lambda v: v.fill(5), None, row))(r)
    same(r[...], np.full(3, 5))
