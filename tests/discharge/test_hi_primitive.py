"""`custom_root`, checkpoint and custom rules made of "hi" primitives, over refs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from tests import oracle
from tests.switches import switched_on

X = np.arange(1, 4, dtype=np.float32)
close = np.testing.assert_allclose


def newton(f, y):
    return lax.fori_loop(0, 30, lambda _, y: y - f(y) / (3 * y**2), y)


def cube_root(a, x, solve=newton):
    """The root of a y³ - x; `a` is a number or a ref."""
    scale = (lambda: a[0]) if isinstance(a, jax.Ref) else lambda: a
    return lax.custom_root(lambda y: scale() * y**3 - x, x, solve, lambda g, y: y / g(1.0))


def test_a_root_over_a_ref(jit):
    a = refs.new_ref(X)
    close(jit(lambda x: cube_root(a, x))(8.0), 2, rtol=1e-5)
    close(jit(refs.grad(lambda x: cube_root(a, x)))(8.0), 1 / 12, rtol=1e-5)
    close(jit(refs.vmap(lambda x: cube_root(a, x)))(jnp.array([8.0, 27.0])), [2, 3], rtol=1e-5)
    close(refs.fori_loop(0, 1, lambda i, x: cube_root(a, x), 8.0), 2, rtol=1e-5)


def test_the_derivative_of_a_root_with_respect_to_what_the_ref_holds(jit):
    wanted = jax.grad(lambda a, x: cube_root(a * 2, x), argnums=(0, 1))(1.5, 8.0)

    def through(a, x):
        held = refs.new_ref(jnp.zeros(3))
        held[0] = a * 2
        return cube_root(held, x)

    close(jit(refs.grad(through, argnums=(0, 1)))(1.5, 8.0), wanted, rtol=1e-4)

    def given(held, x):
        held[0] *= 2
        return cube_root(held, x)

    held = refs.new_ref(jnp.array([1.5, 0.0]))
    gradients = jit(refs.grad(given, argnums=(0, 1)))(held, 8.0)
    close(gradients[0], [wanted[0], 0], rtol=1e-4)
    close(gradients[1], wanted[1], rtol=1e-4)


def test_a_solver_that_counts(jit):
    a, count = refs.new_ref(X), refs.new_ref(0)

    def solve(f, y):
        count[...] += 1
        return newton(f, y)

    close(jit(lambda x: cube_root(a, x, solve))(8.0), 2, rtol=1e-5)
    close(jit(refs.grad(lambda x: cube_root(a, x, solve)))(8.0), 1 / 12, rtol=1e-5)
    assert count[...] == 2


SWITCHES = [f"jax_{name}3" for name in ("remat", "custom_vjp", "custom_jvp", "scan")]


def program(x, r):
    """Uses all that the switches are about, apart from refs."""

    @jax.custom_jvp
    def scaled(x):
        return x * 2

    scaled.defjvp(lambda x, t: (scaled(*x), t[0] * 5))

    @jax.custom_vjp
    def shifted(x):
        return x + 1

    shifted.defvjp(lambda x: (x + 1, None), lambda _, g: (g * 7,))
    y = jax.checkpoint(lambda x: shifted(scaled(jnp.sin(x))))(x * r[0])
    _, ys = lax.scan(lambda c, v: (c, v * y), 0, jnp.ones(2))
    r[1] = y
    return ys.sum()


@pytest.mark.parametrize("switch", SWITCHES)
def test_with_jax_as_it_will_be(switch):
    with switched_on(switch):
        for jit in (oracle.as_is, refs.jit):
            r = refs.new_ref(X)
            close(jit(program)(0.5, r), 2 * (2 * np.sin(0.5) + 1), rtol=1e-5)
            close(r[1], 2 * np.sin(0.5) + 1, rtol=1e-5)
            if switch == "jax_scan3" and jit is refs.jit:
                continue  # JAX traces it, whose `Scan3` has no gradient yet, and ignores `reverse`
            close(jit(refs.grad(program))(0.5, r), 2 * 7 * 5 * np.cos(0.5), rtol=1e-5)


def test_checkpoint_over_a_ref_as_it_will_be():
    with switched_on("jax_remat3"):
        r = refs.new_ref(X)

        def f(x):
            r[0] *= x
            return jnp.sin(r[0])

        close(refs.jit(jax.checkpoint(f))(2.0), np.sin(2), rtol=1e-5)
        close(refs.grad(jax.checkpoint(f))(2.0), 2 * np.cos(4), rtol=1e-5)
        assert r[0] == 4

        def read(r, x):
            return jnp.sin(r[0] * x)

        pure = refs.discharge(jax.make_jaxpr(jax.checkpoint(read))(jax.new_ref(X), 2.0))
        out, state = jax.extend.core.jaxpr_as_fun(pure)(X + 1, 2.0)
        close(out, np.sin(2 * (X[0] + 1)), rtol=1e-6)
        np.testing.assert_array_equal(state, X + 1)


def test_a_custom_rule_over_a_ref_as_it_will_be():
    with switched_on("jax_custom_vjp3"):
        r = refs.new_ref(X, name="r")

        @jax.custom_vjp
        def f(x):
            r[0] += 1
            return x * r[0]

        f.defvjp(lambda x: (f(x), None), lambda _, g: (g,))
        assert refs.jit(f)(2.0) == 4
        if jax.__version_info__ < (0, 12):
            with pytest.raises(refs.errors.MissingRuleError, match=r"CustomVJPTraced.*ref `r`"):
                refs.grad(f)(2.0)
            return
        assert refs.grad(f)(2.0) == 1
