"""What derivative rules may close over: the values that they may under JAX, and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs

XS = np.arange(3, dtype=np.float32)


def with_rule(kind, k):
    """The square of `x`, with `k * x` for a derivative."""
    f = jax.custom_jvp(lambda x: x * x) if kind == "jvp" else jax.custom_vjp(lambda x: x * x)
    if kind == "jvp":
        f.defjvp(lambda p, t: (p[0] * p[0], t[0] * k * p[0]))
    elif kind == "forward":
        f.defvjp(lambda x: (x * x, k * x), lambda saved, g: (g * saved,))
    else:
        f.defvjp(lambda x: (x * x, x), lambda x, g: (g * k * x,))
    return f


def over_rows(lib, f, c):
    scan = jax.lax.scan if lib is jax else refs.scan
    return lambda xs: scan(lambda _, x: (None, f(x, c)), None, xs)[1].sum()


WAYS = {
    "grad": lambda lib, f: lib.grad(f)(XS[1], XS[2]),
    "grad of jit": lambda lib, f: lib.grad(lib.jit(f))(XS[1], XS[2]),
    "jit of grad": lambda lib, f: lib.jit(lib.grad(f))(XS[1], XS[2]),
    "grad of vmap": lambda lib, f: lib.grad(lambda xs: lib.vmap(lambda x: f(x, XS[2]))(xs).sum())(
        XS
    ),
    "vmap of grad": lambda lib, f: lib.vmap(lib.grad(f), (0, None))(XS, XS[2]),
    "grad of scan": lambda lib, f: lib.grad(over_rows(lib, f, XS[2]))(XS),
    "scan of grad": lambda lib, f: over_rows(lib, lib.grad(f), XS[2])(XS),
    "grad of checkpoint": lambda lib, f: lib.grad(lib.checkpoint(f))(XS[1], XS[2]),
}


def outcome(run):
    try:
        return np.asarray(run())
    except (TypeError, jax.errors.UnexpectedTracerError) as error:
        return type(error)


@pytest.mark.parametrize("touches", [False, True], ids=["no ref", "a ref"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["jvp", "forward", "backward"])
def test_as_under_jax(kind, way, touches):
    r = refs.new_ref(1.0)

    def program(lib):
        def f(x, c):
            if touches and lib is refs:
                r[...] = 1.0
            return with_rule(kind, jnp.sin(c) + 1)(x)

        return lambda: WAYS[way](lib, f)

    wanted, got = outcome(program(jax)), outcome(program(refs))
    if isinstance(wanted, type):
        assert isinstance(got, type), got
    else:
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.parametrize("touches", [False, True], ids=["no ref", "a ref"])
@pytest.mark.parametrize(
    "within",
    [lambda f: f, jax.jit, refs.jit, refs.vmap],
    ids=["once", "jax.jit", "refs.jit", "vmap"],
)
def test_a_zero_tangent_stays_symbolic(within, touches, jit):
    """From one rule to the next, where refs are touched, too."""
    r = refs.new_ref(1.0)

    @jax.custom_jvp
    def second(x, y):
        return y * r[...] if touches else y

    def rule(primals, tangents):
        assert isinstance(tangents[1], jax.custom_derivatives.SymbolicZero)
        return second(*primals), tangents[1]

    second.defjvp(rule, symbolic_zeros=True)
    f = within(lambda x: second(x, second(x, 2.0)))
    x = jnp.ones(3) if within is refs.vmap else jnp.float32(1)
    out = jit(lambda x: refs.jvp(f, (x,), (x,)))(x)
    np.testing.assert_array_equal(out[0], 2 * x)
    np.testing.assert_array_equal(out[1], 0 * x)


@pytest.mark.parametrize("kind", ["jvp", "forward", "backward"])
def test_a_literal_of_the_trace(kind):
    def mapped(lib):
        def f(x):
            return with_rule(kind, jax.jit(lambda: 2.0)())(x)

        return lib.grad(lambda xs: lib.vmap(f)(xs).sum())

    np.testing.assert_allclose(mapped(refs)(XS), mapped(jax)(XS))


@pytest.mark.parametrize("counts", [False, True], ids=["no ref", "a ref beside"])
def test_over_an_argument_of_an_inner_jit(counts):
    """JAX drops the value that is of a trace which has ended, as the gradient doesn't need it.

    (Outside of a `jit` it refuses the program.)
    """
    n = refs.new_ref(0)

    def f(x):
        def inner(x, k):
            h = jax.custom_jvp(lambda x: x * k)
            h.defjvp(lambda p, t: (h(*p), 2.0 * t[0]))
            return h(x)

        if counts:
            n[...] += 1
        return jax.jit(inner)(x, 5.0)

    for lib in (refs,) if counts else (jax, refs):
        assert refs.jit(lib.grad(f))(3.0) == 2
    assert n[...] == counts
