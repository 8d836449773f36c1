"""The in-place pass changes no value: of programs, of their derivatives, of their lanes.

What the pass makes is run equation by equation, so that nothing which XLA does can hide what it
did. Arrays of the generated programs are tiny: here the pass takes even those for worth it.
"""

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import refs
from refs._inplace import model, rewrite
from tests.laws import ways
from tests.strategies import programs


@pytest.fixture(autouse=True, scope="module")
def every_array_is_large():
    smallest, model.SMALLEST = model.SMALLEST, 2
    yield
    model.SMALLEST = smallest


@ways.fewer(2)
@given(programs())
def test_programs(program):
    for pure, args in pure_functions(program):
        check(pure, args)


@ways.fewer(4)
@given(programs())
def test_derivatives(program):
    for pure, args in pure_functions(program):
        check(lambda *args: pullback(pure, args), args, sums=True)  # noqa: B023


@ways.fewer(4)
@given(programs())
def test_lanes(program):
    for pure, args in pure_functions(program):
        two = [jnp.stack([x, x[::-1] if x.ndim else x]) for x in args]
        check(jax.vmap(pure), two)
        check(lambda *args: pullback(jax.vmap(pure), args), two, sums=True)  # noqa: B023


def pure_functions(program):
    """The program as a function of all state and arguments, and what they are: or no function."""
    found = []

    def call(fun, *args):
        jaxpr = refs.make_jaxpr(lambda: fun(*args))()
        pure = refs.discharge(jaxpr)
        state = [x[...] for x in jaxpr.consts if isinstance(x, refs.Ref)]
        found.append((jax.extend.core.jaxpr_as_fun(pure), state))
        return []

    ways.run(program, ways.modules(), call)
    return found[:1]


def pullback(pure, args):
    """The gradient of all that comes out, by all that is smooth of what goes in."""
    smooth = [k for k, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def total(*chosen):
        full = list(args)
        for k, x in zip(smooth, chosen, strict=True):
            full[k] = x
        inexact = [y for y in pure(*full) if jnp.issubdtype(y.dtype, jnp.inexact)]
        return sum((jnp.sum(y * y).real for y in inexact), jnp.float32(0))

    return jax.vjp(total, *(args[k] for k in smooth))[1](jnp.float32(1))


def check(fun, args, sums=False):
    """The pass gives the same to the bit, but for `sums` of floats, which it may reorder."""
    try:
        closed = jax.make_jaxpr(fun)(*args)
    except (ValueError, TypeError, NotImplementedError):
        return  # JAX has no reverse derivative of a while loop.
    new = rewrite(closed.jaxpr)
    want, got = (jax.core.eval_jaxpr(j, closed.consts, *args) for j in (closed.jaxpr, new))
    for x, y in zip(want, got, strict=True):
        if sums and jnp.issubdtype(x.dtype, jnp.inexact):
            largest = float(jnp.max(jnp.abs(x), initial=1.0))
            np.testing.assert_allclose(y, x, rtol=0, atol=1e-6 * largest)
        else:
            np.testing.assert_array_equal(y, x)
