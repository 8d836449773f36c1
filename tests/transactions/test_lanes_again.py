"""A lane of `refs.vmap` is traced in each call, as in JAX, but nothing is compiled again."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import refs
from tests.transactions.again import CALLS, NATIVE, X, calls_of, same


def shared_by_lanes(f):
    return refs.vmap(f, in_axes=(None, 0))


@pytest.mark.parametrize("is_new", [False, True], ids=["one function", "new ones"])
@pytest.mark.parametrize("name", ["jnp", *CALLS, *NATIVE])
def test_what_comes_again(name, is_new):
    factor, calls = [2.0], []
    r, one = refs.new_ref(0.0), jnp.ones(())
    as_it_is = jax.jit(lambda x: x * one)

    def touch(r, x):
        r[...] += (x if "checkpoint of" in name else x * one).sum()
        return jax.nn.relu(x)

    def made():
        call = (CALLS | NATIVE)[name](r, touch) if name != "jnp" else touch

        def lane(r, x):
            calls.append(x)
            return call(r, as_it_is(x)) * factor[0]

        return shared_by_lanes(lane)

    same_one = made()
    for k in (2.0, 3.0, 2.0):
        factor[0], n_calls = k, len(calls)
        results = [*calls_of(lambda: (made() if is_new else same_one)(r, X), 4)]
        for result, n_compiled in results[2:]:
            same(result, k * X)
            assert n_compiled == 0
        assert len(calls) >= n_calls + 4
    same(r[...], 12 * X.sum())


def test_nothing_outlives_a_lane():
    def called():
        r, kept = refs.new_ref(0.0), jnp.ones(3)
        f = jax.custom_jvp(lambda x: x * 2)
        f.defjvp(lambda p, t: (f(*p), kept[0] * t[0]))

        inner = refs.jit(lambda x: r.addupdate(f(x) * kept[2]))

        def lane(r, x):
            inner(x)
            return lax.fori_loop(0, 2, lambda k, y: y * kept[1], x)

        for _ in range(3):
            shared_by_lanes(lane)(r, X)
        return weakref.ref(r), weakref.ref(kept)

    watched = called()
    gc.collect()
    assert [ref() for ref in watched] == [None, None]
