"""What JAX 0.12 has and 0.10 hasn't, over refs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from tests.switches import switched_on

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX's newest")
close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
X = np.float32([0.5, -1.0, 2.0])

ORDERS = [
    {"enforce": True},
    {"enforce": True, "strict_in_out": True},
    {"enforce": False},
    {"enforce": False, "exclude_argnames": "x"},
    {"enforce": False, "exclude_argnames": ("r", "x")},
]


def updated(r, x):
    r[0] += x
    y = jnp.sin(r[1])
    r[1] = y * x
    return y + r[0]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_program_order(order, jit):
    ordered = pytest.importorskip("jax.experimental.overlap").program_order(updated, **order)
    results = []
    for f in (ordered, updated):
        r, rows = refs.new_ref(jnp.asarray(X)), refs.new_ref(jnp.stack([X, 2 * X]))
        out = [jit(f)(r, 2.0), refs.jit(refs.grad(f, (0, 1)))(r, 3.0)]
        out += [refs.jit(refs.vmap(f))(rows, jnp.arange(2.0)), rows[...]]
        loop = refs.jit(lambda x: lax.scan(lambda c, _: (f(r, c), c), x, length=3))  # noqa: B023
        results.append([out, loop(0.1), r[...]])
    jax.tree.map(close, *results)


def test_program_order_of_a_function_that_closes_over_a_ref(jit):
    program_order = pytest.importorskip("jax.experimental.overlap").program_order
    r = refs.new_ref(jnp.asarray(X))
    assert jit(program_order(lambda x: updated(r, x), enforce=True))(2.0) == np.sin(X[1]) + 2.5
    close(r[...], [2.5, np.sin(X[1]) * 2, 2])


def test_pinned_refs(jit):
    def f(x):
        made, empty = refs.new_ref(x, pin=True), refs.empty_ref(x, pin=True)
        empty[...] += made[...] * 2
        theirs = jax.ref.empty_ref(jax.ShapeDtypeStruct((3,), jnp.float32), pin=True)
        theirs[...] = empty[...]
        return theirs[...]

    close(refs.jit(f)(X), 2 * X)
    close(refs.jit(refs.grad(lambda x: f(x).sum()))(jnp.asarray(X)), [2, 2, 2])


def counting(n, **options):
    @jax.custom_vjp
    def f(x, y):
        n[...] += 1
        return x * n[...]

    def forward(x, y):
        return f(x, y), (n[...], y)

    f.defvjp(forward, lambda saved, g: (g * saved[0], g * saved[1]), **options)
    return f


def test_generic_batching(jit):
    n = refs.new_ref(jnp.float32(3))
    f = counting(n, generic_batching=True)
    assert jit(refs.grad(f, (0, 1)))(1.0, 2.0) == (4, 2)
    assert n[...] == 4
    each = refs.new_ref(jnp.float32([1, 2]))
    gradient = refs.vmap(lambda n, x: refs.grad(counting(n, generic_batching=True))(x, x))
    close(jit(gradient)(each, jnp.ones(2)), [2, 3])
    # The output depends on `x` alone, and is the same in all lanes.
    g = jax.custom_vjp(lambda x, y: x * 2)
    g.defvjp(lambda x, y: (x * 2 + 0 * y, y), lambda y, c: (c * 3, c * y), generic_batching=True)
    total = refs.new_ref(jnp.float32(0))

    def lane(x, y):
        total[...] += y
        return g(x, y)

    close(jit(refs.grad(lambda x: refs.vmap(lane, (None, 0), None)(x, X)))(1.0), 3)
    close(total[...], X.sum())


@pytest.mark.parametrize("switch", [None, "jax_custom_vjp3"])
def test_rules_that_accumulate(switch, jit):
    n = refs.new_ref(jnp.float32(1))

    @jax.custom_vjp
    def f(x, y):
        n[...] *= 2
        return x * y * n[...]

    def backward(saved, g, x_sum, y_sum):
        n[...] += 1
        x_sum.accum(g * saved[1] * 3)
        y_sum.accum(g * saved[0])

    f.defvjp_with_accums(lambda x, y: (f(x, y), (x, y)), backward)
    into = refs.new_ref(jnp.float32(1))

    def step(x, y):
        _, pullback = refs.vjp(f, x, y)
        return pullback.with_refs(into, jax.ad.GradValue())(1.0)[1]

    with switched_on(switch):
        assert jit(step)(2.0, 5.0) == 2
        assert (into[...], n[...]) == (16, 3)
        assert jit(refs.grad(f, (0, 1)))(2.0, 5.0) == (15, 2)
        assert n[...] == 7


def test_rules_for_checkpoints(jit):
    with switched_on("jax_custom_vjp3"), switched_on("jax_remat3"):
        scale = refs.new_ref(jnp.float32(2))
        f = jax.custom_vjp(lambda r, x: jnp.sin(x) * r[...])
        f.defremat(
            lambda r, x: (f(r, x), x),
            lambda x, r, _: (f(r, x), jnp.cos(x)),
            lambda saved, g: (None, 10 * g * saved),
        )
        close(jit(refs.grad(lambda x: f(scale, x)))(1.0), 10 * np.cos(1))
        for checkpoint in (jax.checkpoint, refs.checkpoint):
            gradient = jit(refs.grad(checkpoint(lambda x: f(scale, x))))
            close(gradient(1.0), 10 * np.cos(1))


def test_which_outputs_depend_on_the_primals(jit):
    w = refs.new_ref(jnp.asarray(X))
    _, pullback = refs.vjp(lambda w, x: (w[...] * x, 3.0, x), w, 2.0, in_nzs=(True, False))
    assert pullback.out_nzs == (True, False, False)
    of_w, of_x = pullback((jnp.ones(3), 1.0, 1.0))
    close(of_w, [2, 2, 2])
    assert of_x == 0


@pytest.mark.as_released
def test_freeze_at_top_level_copies_nothing():
    r = refs.new_ref(jnp.arange(1000.0))
    place = r.unsafe_buffer_pointer()
    assert refs.freeze(r).unsafe_buffer_pointer() == place


def test_views_of_other_memory_are_pallas():
    r = refs.new_ref(jnp.asarray(X))
    with pytest.raises(AttributeError, match=r"memory_space_cast.*refs.reshard"):
        r.at[:2].memory_space_cast(jax.memory.Space.Host)
