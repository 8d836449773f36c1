"""Programs over refs: derivatives, and functions with derivative rules of their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from native_program import program

X = np.arange(1, 5, dtype=np.float32)


# --- Differentiation ---


@program("grad of a checkpointed function that counts", lambda: (math.cos(1), 1))
def grad_of_a_checkpointed_function_that_counts(m: Any) -> Any:
    n = m.new_ref(0)

    @m.checkpoint
    def f(x: Any) -> Any:
        n[...] += 1
        return jnp.sin(x)

    return m.grad(f)(1.0), n[...]


@program("grad, differentiated value written to a ref", lambda: (6, 9))
def grad_of_a_function_that_writes_what_is_differentiated(m: Any) -> Any:
    seen = m.new_ref(jnp.float32(0))

    def f(x: Any) -> Any:
        seen[...] = x**2
        return x**2

    return m.grad(f)(3.0), seen[...]


@program("grad with respect to a ref", lambda: 2 * X)
def grad_with_respect_to_a_ref(m: Any) -> Any:
    return m.grad(lambda r: jnp.sum(r[...] ** 2))(m.new_ref(X))


@program("hessian, ref inside a scan", lambda: np.diag(6 * X))
def hessian_of_a_function_with_a_ref_inside_a_scan(m: Any) -> Any:
    def sum_of_cubes(x: Any) -> Any:
        total = m.new_ref(jnp.float32(0))

        def step(_: Any, v: Any) -> Any:
            total[...] += v**3
            return None, None

        m.scan(step, None, x)
        return total[...]

    return m.hessian(sum_of_cubes)(X)


def write_sin_if_positive(m: Any, r: Any, x: Any) -> None:
    def write() -> None:
        r[...] = jnp.sin(x)

    m.cond(x > 0, write, lambda: None)


@program("grad(checkpoint(cond)), ref inside", lambda: math.cos(1))
def grad_of_a_checkpointed_cond_with_a_ref_inside(m: Any) -> Any:
    @m.checkpoint
    def f(x: Any) -> Any:
        r = m.new_ref(x)
        write_sin_if_positive(m, r, x)
        return r[...]

    return m.grad(f)(1.0)


@program("the same, the ref made outside the checkpoint", lambda: math.cos(1))
def grad_of_a_checkpointed_cond_that_writes_a_ref(m: Any) -> Any:
    def f(x: Any) -> Any:
        r = m.new_ref(x)
        m.checkpoint(lambda x: write_sin_if_positive(m, r, x))(x)
        return r[...]

    return m.grad(f)(1.0)


@program("the same, read inside the checkpoint", lambda: math.cos(1))
def grad_of_a_checkpointed_cond_that_writes_and_reads_a_ref(m: Any) -> Any:
    def f(x: Any) -> Any:
        r = m.new_ref(x)

        @m.checkpoint
        def body(x: Any) -> Any:
            write_sin_if_positive(m, r, x)
            return r[...]

        return body(x)

    return m.grad(f)(1.0)


# --- Custom rules: a sin that counts its calls, and whose rule gives the derivative 100 ---


def counted_sin_with_a_jvp_rule(n: Any) -> Any:
    @jax.custom_jvp
    def sin(x: Any) -> Any:
        n[...] += 1
        return jnp.sin(x)

    sin.defjvp(lambda primals, tangents: (sin(*primals), 100.0 * tangents[0]))
    return sin


def counted_sin_with_a_vjp_rule(n: Any) -> Any:
    @jax.custom_vjp
    def sin(x: Any) -> Any:
        n[...] += 1
        return jnp.sin(x)

    sin.defvjp(lambda x: (sin(x), None), lambda _, ct: (100.0 * ct,))
    return sin


@program("custom_jvp function that counts, grad under jit", lambda: ((math.sin(1), 100), 1))
def custom_jvp_function_that_counts_under_jit(m: Any) -> Any:
    n = m.new_ref(0)
    out = m.jit(m.value_and_grad(counted_sin_with_a_jvp_rule(n)))(1.0)
    return out, n[...]


@program("custom_vjp function that counts, grad of a loop", lambda: (100**3, 3))
def custom_vjp_function_that_counts_in_a_loop(m: Any) -> Any:
    n = m.new_ref(0)
    sin = counted_sin_with_a_vjp_rule(n)
    slope = m.grad(lambda x: m.fori_loop(0, 3, lambda _, x: sin(x), x))(1.0)
    return slope, n[...]


@program("custom_vjp rule adds to a shared ref, vmap(grad)", lambda: ([2.0] * len(X), 2 * len(X)))
def custom_vjp_rule_that_adds_to_a_shared_ref(m: Any) -> Any:
    total = m.new_ref(jnp.float32(0))

    @jax.custom_vjp
    def watched(x: Any) -> Any:
        return x

    def backward(_: Any, ct: Any) -> Any:
        total[...] += ct
        return (ct,)

    watched.defvjp(lambda x: (x, None), backward)
    return m.vmap(m.grad(lambda x: 2 * watched(x)))(X), total[...]


def slope_of_discharged(m: Any, make: Callable[[Any], Any]) -> Any:
    n = m.new_ref(0)
    pure = m.discharge(jax.make_jaxpr(make(n))(jnp.float32(1)))
    return jax.grad(lambda x: jaxpr_as_fun(pure)(jnp.int32(0), x)[0])(jnp.float32(1))


@program("discharge, then grad: custom_jvp rule", lambda: 100)
def custom_jvp_rule_after_discharge(m: Any) -> Any:
    return slope_of_discharged(m, counted_sin_with_a_jvp_rule)


@program("discharge, then grad: custom_vjp rule", lambda: 100)
def custom_vjp_rule_after_discharge(m: Any) -> Any:
    return slope_of_discharged(m, counted_sin_with_a_vjp_rule)
