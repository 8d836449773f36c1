"""Custom derivatives keep nothing alive: no ref, and no tracer of a trace that has ended."""

import gc
import itertools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs


# No forward rule of these calls its function, which would be a cycle of the user's.
def with_vjp():
    f = jax.custom_vjp(lambda x: x * x)
    f.defvjp(lambda x: (x * x, x), lambda x, g: (2 * x * g,))
    return f


def with_jvp():
    f = jax.custom_jvp(lambda x: x * x)
    f.defjvp(lambda p, t: (f(*p), 2 * p[0] * t[0]))
    return f


def vjp_that_reads(r):
    f = jax.custom_vjp(lambda x: x * x + r[0])
    f.defvjp(lambda x: (x * x, x), lambda x, g: (2 * x * g,))
    return f


def vjp_whose_backward_rule_reads(r):
    f = jax.custom_vjp(lambda x: x * x)
    f.defvjp(lambda x: (x * x, x), lambda x, g: (2 * x * g + 0 * r[0],))
    return f


MAKE = {
    "vjp": lambda r: with_vjp(),
    "vjp, reads": vjp_that_reads,
    "vjp, reads in the backward rule": vjp_whose_backward_rule_reads,
}
WAYS = {
    "grad": lambda lib, f: lambda xs: lib.grad(f)(xs[0]),
    "jit of grad": lambda lib, f: lambda xs: lib.jit(lib.grad(f))(xs[0]),
    "vjp": lambda lib, f: lambda xs: lib.vjp(f, xs[0])[1](jnp.float32(1)),
    "vmap of grad": lambda lib, f: lib.vmap(lib.grad(f)),
    "jit of vmap of grad": lambda lib, f: lib.jit(lib.vmap(lib.grad(f))),
    "grad of vmap": lambda lib, f: lib.grad(lambda xs: lib.vmap(f)(xs).sum()),
    "jit of grad of vmap": lambda lib, f: lib.jit(lib.grad(lambda xs: lib.vmap(f)(xs).sum())),
    "grad of grad": lambda lib, f: lambda xs: lib.grad(lib.grad(f))(xs[0]),
}
SIZES = itertools.count(20_011, 2)
XS = np.arange(3, dtype=np.float32)


@pytest.fixture
def _no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collection")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", MAKE)
def test_a_ref_goes_with_its_last_name(make, way):
    size = next(SIZES)

    def run():
        r = refs.new_ref(np.zeros(size, np.float32))
        f = MAKE[make](r)
        WAYS[way](refs, lambda x: f(x * 1.0) * r[1])(XS)
        return weakref.ref(r)

    handle = run()
    assert handle() is None
    assert not any(x.size == size for x in jax.live_arrays())


FUNCTIONS = {"relu": lambda: jax.nn.relu, "jvp": with_jvp, "vjp": with_vjp}
ALL_WAYS = {
    **WAYS,
    "vmap": lambda lib, f: lib.vmap(f),
    "jvp": lambda lib, f: lambda xs: lib.jvp(f, (xs[0],), (xs[1],)),
    "jit of jvp": lambda lib, f: lib.jit(lambda xs: lib.jvp(f, (xs[0],), (xs[1],))),
}


@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_tracer_leaks(function, way):
    if "grad" in way and "vmap" in way and not (function != "vjp" and way == "grad of vmap"):
        pytest.skip("see docs/semantics.md")
    if (function, way) == ("vjp", "vmap"):
        pytest.skip("see docs/semantics.md")
    if function == "vjp" and "jvp" in way:
        pytest.skip("JAX has no forward mode for custom_vjp")
    f = FUNCTIONS[function]()
    for lib in jax, refs:
        with jax.checking_leaks():
            ALL_WAYS[way](lib, lambda x: f(x * 1.0) * 1.0)(XS)


def test_a_backward_rule_may_ask_for_what_comes_later():
    """What isn't differentiated, as under JAX."""

    def program(x, c):
        later = []
        f = jax.custom_vjp(lambda x: x * x)
        f.defvjp(lambda x: (x * x, x), lambda x, g: (g * later[-1],))
        y = f(x)
        later.append(jnp.sin(c) + 1)
        return y * 1.0

    def mapped(lib):
        return lib.grad(lambda xs, c: lib.vmap(program, (0, None))(xs, c).sum())

    for lib in jax, refs:
        for f, x in (lib.grad(program), XS[0]), (mapped(lib), XS):
            expected = np.full_like(x, np.sin(1.0) + 1)
            np.testing.assert_allclose(f(x, XS[1]), expected, rtol=1e-6)
            np.testing.assert_allclose(lib.jit(f)(x, XS[1]), expected, rtol=1e-6)
