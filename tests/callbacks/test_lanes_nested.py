"""Callbacks in lanes: branches within lanes within branches, and the oldest of JAX's methods."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs

S = jax.ShapeDtypeStruct
same = np.testing.assert_array_equal
both = pytest.mark.parametrize("jit", [lambda f: f, refs.jit], ids=["top level", "jit"])
methods = pytest.mark.parametrize("method", ["sequential", "expand_dims", "broadcast_all"])


def numbers(*shape):
    return np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)


def ref(*shape):
    return refs.new_ref(jnp.asarray(numbers(*shape)), name="r")


@both
@methods
def test_branches_in_branches(jit, method):
    """A lane calls where both its own predicate and that of the lanes around it are true."""
    x, n, r = numbers(3, 2), numbers(3), ref(3)

    def host(a):
        return np.asarray(a) + 10

    def inner(x, n):
        call = lambda: refs.pure_callback(host, S((), jnp.int32), x, vmap_method=method)  # noqa: E731
        return lax.cond(x > n + 1, call, lambda: x)

    def outer(x, n, q):
        q[...] += 1
        mapped = lambda: refs.vmap(inner, in_axes=(0, None))(x, n)  # noqa: E731
        return lax.cond(n > 0, mapped, lambda: x)

    got = jit(refs.vmap(outer))(x, n, r)
    same(got, np.where((n > 0)[:, None] & (x > n[:, None] + 1), x + 10, x))
    same(r[...], numbers(3) + 1)


@both
@methods
def test_a_map_of_jax_in_a_branch(jit, method):
    """The mask comes after the map's layer, and isn't batched in it."""
    x, r = numbers(3, 2), ref(3)

    def lane(x, q):
        q[...] += 1
        call = jax.vmap(
            lambda e: refs.pure_callback(
                lambda a: np.asarray(a) + 10, S((), jnp.int32), e, vmap_method=method
            )
        )
        return lax.cond(q[...] > 1, call, lambda x: x, x)

    got = jit(refs.vmap(lane))(x, r)
    same(got, np.where(numbers(3)[:, None] > 0, x + 10, x))


@both
def test_the_oldest_of_jaxs_methods(jit):
    """It leaves arguments that aren't mapped as they are, as in JAX."""
    x, y, r = numbers(3, 2), numbers(2), ref(3)

    def lane(module, x, y):
        add = lambda a, b: np.asarray(a) + np.asarray(b)  # noqa: E731
        return module.pure_callback(add, S((2,), jnp.int32), x, y, vmap_method="legacy_vectorized")

    def counted(x, q):
        q[...] += 1
        return lane(refs, x, y)

    same(jit(refs.vmap(counted))(x, r), jax.vmap(lambda x: lane(jax, x, y))(x))
    same(r[...], numbers(3) + 1)
