"""Errors of JAX that only their words tell apart: each version raises them, and is understood."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from refs import _jax
from tests.processes import run_with_devices

X = jnp.arange(3.0)


def ref():
    return jax.new_ref(X)


def with_a_tracer_for_a_constant(r):
    f = jax.custom_vjp(lambda r, x: x, nondiff_argnums=(0,))
    f.defvjp(lambda r, x: (x, None), lambda r, _, ct: (ct,))
    return f(r, 1.0)


def written_in(transformed):
    r = ref()

    def f(x):
        r[0] = x
        return x

    return transformed(f)


def returned_by_a_body():
    r = ref()
    return lax.scan(lambda c, _: (c, r), 0, None, length=2)


def branch(p, r):
    return lax.cond(p, lambda: r[...], lambda: X)


def taken_twice():
    r = ref()
    return jax.jit(lambda a, b: None)(r, r)


ERRORS = {
    "a returned ref": returned_by_a_body,
    "a ref taken twice": taken_twice,
    "a mapped branch": lambda: jax.jit(jax.vmap(branch, (0, None)))(X > 0, ref()),
    "arrays only": lambda: jax.jit(lambda r: jax.device_put(r)[...])(ref()),
    "a tracer that isn't differentiated": lambda: jax.jit(with_a_tracer_for_a_constant)(ref()),
    "a differentiated ref": lambda: jax.jit(jax.grad(lambda r: r[0]))(ref()),
    "a differentiated value": lambda: written_in(lambda f: jax.grad(f)(1.0)),
    "a mapped value": lambda: written_in(lambda f: jax.vmap(f)(X)),
}


def said_by(program):
    """What JAX's error says that a program meets while it is traced; and the error."""
    seen = []

    def traced():
        try:
            program()
        except Exception as error:
            seen.append((_jax.what_is_said(error), error))

    jax.make_jaxpr(traced)()
    return seen[0]


@pytest.mark.parametrize("name", ERRORS)
def test_it_is_understood(name):
    said, error = said_by(ERRORS[name])
    assert said == name, str(error)[:500]


@pytest.mark.parametrize("name", ERRORS)
def test_in_an_error_of_the_users_it_is_not(name):
    _, error = said_by(ERRORS[name])

    def fail():
        raise type(error)(str(error))

    assert said_by(fail)[0] is None
    assert said_by(lambda: lax.scan(lambda *_: fail(), 0, None, length=2))[0] is None


def test_an_array_that_was_donated():
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros(3)
    step(x)
    for use in (step, lambda x: x + 1, np.asarray):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            use(x)
        assert _jax.is_about_deleted(caught.value), str(caught.value)[:500]


def test_other_errors_are_none_of_them():
    error = ValueError("mutable array")
    assert _jax.what_is_said(error) is None  # Nobody has raised it.
    assert not _jax.is_about_deleted(error)
    assert not _jax.is_about_deleted(KeyError("it has been deleted"))


ON_A_MESH = """
import jax, jax.numpy as jnp
from refs import _jax
mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))

def said(f, *args):
    try:
        f(*args)
    except Exception as error:
        print(_jax.what_is_said(error), str(error)[:300])

jax.config.update("jax_traceback_filtering", "off")
with jax.set_mesh(mesh):
    x = jax.device_put(jnp.arange(4.0), jax.P("i"))
    said(lambda x: x[1:3], x)
here = jax.device_put(jnp.zeros(4), jax.devices()[0])
there = jax.device_put(jnp.zeros(4), jax.devices()[1])
said(jax.jit(lambda x, y: x + y), here, there)
"""


def test_on_several_devices():
    lines = run_with_devices(2, "-c", ON_A_MESH).splitlines()
    assert lines[0].startswith("sharding "), lines
    assert lines[-1].startswith("incompatible devices "), lines
