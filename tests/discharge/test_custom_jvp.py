"""custom_jvp: the state goes through the function, and the user's rule stays in force."""

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

    @jax.custom_jvp
    def f(x):
        n[...] += 1
        return jnp.sin(x)

    @f.defjvp
    def f_jvp(primals, tangents):
        [x], [t] = primals, tangents
        return f(x), 10 * jnp.cos(x) * t

    return f


@jax.custom_jvp
def multiply_by_ref(r, x):
    r[0] += 1
    return r[1] * x


@multiply_by_ref.defjvp
def multiply_by_ref_jvp(primals, tangents):
    r, x = primals
    dr, dx = tangents
    out = multiply_by_ref(r, x)
    return out, 100 * (r[1] * dx + dr[1] * x)


def test_closed_over_and_counted():
    def plain(a, x):
        a += 2
        return np.sin(x) + np.sin(2 * x)

    pure = agree(lambda n, x: counted_sin(n)(x) + counted_sin(n)(2 * x), plain, [np.int32(0)], X)
    assert len(equations(pure, "custom_jvp_call")) == 2


def test_a_ref_operand():
    def plain(a, x):
        a[0] += 1
        return a[1] * x

    agree(multiply_by_ref, plain, [np.float32([1, 3])], X)


def test_a_ref_that_is_only_read():
    def program(scale, x):
        @jax.custom_jvp
        def f(x):
            return scale[...] * x

        f.defjvp(lambda p, t: (f(*p), 7 * scale[...] * t[0]))
        return f(x)

    agree(program, lambda a, x: a * x, [np.float32(3)], X)
    pure = refs.functionalize(lambda s, x: program(s[0], x))
    assert jax.grad(lambda x: pure([jnp.float32(3)], x)[0])(X) == 21


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("differentiate", [jax.grad, jax.jacfwd], ids=["grad", "jacfwd"])
def test_the_users_rule_is_used_and_the_state_is_written_once(differentiate, jit):
    pure = refs.functionalize(lambda state, x: counted_sin(state[0])(x))

    def loss(x):
        return pure([jnp.int32(5)], x)

    derivative = differentiate(loss, has_aux=True)
    if jit:
        derivative = jax.jit(derivative)
    slope, [n] = derivative(X)
    np.testing.assert_allclose(slope, 10 * np.cos(X), rtol=1e-6)
    assert n == 6


def test_the_rule_of_a_rule():
    pure = refs.functionalize(lambda state, x: counted_sin(state[0])(x))
    second, [n] = jax.hessian(lambda x: pure([jnp.int32(0)], x), has_aux=True)(X)
    np.testing.assert_allclose(second, -10 * np.sin(X), rtol=1e-6)
    assert n == 1


def test_derivatives_of_a_ref_operand():
    pure = refs.functionalize(lambda state, x: multiply_by_ref(state[0], x))
    state, x = [jnp.float32([1, 3])], X
    (_, new), (slope, new_tangent) = jax.jvp(
        pure, (state, x), ([jnp.float32([0, 1])], jnp.float32(0))
    )
    np.testing.assert_array_equal(new[0], [2, 3])
    np.testing.assert_allclose(slope, 100 * x)
    np.testing.assert_array_equal(new_tangent[0], [0, 1])
    of_state, of_x = jax.grad(lambda s, x: pure(s, x)[0], argnums=(0, 1))(state, x)
    np.testing.assert_allclose(of_state[0], [0, 100 * x])
    np.testing.assert_allclose(of_x, 100 * 3)


def test_vmap_of_the_pure_function():
    pure = refs.functionalize(lambda state, x: counted_sin(state[0])(x))
    xs = np.linspace(0, 1, 3, dtype=np.float32)
    slopes = jax.vmap(jax.grad(lambda x: pure([jnp.int32(0)], x)[0]))(xs)
    np.testing.assert_allclose(slopes, 10 * np.cos(xs), rtol=1e-6)


def test_nondiff_argnums():
    @functools.partial(jax.custom_jvp, nondiff_argnums=(0, 2))
    def power(n, x, name):
        return x**n

    @power.defjvp
    def power_jvp(n, name, primals, tangents):
        assert name == "cube"
        return power(n, *primals, name), 5.0 * n * tangents[0]

    def program(state, x):
        state[0][...] = power(3, x, "cube")
        return state[0][...]

    agree(lambda r, x: program([r], x), assign_cube, [np.float32(1)], X)
    pure = refs.functionalize(program)
    assert jax.grad(lambda x: pure([jnp.float32(1)], x)[0])(X) == 15


def assign_cube(a, x):
    a[...] = x**3
    return a.copy()


def test_nondiff_argnums_and_a_closed_over_ref():
    def program(state, x):
        @functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
        def f(x, k):
            state[0][...] += k
            return x * k

        @f.defjvp
        def f_jvp(k, primals, tangents):
            return f(primals[0], k), 50.0 * k * tangents[0]

        return f(x, 2)

    def plain(a, x):
        a += 2
        return x * 2

    agree(lambda r, x: program([r], x), plain, [np.float32(1)], X)
    pure = refs.functionalize(program)
    slope, [n] = jax.grad(lambda x: pure([jnp.float32(1)], x), has_aux=True)(X)
    assert (slope, n) == (100, 3)


