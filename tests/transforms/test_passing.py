"""JAX's functions that take pytrees and return what they are given: refs among it stay refs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import refs
from refs.errors import MissingRuleError, RefTypeError
from tests.errors.case import X

PASSING = {
    "stop_gradient": lax.stop_gradient,
    "twice": lambda tree: lax.stop_gradient(lax.stop_gradient(tree)),
    "checkpoint_name": lambda tree: jax.tree.map(lambda x: checkpoint_name(x, "x"), tree),
    "block_until_ready": jax.block_until_ready,
    "tree.map": lambda tree: jax.tree.map(lambda x: x, tree),
}
each = pytest.mark.parametrize("passing", PASSING.values(), ids=PASSING)


def bump(passing, ref, x):
    tree = passing({"ref": ref, "x": x})
    same = tree["ref"]
    same[0] += tree["x"]
    ref[0] *= 2
    same.at[1].add(same[0])
    return same[1]


@each
@pytest.mark.parametrize("jit", [lambda f: f, refs.jit, jax.jit], ids=["eager", "refs", "jax"])
def test_a_ref_that_is_passed_on_is_the_same(passing, jit):
    ref = refs.new_ref(X)
    out = jit(lambda r, x: bump(passing, r, x))(ref, 3.0)
    assert out == 7
    np.testing.assert_array_equal(ref[...], [6, 7, 2])


@each
def test_in_transformations_and_loops(passing):
    ref = refs.new_ref(X)
    gradient = refs.grad(lambda x: bump(PASSING["tree.map"], passing(ref), x))
    assert gradient(3.0) == 2
    np.testing.assert_array_equal(ref[...], [6, 7, 2])

    rows = refs.new_ref(jnp.stack([X, X]))
    refs.vmap(lambda r, x: bump(passing, r, x))(rows, jnp.full(2, 3.0))
    np.testing.assert_array_equal(rows[...], [[6, 7, 2]] * 2)

    total = refs.new_ref(0.0)
    refs.vmap(lambda x: passing(total).at[...].add(x + 0))(X)
    assert total[...] == 3

    refs.fori_loop(0, 3, lambda i, c: passing(total).at[...].add(1.0), None)
    refs.jit(lambda: lax.scan(lambda c, x: (c, passing(total).at[...].add(x)), 0, X))()
    refs.jit(lambda: refs.jit(lambda r: r.at[...].add(1.0))(passing(total)))()
    assert total[...] == 10


@each
def test_returned_it_is_the_argument(passing):
    ref = refs.new_ref(X)
    assert refs.jit(passing)({"r": ref})["r"] is ref
    assert refs.jit(lambda: passing([ref]))() == [ref]


@each
def test_what_is_not_used_does_no_harm(passing):
    ref = refs.new_ref(X)
    out = refs.jit(lambda r: passing({"r": r, "x": r[1]})["x"])(ref)
    assert out == 1
    np.testing.assert_array_equal(ref[...], X)


def test_the_gradient_of_a_value_is_still_stopped():
    ref = refs.new_ref(1.0)

    def f(x):
        ref[...] = x
        return lax.stop_gradient({"r": ref, "x": x * 2})["x"] * ref[...]

    assert refs.grad(f)(3.0) == 6


def test_what_only_looks_at_types():
    ref = refs.new_ref(X)
    for jit in (lambda f: f, refs.jit):
        seen = []
        jit(lambda r: seen.extend([jax.typeof(r), jnp.shape(r), jnp.ndim(r), r.dtype]))(ref)  # noqa: B023
        assert seen == [jax.typeof(ref), (3,), 1, np.float32]


def test_another_name_that_jax_makes_is_refused():
    ref = refs.new_ref(X)
    with pytest.raises(MissingRuleError, match=r"`device_put` .* takes a ref .*: read the ref"):
        refs.jit(lambda r: jax.device_put(r)[...])(ref)
    with pytest.raises(RefTypeError, match="takes arrays only"):
        refs.vmap(lambda x: jax.device_put(ref)[...] + x)(X)


@pytest.mark.parametrize("wrap", [refs.checkpoint, refs.jit])
def test_a_wrapper_inside_that_closes_over_what_is_given(wrap, jit):
    """A trace in which the two are one serves no call in which they aren't."""
    a, b = refs.new_ref(X), refs.new_ref(10 * X)

    @wrap
    def program(given):
        given[...] += 1
        return refs.grad(lambda w: (w[...] ** 2).sum())(a)

    for given, n in ((a, 1), (b, 1), (a, 2), (b, 2)):
        np.testing.assert_array_equal(jit(program)(given), 2 * (X + n))
        np.testing.assert_array_equal(given[...], (X if given is a else 10 * X) + n)
