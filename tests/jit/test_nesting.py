"""refs.jit inside itself and inside JAX's transformations, and under JAX's settings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs

X = np.arange(4, dtype=np.float32)


def ref(name=None):
    return refs.new_ref(X, name=name)


def holds(r, *values):
    np.testing.assert_array_equal(np.array(r[...]), np.float32(values))


# --- Nesting --------------------------------------------------------------------------------------


def test_two_names_of_a_ref_are_one_ref_in_wrappers_inside():
    """JAX's own functions take them for two: see `test_passed_and_closed_over`."""
    r = ref()

    def lanes(same):
        def lane(a, b):
            b[...] += 10
            a[...] = 1

        refs.vmap(lane)(same, r)

    refs.jit(lanes)(r)
    holds(r, 1, 1, 1, 1)

    def gradient(same):
        def f(x):
            r[0] += 1
            same[0] *= 2
            return same[0] * x

        return refs.grad(f)(3.0)

    def gradient_of_a_ref(same):
        return refs.grad(lambda a: r[1] * a[1])(same)[1]

    assert refs.jit(gradient_of_a_ref)(r) == 2
    assert refs.jit(gradient)(r) == 4
    holds(r, 4, 1, 1, 1)

    def reads(same):
        def lane():
            r[...] = jnp.zeros(4)
            return same[0]

        return refs.vmap(lane, axis_size=2)()

    assert refs.jit(refs.jit(reads))(r).tolist() == [0, 0]


@refs.jit
def bump(r, x):
    r[0] += x
    return r[0]


def test_in_itself():
    @refs.jit
    def inner(a, b, x):
        return bump(a, x) + bump(b, x) + bump(a, x)

    @refs.jit
    def outer(a, x):
        return inner(a, a, x) + inner(b, a, x), refs.jit(lambda: b)()

    a, b = ref(), ref()
    for _ in range(2):
        a[...], b[...] = X, X
        total, same = outer(a, 1.0)
        assert total == (1 + 2 + 3) + (1 + 4 + 2)
        assert same is b
        holds(a, 4, 1, 2, 3)
        holds(b, 2, 1, 2, 3)


def test_a_nested_call_returns_its_argument_and_new_refs():
    @refs.jit
    def inner(r):
        return r, refs.new_ref(r[...] * 2)

    @refs.jit
    def outer(r):
        same, new = inner(r)
        assert same is r
        new[0] = 7
        same[1] = 50
        return new, same

    r = ref()
    new, same = outer(r)
    assert same is r
    holds(new, 7, 2, 4, 6)
    holds(r, 0, 50, 2, 3)


def test_a_nested_call_with_static_arguments_and_name():
    inner = refs.jit(lambda r, n: r.at[n].set(9), static_argnums=1)
    r = ref()
    outer = refs.jit(lambda: (inner(r, 1), bump(r, 1.0)))
    assert "bump" in outer.lower().as_text(debug_info=True)
    outer()
    holds(r, 1, 9, 2, 3)


def test_in_jax_jit():
    r = ref()

    @jax.jit
    def outer(passed, x):
        return bump(passed, x) + bump(r, x)

    other = ref()
    assert outer(other, 2.0) == 4
    assert outer(other, 2.0) == 8
    holds(r, 4, 1, 2, 3)
    holds(other, 4, 1, 2, 3)


@pytest.mark.parametrize("outer", [jax.jit, refs.jit])
def test_in_bodies_of_control_flow(outer):
    r = ref()

    @outer
    def program(n):
        lax.scan(lambda c, x: (c, bump(r, x)), None, jnp.ones(2))
        lax.while_loop(lambda c: c < n, lambda c: c + bump(r, 1.0) * 0 + 1, 0.0)
        lax.cond(n > 1, lambda: bump(r, 10.0), lambda: 0.0)
        return lax.fori_loop(0, 2, lambda i, c: c + bump(r, 1.0), 0.0)

    assert program(3.0) == 16 + 17
    holds(r, 17, 1, 2, 3)


def test_in_native_control_flow_without_a_jit():
    r = ref()
    lax.scan(lambda c, x: (c, bump(r, x)), None, jnp.ones(2))
    lax.cond(True, lambda: bump(r, 10.0), lambda: 0.0)
    holds(r, 12, 1, 2, 3)


def test_in_native_vmap_and_grad():
    r = ref()
    read = refs.jit(lambda x: x * r[1:3].sum())
    np.testing.assert_array_equal(jax.vmap(read)(X), X * 3)
    assert jax.grad(lambda x: read(x) ** 2)(2.0) == 36
    # A ref that is mapped with the lanes can be written.
    table = refs.new_ref(X.reshape(2, 2))
    jax.vmap(bump)(table, jnp.float32([10, 20]))
    np.testing.assert_array_equal(table[...], [[10, 1], [22, 3]])


