"""Guards what the door offers for rewriting jaxprs by hand. See `test_jax.py`."""

import jax
import jax.numpy as jnp
import numpy as np

from refs import _jax
from tests.jax.test_jax import X, equations


def test_jaxprs_put_together_by_hand():
    closed = jax.make_jaxpr(lambda x: jnp.sin(x) + 1)(X)
    sin, add = closed.jaxpr.eqns
    middle = _jax.new_var(sin.outvars[0].aval)
    new = _jax.with_equations(
        closed,
        lambda jaxpr: jaxpr.replace(
            eqns=[
                sin.replace(outvars=[middle]),
                add.replace(invars=[middle, add.invars[1]]),
            ]
        ),
    )
    assert type(new) is type(closed)
    assert jnp.array_equal(_jax.eval_jaxpr(new, new.consts, [X])[0], jnp.sin(X) + 1)
    assert _jax.with_equations(closed, lambda jaxpr: jaxpr).jaxpr is closed.jaxpr


def test_constants_become_inputs():
    closed = jax.make_jaxpr(lambda x: x + np.arange(3.0))(X)
    assert len(closed.consts) == 1
    detached = _jax.without_constants(closed)
    assert not detached.consts
    [out] = _jax.eval_jaxpr(detached, [], [*closed.consts, X])
    assert jnp.array_equal(out, X + jnp.arange(3))


def test_zero_literals():
    [eqn] = equations(lambda x: x + 0.0, X)
    assert _jax.is_zero_literal(eqn.invars[1])
    [eqn] = equations(lambda x: x + 1.0, X)
    assert not _jax.is_zero_literal(eqn.invars[1])


def test_a_call_lends_its_name():
    [call] = equations(jax.jit(jnp.sin), X)
    [inner] = _jax.jaxprs_in(call.params)[0].jaxpr.eqns
    moved = _jax.called_by(inner, call, "jit(me)")
    assert "jit(me)" in str(moved.source_info.name_stack)
    assert _jax.user_line(moved) == _jax.user_line(inner)


def test_a_type_without_a_sharding_has_no_explicit_one():
    [token] = equations(jax.lax.create_token, X)
    assert not _jax.has_explicit_sharding(token.outvars[0].aval)
