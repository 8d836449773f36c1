"""Stacks by JAX alone: its own transformations of pure functions `pure(state, x)`.

`state` is a dictionary of arrays, which each level threads through the one before.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import refs

STATE = ("n", "u", "s")
FAST_TO_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def outcomes(stack, calls):
    with jax.enable_x64(True):
        space = {"refs": refs, "jnp": jnp, "lax": lax, "jax": jax}
        exec(str(stack), space)
        handles = {name: space[name] for name in STATE}
        state = {name: handle[...] for name, handle in handles.items()}
        pure = refs.functionalize(space["f0"], closed_over=handles)
        for level in stack.levels:
            pure = LEVELS[level](pure, space["T"])
        # Compiled: op by op this takes longer than everything else.
        pure, found = jax.jit(pure, compiler_options=FAST_TO_COMPILE), []
        for _ in range(calls):
            result, state = pure(state, space["X"])
            found.append([np.array(x) for x in (result, *(state[name] for name in STATE))])
        return found


def grad(f, T):
    def pure(state, x):
        return jax.grad(lambda x: f(state, x), has_aux=True)(x)

    return pure


def value_and_grad(f, T):
    def pure(state, x):
        (v, new), g = jax.value_and_grad(lambda x: f(state, x), has_aux=True)(x)
        return v * g, new

    return pure


def grad_of_the_state(f, T):
    def pure(state, x):
        return jax.grad(lambda u: f({**state, "u": u}, x), has_aux=True)(state["u"])

    return pure


def vjp(f, T):
    def pure(state, x):
        y, pullback, new = jax.vjp(lambda x: f(state, x), x, has_aux=True)
        return pullback(y)[0], new

    return pure


def jvp(f, T):
    def pure(state, x):
        y, dy, new = jax.jvp(lambda x: f(state, x), (x,), (T,), has_aux=True)
        return y + 0.5 * dy, new

    return pure


def linearize(f, T):
    def pure(state, x):
        _, f_jvp, new = jax.linearize(lambda x: f(state, x), x, has_aux=True)
        return f_jvp(T) + 0.1 * f_jvp(x), new

    return pure


def jacobian(transform):
    def level(f, T):
        def pure(state, x):
            rows, new = transform(lambda x: f(state, x), has_aux=True)(x)
            return rows[..., 0] * T, new

        return pure

    return level


def hessian(f, T):
    def pure(state, x):
        rows, new = jax.hessian(lambda x: f(state, x), has_aux=True)(x)
        return rows[0], new

    return pure


def mapped(f, state, rows):
    """`u` is the same for all lanes; of the others, what each has added arrives."""
    y, each = jax.vmap(lambda x: f(state, x))(rows)
    new = {name: state[name] + (each[name] - state[name]).sum(0) for name in ("n", "s")}
    return y, {**state, **new}


def vmap(f, T):
    def pure(state, x):
        y, new = mapped(f, state, jnp.stack([x, x + 10.0]))
        return y.sum(0), new

    return pure


def vmap_over_a_ref(f, T):
    def pure(state, x):
        rows = jnp.stack([x, x + 10.0])
        y, new = mapped(lambda s, x: add_sine(x, *f(s, x)), state, rows)
        return y.sum(0), new

    def add_sine(x, y, new):
        return jnp.sin(x) + y, new

    return pure


def scan(f, T):
    def pure(state, x):
        def step(carry, k):
            y, state = f(carry[1], k * x)
            return (carry[0] + y, state), None

        return lax.scan(step, (0.0 * T.sum(), state), jnp.array([1.0, 0.5]))[0]

    return pure


def cond(f, T):
    def pure(state, x):
        def half():
            y, new = f(state, x)
            return 0.5 * y, new

        return lax.cond(x[0] > 3.0, lambda: f(state, x), half)

    return pure


def total(f, T):
    def pure(state, x):
        y, new = f(state, x)
        return (y * T).sum(), new

    return pure


def as_is(f, T):
    return f


LEVELS = {
    "grad": grad,
    "value_and_grad": value_and_grad,
    "grad of a ref": grad,
    "grad of the state": grad_of_the_state,
    "vjp": vjp,
    "jacrev": jacobian(jax.jacrev),
    "hessian": hessian,
    "jvp": jvp,
    "linearize": linearize,
    "jacfwd": jacobian(jax.jacfwd),
    "vmap": vmap,
    "vmap over 1": vmap,
    "vmap over a ref": vmap_over_a_ref,
    "scan": scan,
    "cond": cond,
    "jit": as_is,
    "checkpoint": as_is,
    "sum": total,
}