def multiply_by_index(mine, x):
    mine[...] *= x


def multiply_by_view(mine, x):
    mine.at[...].multiply(x)


@pytest.mark.parametrize("multiply", [multiply_by_index, multiply_by_view])
def test_a_ref_made_in_a_function_that_jax_differentiates(multiply):
    def local(x):
        mine = refs.new_ref(x)
        refs.jit(lambda: multiply(mine, x))()
        return mine[...]

    assert jax.grad(local)(3.0) == 6


def test_native_transformations_inside():
    r = ref()

    @refs.jit
    def step(x):
        r[...] -= 0.5 * jax.grad(lambda w: jnp.sum(w**2) * x)(r[...])
        r[0] = jnp.sum(jax.vmap(lambda v: v * x)(r[...]))

    step(0.5)
    holds(r, 1.5, 0.5, 1, 1.5)


# --- JAX's settings -------------------------------------------------------------------------------


def test_disable_jit():
    r = ref()
    step = refs.jit(lambda x: (r.at[0].add(x), float(x))[1])
    with jax.disable_jit():
        assert step(2.0) == 2.0
        holds(r, 2, 1, 2, 3)
        new = refs.jit(lambda q: q)(r)
        assert new is r


def many_things(r, x):
    lax.fori_loop(0, 3, lambda i, _: r.at[i].add(x), None)
    lax.cond(x > 0, lambda: bump(r, x), lambda: 0.0)
    jax.checkpoint(r.at[1].add)(x)
    new = refs.new_ref(r[...])
    new[0] = r[1]
    return new, r, new[...]


@pytest.mark.parametrize(
    "setting", ["jax_check_tracer_leaks", "jax_debug_nans", "jax_enable_checks"]
)
def test_checks_that_jax_can_make(setting):
    r = ref()
    old = getattr(jax.config, setting)
    jax.config.update(setting, True)
    try:
        step = refs.jit(many_things)
        for k in range(2):
            new, same, _ = step(r, 1.0)
            assert same is r
            np.testing.assert_array_equal(r[:3], [2 * k + 2, 2 * k + 3, k + 3])
            assert new[0] == r[1]
        r[0] += 1
        refs.functionalize(lambda state, x: many_things(state, x)[2])(X, 1.0)
    finally:
        jax.config.update(setting, old)


def test_debug_nans_finds_them_and_loses_nothing():
    r = ref()
    step = refs.jit(lambda: r.at[0].set(r[0] / r[0]))
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        step()
    assert r.shape == (4,)
    holds(r, 0, 1, 2, 3)


def test_checking_leaks():
    r = ref()
    with jax.checking_leaks():
        refs.jit(many_things)(r, 1.0)
    holds(r, 2, 3, 3, 3)


def test_a_scan_at_top_level_leaks_nothing():
    r = ref()
    with jax.checking_leaks():
        total, _ = refs.scan(lambda total, x: (total + x[...], None), 0.0, r)
    assert total == 6


def test_a_product_at_traced_indices_leaks_nothing():
    r = ref()

    def product(i, y):
        r.at[i].multiply(y)
        return r[...].sum()

    with jax.checking_leaks():
        refs.jit(product)(jnp.array([1, 1]), 2.0)
        refs.jit(refs.grad(product, 1))(jnp.array([3, 3]), 2.0)
    holds(r, 0, 4, 2, 12)


def test_x64():
    step = refs.jit(lambda r, x: (r.at[...].add(x), r[...])[1])
    with jax.enable_x64(True):
        r = refs.new_ref(np.arange(3.0))
        assert r.dtype == "float64"
        assert step(r, 1e-12).dtype == "float64"
        assert r[1] - 1 == pytest.approx(1e-12, rel=1e-3)
        i = refs.new_ref(np.arange(3))
        i[np.int64(1)] = 2**40
        refs.jit(lambda k: i.at[k].add(1))(1)
        assert i[1] == 2**40 + 1
    small = refs.new_ref(np.arange(3.0))
    assert step(small, 1.0).dtype == "float32"


def test_prng_keys():
    keys = refs.new_ref(jax.random.split(jax.random.key(0), 3), name="keys")

    @refs.jit
    def step(i):
        keys[i], use = jax.random.split(keys[i])
        old = refs.swap(keys, 0, use)
        return jax.random.normal(use), old

    expected = jax.random.split(jax.random.key(0), 3)
    for i in (1, 2):
        value, old = step(i)
        new, use = jax.random.split(expected[i])
        assert value == jax.random.normal(use)
        np.testing.assert_array_equal(jax.random.key_data(old), jax.random.key_data(expected[0]))
        expected = expected.at[i].set(new).at[0].set(use)
        np.testing.assert_array_equal(jax.random.key_data(keys[...]), jax.random.key_data(expected))