def test_symbolic_zeros():
    seen = []

    def program(state, x, y):
        [r] = state

        def f(x, y):
            r[...] += x
            return x * y

        f = jax.custom_jvp(f)

        def f_jvp(primals, tangents):
            x, y = primals
            dx, dy = tangents
            zeros = [type(t).__name__ == "SymbolicZero" for t in tangents]
            seen.append(zeros)
            out = f(x, y)
            return out, 3.0 * (0 if zeros[0] else dx * y) + 3.0 * (0 if zeros[1] else x * dy)

        f.defjvp(f_jvp, symbolic_zeros=True)
        return f(x, y)

    pure = refs.functionalize(program)
    slope, [r] = jax.grad(lambda x: pure([jnp.float32(1)], x, 4.0), has_aux=True)(X)
    assert (slope, r) == (12, 1.5)
    assert seen[-1] == [False, True]


def test_integer_arguments_and_results():
    @jax.custom_jvp
    def take(r, i, x):
        r[i] += x
        return r[i] * x, i + 1

    @take.defjvp
    def take_jvp(primals, tangents):
        r, i, x = primals
        _, _, dx = tangents
        out = take(r, i, x)
        return out, (6 * dx, np.zeros((), jax.dtypes.float0))

    def plain(a, i, x):
        a[i] += x
        return a[i] * x, i + 1

    agree(take, plain, [np.float32([1, 2, 3])], np.int32(1), X)
    pure = refs.functionalize(lambda state, i, x: take(state[0], i, x))
    slope = jax.grad(lambda x: pure([jnp.float32([1, 2, 3])], jnp.int32(1), x)[0][0])(X)
    assert slope == 6


def test_an_integer_state_and_a_float_state():
    def program(state, x):
        count, total = state

        @jax.custom_jvp
        def f(x):
            count[...] += 1
            total[...] += x
            return total[...] * x

        f.defjvp(lambda p, t: (f(*p), 2 * t[0]))
        return f(x) + f(x)

    pure = refs.functionalize(program)
    slope, (count, total) = jax.grad(
        lambda x: pure([jnp.int32(0), jnp.float32(0)], x), has_aux=True
    )(X)
    assert (slope, count, total) == (4, 2, 1)


@pytest.mark.parametrize("around", ["jit", "scan", "cond", "checkpoint", "while"])
def test_within_other_primitives(around):
    def program(n, x):
        f = counted_sin(n)
        if around == "jit":
            return jax.jit(f)(x)
        if around == "checkpoint":
            return jax.checkpoint(f)(x)
        if around == "cond":
            return lax.cond(x > 0, f, lambda x: x, x)
        if around == "while":
            return lax.while_loop(lambda x: n[...] < 3, f, x)
        return lax.scan(lambda c, _: (f(c), None), x, length=2)[0]

    def plain(a, x):
        for _ in range({"scan": 2, "while": max(0, 3 - int(a))}.get(around, 1)):
            a += 1
            x = np.sin(x)
        return x

    agree(program, plain, [np.int32(0)], X)
    pure = refs.functionalize(lambda state, x: program(state[0], x))
    _, slope = jax.jvp(lambda x: pure([jnp.int32(0)], x)[0], (X,), (1.0,))
    at, expected = float(X), 1.0
    for _ in range({"scan": 2, "while": 3}.get(around, 1)):
        expected *= 10 * np.cos(at)
        at = np.sin(at)
    np.testing.assert_allclose(slope, expected, rtol=1e-5)


def test_a_rule_that_writes_what_the_function_only_reads():
    def program(state, x):
        [r] = state

        @jax.custom_jvp
        def f(x):
            return r[...] * x

        @f.defjvp
        def f_jvp(primals, tangents):
            r[...] = 0.0
            return f(*primals), tangents[0]

        return f(x)

    pure = refs.functionalize(program)
    with pytest.raises(refs.errors.RefStateError, match="custom rule may not write it either"):
        jax.grad(lambda x: pure([jnp.float32(1)], x)[0])(X)


def test_symbolic_zeros_that_a_rule_returns():
    """They are zeros of the outputs' tangent types: float0 for integers."""
    zero = jax.custom_derivatives.SymbolicZero.from_primal_value

    @jax.custom_jvp
    def f(r, x):
        return r[...] * x, jnp.int32(3), x

    @functools.partial(f.defjvp, symbolic_zeros=True)
    def f_jvp(primals, tangents):
        [r, x], [_, t] = primals, tangents
        return (r[...] * x, jnp.int32(3), x), (r[...] * t, zero(jnp.int32(3)), zero(x))

    r = refs.new_ref(jnp.float32(2))
    for wrap in (lambda f: f, refs.jit):
        out, tangents = wrap(lambda x: refs.jvp(lambda x: f(r, x), (x,), (1.0,)))(3.0)
        assert [float(y) for y in out] == [6, 3, 3]
        assert [t.dtype for t in tangents] == [jnp.float32, jax.dtypes.float0, jnp.float32]
        assert [float(tangents[0]), float(tangents[2])] == [2, 0]
