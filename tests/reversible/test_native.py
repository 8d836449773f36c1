"""`refs.reversible` under JAX's own transformations: all is as with the plain function."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import refs
from refs.errors import RefError
from tests.reversible import programs
from tests.reversible.common import (
    BOTH,
    FIXED,
    LANES,
    WS,
    X,
    agree,
    loss_of,
    with_outside_refs,
)

pytestmark = pytest.mark.usefixtures("x64")

ON_ONE = {
    "jax.jvp": lambda f: lambda *args: jax.jvp(f, args, args),
    "jax.grad": lambda f: jax.grad(f, BOTH),
    "jax.jit of jax.grad": lambda f: jax.jit(jax.grad(f, BOTH)),
    "jax.grad of jax.jit": lambda f: jax.grad(jax.jit(f), BOTH),
    "jax.jacrev": lambda f: jax.jacrev(f, 1),
    "jax.checkpoint": lambda f: jax.grad(jax.checkpoint(f), BOTH),
    "jax.jvp of jax.grad": lambda f: (
        lambda ws, x: jax.jvp(lambda w: jax.grad(f)(w, x), (ws,), (ws,))
    ),
    "jax.vjp of two results": lambda f: (
        lambda ws, x: jax.vjp(lambda w, x: (f(w, x), f(2 * w, x)), ws, x)[1]((1.0, 0.5))
    ),
}
ON_LANES = {
    "jax.vmap": lambda f: jax.vmap(f, in_axes=(None, 0)),
    "jax.vmap of jax.grad": lambda f: jax.vmap(jax.grad(f, BOTH), in_axes=(None, 0)),
    "jax.grad of jax.vmap": lambda f: jax.grad(
        lambda ws, xs: jnp.sum(jax.vmap(f, in_axes=(None, 0))(ws, xs)), BOTH
    ),
    "jax.vmap of both": lambda f: (
        lambda ws, xs: jax.vmap(jax.grad(f, BOTH))(jnp.stack([ws, 2 * ws]), xs)
    ),
    "jax.vmap of weights alone": lambda f: (
        lambda ws, xs: jax.vmap(jax.grad(f, BOTH), (0, None))(jnp.stack([ws, 2 * ws]), xs[0])
    ),
}


@pytest.mark.parametrize("way", ON_ONE)
def test_under(way):
    transform = ON_ONE[way]
    plain, undone = loss_of(programs.sums), loss_of(programs.sums, mode="float")
    want = transform(plain)(WS, X)
    agree(transform(undone)(WS, X), want)


@pytest.mark.parametrize("way", ON_LANES)
def test_under_with_lanes(way):
    transform = ON_LANES[way]
    plain, undone = loss_of(programs.sums), loss_of(programs.sums, mode="float")
    want = transform(plain)(WS, LANES)
    agree(transform(undone)(WS, LANES), want)


def test_first_derivatives_of_integers():
    plain, undone = loss_of(programs.sums), loss_of(programs.sums, mode=FIXED)
    agree(jax.grad(undone, BOTH)(WS, X), jax.grad(plain, BOTH)(WS, X), 1e-8)


# --- Refs of the outside


def test_functionalize_of_refs_of_the_outside():
    a, b = refs.new_ref(X), refs.new_ref(2 * X)

    def derivatives(program):
        pure = refs.functionalize(lambda ws: program(a, b, ws), closed_over=[a, b])

        def of(x, ws):
            out, [new_a, _] = pure([x, 2 * x], ws)
            return out + jnp.sum(jnp.sin(new_a))

        lanes = jax.vmap(jax.grad(of), (0, None))(LANES, WS)
        return jax.grad(of, BOTH)(X, WS), jax.jvp(of, (X, WS), (X, WS)), lanes

    agree(derivatives(refs.reversible(programs.sums)), derivatives(programs.sums))


NATIVE = {
    "jax.jit": jax.jit,
    "jax.grad": jax.grad,
    "jax.jit of jax.grad": lambda f: jax.jit(jax.grad(f)),
    "jax.jvp": lambda f: lambda ws: jax.jvp(f, (ws,), (ws,)),
    "jax.vmap": lambda f: lambda ws: jax.vmap(f)(ws[None]),
    "jax.checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "lax.scan": lambda f: lambda ws: lax.scan(lambda c, _: (c + f(ws), None), 0.0, length=2)[0],
}


@pytest.mark.parametrize("way", NATIVE)
def test_jax_transforms_it_over_refs_of_the_outside(way):
    """As JAX does the plain function, or there is an error: of JAX's, where that has one."""

    def attempt(program):
        try:
            return with_outside_refs(program, NATIVE[way]), None
        except Exception as error:
            return None, error

    want, refused = attempt(programs.sums)
    got, error = attempt(refs.reversible(programs.sums))
    if refused is not None:
        assert error is not None
    elif error is not None:
        assert isinstance(error, RefError), error
    else:
        agree(got, want)
