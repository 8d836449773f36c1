"""custom_vjp: the state goes through the forward rule; the user's backward rule is in force."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from tests.discharge.helpers import agree, equations

X = np.float32(0.5)


def counted_sin(n):
    """sin, which counts its calls in the ref `n`; its derivative is said to be 10 cos."""

    @jax.custom_vjp
    def f(x):
        n[...] += 1
        return jnp.sin(x)

    def forward(x):
        n[...] += 1
        return jnp.sin(x), x

    f.defvjp(forward, lambda x, ct: (10 * jnp.cos(x) * ct,))
    return f


@jax.custom_vjp
def multiply_by_ref(r, x):
    r[0] += 1
    return r[1] * x


def multiply_by_ref_fwd(r, x):
    out = multiply_by_ref(r, x)
    return out, (r[1], x)


def multiply_by_ref_bwd(residuals, ct):
    factor, x = residuals
    return jnp.stack([0.0, 100 * x * ct]), 100 * factor * ct


multiply_by_ref.defvjp(multiply_by_ref_fwd, multiply_by_ref_bwd)


def test_closed_over_and_counted():
    def plain(a, x):
        a += 2
        return np.sin(x) + np.sin(2 * x)

    pure = agree(lambda n, x: counted_sin(n)(x) + counted_sin(n)(2 * x), plain, [np.int32(0)], X)
    assert len(equations(pure, "custom_vjp_call")) == 2


def test_a_ref_operand():
    def plain(a, x):
        a[0] += 1
        return a[1] * x

    agree(multiply_by_ref, plain, [np.float32([1, 3])], X)


@pytest.mark.parametrize("jit", [False, True])
def test_the_users_rule_is_used_and_the_state_is_written_once(jit):
    pure = refs.functionalize(lambda state, x: counted_sin(state[0])(x))
    derivative = jax.grad(lambda x: pure([jnp.int32(5)], x), has_aux=True)
    slope, [n] = (jax.jit(derivative) if jit else derivative)(X)
    np.testing.assert_allclose(slope, 10 * np.cos(X), rtol=1e-6)
    assert n == 6


def test_derivatives_of_a_ref_operand():
    pure = refs.functionalize(lambda state, x: multiply_by_ref(state[0], x))
    gradients, [new] = jax.grad(pure, argnums=(0, 1), has_aux=True)([jnp.float32([1, 3])], X)
    np.testing.assert_array_equal(new, [2, 3])
    np.testing.assert_allclose(gradients[0][0], [0, 100 * X])
    np.testing.assert_allclose(gradients[1], 300)


def test_a_ref_that_is_only_read():
    def program(scale, x):
        @jax.custom_vjp
        def f(x):
            return scale[...] * x

        f.defvjp(lambda x: (f(x), scale[...]), lambda s, ct: (7 * s * ct,))
        return f(x)

    agree(program, lambda a, x: a * x, [np.float32(3)], X)
    pure = refs.functionalize(lambda s, x: program(s[0], x))
    assert jax.grad(lambda x: pure([jnp.float32(3)], x)[0])(X) == 21


def test_the_forward_rule_replaces_the_function():
    def program(state, x):
        [r] = state

        @jax.custom_vjp
        def f(x):
            r[...] = 1.0
            return x

        def forward(x):
            r[...] = 2.0
            return 3 * x, None

        f.defvjp(forward, lambda _, ct: (ct,))
        return f(x)

    pure = refs.functionalize(program)
    out, [r] = pure([jnp.float32(0)], X)
    assert (out, r) == (X, 1)
    (out, [r]), slope = jax.value_and_grad(lambda x: pure([jnp.float32(0)], x), has_aux=True)(X)
    assert (out, r, slope) == (3 * X, 2, 1)


def test_vmap_of_the_pure_function():
    pure = refs.functionalize(lambda state, x: counted_sin(state[0])(x))
    xs = np.linspace(0, 1, 3, dtype=np.float32)
    slopes = jax.vmap(jax.grad(lambda x: pure([jnp.int32(0)], x)[0]))(xs)
    np.testing.assert_allclose(slopes, 10 * np.cos(xs), rtol=1e-6)


def test_nondiff_argnums():
    def program(state, x):
        [r] = state

        @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
        def f(k, x):
            r[...] += k
            return x * k

        def forward(k, x):
            return f(k, x), x

        f.defvjp(forward, lambda k, x, ct: (50.0 * k * ct,))
        return f(2, x)

    def plain(a, x):
        a += 2
        return 2 * x

    agree(lambda r, x: program([r], x), plain, [np.float32(1)], X)
    pure = refs.functionalize(program)
    slope, [n] = jax.grad(lambda x: pure([jnp.float32(1)], x), has_aux=True)(X)
    assert (slope, n) == (100, 3)


def test_symbolic_zeros():
    seen = []

    def program(state, x, y):
        [r] = state

        @jax.custom_vjp
        def f(x, y):
            r[...] += x
            return x * y

        def forward(x, y):
            seen.append((x.perturbed, y.perturbed))
            r[...] += x.value
            return x.value * y.value, (x.value, y.value)

        def backward(residuals, ct):
            x, y = residuals
            return 3.0 * ct * y, 3.0 * ct * x

        f.defvjp(forward, backward, symbolic_zeros=True)
        return f(x, y)

    pure = refs.functionalize(program)
    slope, [r] = jax.grad(lambda x: pure([jnp.float32(1)], x, 4.0), has_aux=True)(X)
    assert (slope, r) == (12, 1.5)
    assert seen[-1] == (True, False)


def test_integer_arguments_and_results():
    @jax.custom_vjp
    def take(r, i, x):
        r[i] += x
        return r[i] * x, i + 1

    def forward(r, i, x):
        return take(r, i, x), None

    def backward(_, cts):
        return None, None, 6 * cts[0]

    take.defvjp(forward, backward)

    def plain(a, i, x):
        a[i] += x
        return a[i] * x, i + 1

    agree(take, plain, [np.float32([1, 2, 3])], np.int32(1), X)
    pure = refs.functionalize(lambda state, i, x: take(state[0], i, x))
    slope = jax.grad(lambda x: pure([jnp.float32([1, 2, 3])], jnp.int32(1), x)[0][0])(X)
    assert slope == 6


def test_trees_of_arguments_and_results():
    @jax.custom_vjp
    def f(pair, r):
        r[...] += pair["a"]
        return {"sum": pair["a"] + pair["b"], "r": r[...]}

    def forward(pair, r):
        return f(pair, r), pair["b"]

    def backward(b, cts):
        return {"a": 2 * cts["sum"], "b": 3 * b * cts["sum"]}, None

    f.defvjp(forward, backward)
    pure = refs.functionalize(lambda state, pair: f(pair, state[0]))

    def loss(pair):
        out, state = pure([jnp.float32(1)], pair)
        return out["sum"], state

    slopes, [r] = jax.grad(loss, has_aux=True)({"a": X, "b": 2 * X})
    assert (slopes["a"], slopes["b"], r) == (2, 3, 1.5)


@pytest.mark.parametrize("around", ["jit", "scan", "cond", "checkpoint"])
def test_within_other_primitives(around):
    def program(n, x):
        f = counted_sin(n)
        if around == "jit":
            return jax.jit(f)(x)
        if around == "checkpoint":
            return jax.checkpoint(f)(x)
        if around == "cond":
            return lax.cond(x > 0, f, lambda x: x, x)
        return lax.scan(lambda c, _: (f(c), None), x, length=2)[0]

    times = 2 if around == "scan" else 1

    def plain(a, x):
        a += times
        return np.sin(np.sin(x)) if times == 2 else np.sin(x)

    agree(program, plain, [np.int32(0)], X)
    pure = refs.functionalize(lambda state, x: program(state[0], x))
    slope, [n] = jax.grad(lambda x: pure([jnp.int32(0)], x), has_aux=True)(X)
    expected = 10 * np.cos(X) * (10 * np.cos(np.sin(X)) if times == 2 else 1)
    np.testing.assert_allclose(slope, expected, rtol=1e-5)
    assert n == times


def test_under_refs_jit_the_backward_rule_sees_the_state_of_the_forward_pass():
    scale = refs.new_ref(jnp.float32(3), name="scale")

    def program(state, x):
        [s] = state

        @jax.custom_vjp
        def f(x):
            s[...] += 1
            return s[...] * x

        def forward(x):
            s[...] += 1
            return s[...] * x, s[...]

        f.defvjp(forward, lambda residual, ct: (residual * ct,))
        return f(x)

    pure = refs.functionalize(program)

    @refs.jit
    def step(x):
        (out, [new]), slope = jax.value_and_grad(lambda x: pure([scale[...]], x), has_aux=True)(x)
        scale[...] = new
        return out, slope

    assert step(2.0) == (8, 4)
    assert step(2.0) == (10, 5)
    assert scale[...] == 5


def test_optimize_remat():
    def program(state, x):
        [r] = state

        @jax.custom_vjp
        def f(x):
            return x * 2

        f.defvjp(lambda x: (f(x), None), lambda _, ct: (20 * ct,), optimize_remat=True)
        r[...] = f(x)
        return r[...]

    pure = refs.functionalize(program)
    assert jax.grad(lambda x: pure([jnp.float32(1)], x)[0])(X) == 20


def test_a_ref_as_residual():
    def program(state, x):
        [r] = state

        @jax.custom_vjp
        def f(x):
            r[...] += 1
            return x

        def forward(x):
            mine = refs.new_ref(x, name="mine")
            return x, mine

        f.defvjp(forward, lambda residual, ct: (ct,))
        return f(x)

    pure = refs.functionalize(program)
    with pytest.raises(ValueError, match="ref `mine`"):
        jax.grad(lambda x: pure([jnp.float32(1)], x)[0])(X)
