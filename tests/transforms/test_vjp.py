"""`refs.vjp`, and what its pullback does with refs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs

W = np.array([1.0, 2.0], np.float32)


@pytest.fixture
def w():
    return refs.new_ref(W, name="w")


def product(w, x):
    w[0] += 1
    return {"out": w[...] * x}


def test_output_and_pullback(w):
    out, pullback = refs.vjp(product, w, 3.0)
    np.testing.assert_array_equal(out["out"], [6, 6])
    np.testing.assert_array_equal(w[...], [2, 2])
    ct_w, ct_x = pullback({"out": jnp.array([1.0, 10.0])})
    np.testing.assert_array_equal(ct_w, [3, 30])
    assert ct_x == 22
    assert pullback({"out": jnp.zeros(2)})[1] == 0


def test_auxiliary_data(w):
    out, _, aux = refs.vjp(lambda x: (x * 2, w), 1.0, has_aux=True)
    assert out == 2
    assert aux is w


def test_gradients_into_refs(jit, w):
    into = refs.new_ref(jnp.ones(2))

    @jit
    def step(w, x):
        _, pullback = refs.vjp(product, w, x)
        _, ct_x = pullback.with_refs(into, jax.ad.GradValue())({"out": jnp.ones(2)})
        return ct_x

    for k in (1, 2):
        assert step(w, 3.0) == 3 + k
        np.testing.assert_array_equal(into[...], 1 + 3 * k * np.ones(2))


def scanned(w):
    return lax.scan(lambda c, x: (c * x + w.sum(), None), jnp.float32(1), w)[0]


ONCE_AND_ROW_BY_ROW = {
    "scan": scanned,
    "in a jit": jax.jit(scanned),
    "a jit's two arguments": lambda w: jax.jit(
        lambda a, b: lax.scan(lambda c, x: (c * x + a.sum(), None), jnp.float32(1), b)[0]
    )(w, w),
    "in a loop": lambda w: lax.fori_loop(0, 2, lambda i, c: c + scanned(w), jnp.float32(0)),
    "in a checkpoint": jax.checkpoint(scanned),
}


@pytest.mark.parametrize("f", ONCE_AND_ROW_BY_ROW.values(), ids=ONCE_AND_ROW_BY_ROW)
def test_an_array_that_a_scan_takes_whole_and_row_by_row(f, jit):
    """JAX refuses to accumulate its gradient into a ref."""
    w, into, other = np.float32([1, 2, 3]), refs.new_ref(jnp.ones(3)), refs.new_ref(jnp.float32(1))

    def step(w, x):
        _, pullback = refs.vjp(lambda w, x: f(w) * x, w, x)
        return pullback.with_refs(into, other)(2.0)

    jit(step)(w, jnp.float32(3))
    np.testing.assert_allclose(into[...], 1 + 6 * jax.grad(f)(w), rtol=1e-6)
    np.testing.assert_allclose(other[...], 1 + 2 * f(w), rtol=1e-6)


def test_what_became_of_each_cotangent(w):
    _, pullback = refs.vjp(product, w, 3.0)
    into = refs.new_ref(jnp.zeros(2))
    said = pullback.with_refs(into, jax.ad.DontWant())({"out": jnp.ones(2)})
    assert said == (jax.ad.GradRef(), jax.ad.DidntWant())
    np.testing.assert_array_equal(into[...], [3, 3])


def test_gradients_of_parts_into_refs(w):
    into = refs.new_ref(jnp.zeros(()))
    _, pullback = refs.vjp(lambda a, b: a.get() * b.get(), w.at[0], w.at[1])
    said = pullback.with_refs(into, jax.ad.GradValue())(1.0)
    assert into[...] == 2
    assert said == (jax.ad.GradRef(), 1)


def test_gradients_into_refs_under_loops():
    table = refs.new_ref(jnp.arange(4.0))
    into = refs.new_ref(jnp.zeros(4))

    def loss(table, picks):
        def step(total, i):
            return total + table[i] ** 2, None

        return jax.lax.scan(step, 0.0, picks)[0]

    picks = jnp.array([1, 3, 3])
    _, pullback = refs.vjp(lambda table: loss(table, picks), table)
    pullback.with_refs(into)(1.0)
    np.testing.assert_array_equal(into[...], [0, 2, 0, 12])


def test_a_pullback_is_a_pytree(w):
    _, pullback = refs.vjp(product, w, 3.0)
    apply = jax.jit(lambda pullback, ct: pullback({"out": ct}))
    np.testing.assert_array_equal(apply(pullback, jnp.ones(2))[0], [3, 3])
    before = jax.tree.structure(pullback)
    pullback({"out": jnp.ones(2)})
    assert jax.tree.structure(pullback) == before  # It holds nothing more after a call.


def test_inside_a_transformation(w):
    def program(x):
        out, pullback = refs.vjp(product, w, x)
        _, ct_x = pullback({"out": out["out"]})
        return ct_x

    # ct_x = x |w|^2, after the one write.
    assert refs.grad(program)(3.0) == 8
    assert w[0] == 2
    got = refs.vmap(lambda w, x: refs.vjp(product, w, x)[1]({"out": jnp.ones(2)}))(
        refs.new_ref(np.stack([W, W])), jnp.array([1.0, 2.0])
    )
    np.testing.assert_array_equal(got[0], [[1, 1], [2, 2]])
    np.testing.assert_array_equal(got[1], [4, 4])


@pytest.mark.parametrize("index", [jnp.array([1, 0]), 1])
def test_a_pullback_of_a_view_leaves_its_trace(index):
    def program(w, i):
        return refs.vjp(lambda v: (v[...] ** 2).sum(), w.at[i])[1]

    w = refs.new_ref(W)
    [ct] = refs.jit(program)(w, index)(1.0)
    np.testing.assert_array_equal(ct, 2 * W[np.array(index)])
    rows = refs.vmap(lambda i: program(w, i)(1.0)[0])(jnp.array([1, 0, 1]))
    np.testing.assert_array_equal(rows, 2 * W[[1, 0, 1]])


def test_a_view_of_nothing():
    empty = refs.new_ref(jnp.zeros((0, 3)))
    assert refs.jacrev(lambda v: v[...].sum())(empty.at[:, 1]).shape == (0,)


def test_residuals_that_rules_save():
    @jax.custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (x, {"saved": x}), lambda saved, ct: (ct * saved["saved"],))
    r = refs.new_ref(2.0)
    _, theirs = jax.vjp(f, 3.0)
    _, ours = refs.vjp(lambda x: (r.addupdate(1.0), f(x))[1], 3.0)
    if not hasattr(theirs, "structured_residuals"):
        pytest.skip("the newest JAX's")
    assert str(ours.structured_residuals) == str(theirs.structured_residuals)
