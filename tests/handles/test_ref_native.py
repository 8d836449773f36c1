"""The handle inside traces and in JAX's own functions, and JAX's own refs in ours."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import refs


@pytest.fixture
def ref():
    return refs.new_ref(jnp.arange(3.0), name="state")


@pytest.mark.parametrize("jit", [jax.jit, refs.jit])
def test_traced_refs_have_the_attributes_of_handles(jit, ref):
    seen = []

    def look(r):
        seen.append((r.shape, r.dtype, r.ndim, r.size, r.nbytes, r.name, len(r)))
        r.at[0].add(1)
        r.set(5, idx=1)
        return r.get(2), r.swap(6, idx=2)

    jit(look)(ref)
    jit(lambda: look(refs.new_ref(jnp.zeros(3), name="state")))()
    assert seen == [((3,), jnp.float32, 1, 3, 12, "state", 3)] * 2
    assert ref[...].tolist() == [1, 5, 6]


def test_jax_functions_take_a_handle_and_write_back(ref):
    jax.ref.set(ref, 0, 5.0)
    assert jax.ref.get(ref, 0) == 5
    assert jax.ref.swap(ref, 1, 6.0) == 1
    jax.ref.addupdate(ref, 2, 1.0)
    assert ref[...].tolist() == [5, 6, 3]
    jax.vmap(lambda r: refs.set(r, ..., r[...] * 2))(ref)
    assert ref[...].tolist() == [10, 12, 6]
    total, _ = lax.scan(lambda c, i: (c + refs.swap(ref, i, 1), None), 0.0, jnp.arange(3))
    assert total == 28
    assert ref[...].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: refs.new_ref(jnp.arange(2.0) + 1, copy=False),
        lambda: refs.empty_ref(jnp.ones(2)),
        refs.jit(lambda: refs.new_ref(jnp.ones(2))),
    ],
    ids=["copy=False", "empty_ref", "returned from refs.jit"],
)
def test_jax_jit_takes_a_handle_however_it_was_made(make):
    ref = make()
    jax.jit(lambda r: refs.set(r, ..., 2))(ref)
    assert ref[...].tolist() == [2, 2]


def test_plain_refs_work_in_our_functions():
    plain = jax.new_ref(jnp.arange(3.0))
    refs.set(plain, 0, 5)
    assert refs.swap(plain, slice(1, None, -1), [7, 6]).tolist() == [1, 5]
    refs.addupdate(plain, [2, 2], 1)
    refs.jit(lambda r: r.at[0].multiply(2))(plain)
    refs.jit(lambda: refs.addupdate(plain, ..., 1))()
    assert refs.get(plain, -1) == 5
    assert refs.freeze(plain).tolist() == [13, 8, 5]


def test_a_ref_is_a_constant_for_jax_grad_inside_jax_jit(ref):
    gradient = jax.grad(jax.jit(lambda x: (x * ref[...]).sum()))(jnp.ones(3))
    assert gradient.tolist() == [0, 1, 2]
    assert ref[...].tolist() == [0, 1, 2]
