"""A callback that fails when its program runs later than the call returns, as programs may."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback

import refs
from refs._callbacks import failure

slow = jax.jit(lambda a: (a @ a @ a @ a).sum())


class SensorError(Exception):
    pass


def fail():
    raise SensorError("sensor is off")


def by_itself(r, x):
    r[...] = x
    io_callback(fail, None)
    return x


def ordered(r, x):
    io_callback(fail, None, ordered=True)
    r[...] = x
    return x


def before_another(r, x):
    r[...] = x
    io_callback(fail, None)
    io_callback(lambda: None, None)
    return x


def of_refs(r, x):
    refs.io_callback(fail, None)
    r[...] = x
    return x


def in_a_jit(r, x):
    refs.jit(by_itself)(r, x)
    io_callback(lambda: None, None)
    return x


def reading(r, x):
    io_callback(fail, None)
    return r[...] + x


PROGRAMS = [by_itself, ordered, before_another, of_refs, in_a_jit, reading]


def in_a_branch(f, r, x):
    return refs.cond(jnp.array(True), lambda: f(r, x), lambda: f(r, x))


def in_a_backward_rule(f, r, x):
    @jax.custom_vjp
    def identity(y):
        return y

    identity.defvjp(lambda y: (y, x), lambda x, ct: (f(r, ct * x),))
    return refs.grad(identity)(1.0)


WAYS = {
    "jit": lambda f, r, x: refs.jit(f)(r, x),
    "jit without results": lambda f, r, x: refs.jit(lambda r, x: (f(r, x), None)[1])(r, x),
    "compiled": lambda f, r, x: refs.jit(f).lower(r, x).compile()(r, x),
    "checkpoint": lambda f, r, x: refs.checkpoint(f)(r, x),
    "grad": lambda f, r, x: refs.grad(f, argnums=1)(r, x),
    "vjp": lambda f, r, x: refs.vjp(lambda x: f(r, x), x)[1](1.0),
    "jvp": lambda f, r, x: refs.jvp(lambda x: f(r, x), (x,), (x,)),
    "linearize": lambda f, r, x: refs.linearize(lambda x: f(r, x), x),
    "scan": lambda f, r, x: refs.scan(lambda c, _: (f(r, c), None), x, None, length=1),
    "cond": in_a_branch,
    "backward rule": in_a_backward_rule,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_call_raises_and_changes_nothing(program, way):
    matrix, r = jnp.ones((1000, 1000)), refs.new_ref(jnp.float32(5))
    for _ in range(2):
        # While this runs, JAX starts no program that needs it, and calls return nevertheless.
        x = slow(matrix)
        with pytest.raises(Exception, match="sensor is off"):
            WAYS[way](program, r, x)
        assert r[...] == 5
        jax.effects_barrier()  # The failure isn't raised a second time.


def test_a_ref_of_jax_keeps_its_value():
    native = jax.new_ref(jnp.arange(3.0))

    def write(a):
        a[0] = 5
        fail()

    with pytest.raises(refs.errors.CallbackError, match="keep their old values"):
        refs.io_callback(write, None, native)
    assert native[0] == 0


def test_failures_that_nobody_fetches_do_not_pile_up():
    """A program of JAX's own `jit` says what has failed, and `refs` never hears of it."""
    step = jax.jit(lambda: refs.io_callback(fail, None))
    for _ in range(2 * failure._MOST):
        with pytest.raises(jax.errors.JaxRuntimeError, match="sensor is off"):
            step()
            jax.effects_barrier()
    assert len(failure._failures) <= failure._MOST


def test_what_follows_a_callback_in_a_derivative_waits_for_it():
    """A function of its own program, which touches a ref, in one that is run op by op."""
    matrix, r, seen = jnp.ones((1000, 1000)), refs.new_ref(jnp.float32(5)), []

    @refs.jit
    def step(x):
        r[...] += x
        io_callback(lambda: seen.append("called"), None)
        return x

    def f(x):
        y = step(x)
        seen.append("returned")
        return y

    for _ in range(2):
        refs.grad(f)(slow(matrix))
    assert seen == ["called", "returned"] * 2
