"""Rules for primitives of one's own: registered, they work everywhere; without one, an error."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

import refs
from refs import extend
from tests.discharge.helpers import agree, primitives

X = np.arange(4, dtype=np.float32)
number = itertools.count()


def new_primitive(results=0):
    """A primitive of refs and arrays, which returns as many scalars as `results` says."""
    primitive = Primitive(f"test_primitive_{next(number)}")
    primitive.multiple_results = True
    scalar = jax.core.ShapedArray((), jnp.float32)
    primitive.def_abstract_eval(lambda *args, **params: [scalar] * results)
    return primitive


def test_without_a_rule():
    p = new_primitive()
    r = refs.new_ref(X, name="weights")
    with pytest.raises(refs.errors.MissingRuleError) as caught:
        refs.jit(lambda: p.bind(r))()
    assert p.name in str(caught.value)
    assert "ref `weights` (created at test_extend.py:" in str(caught.value)
    np.testing.assert_array_equal(r[...], X)


def test_without_a_rule_in_a_loop_in_a_branch():
    p = new_primitive()

    def program(r):
        def body(c, _):
            lax.cond(c > 0, lambda: p.bind(r), lambda: [])
            return c + 1, None

        lax.scan(body, 0, length=2)

    with pytest.raises(refs.errors.MissingRuleError, match=p.name):
        refs.discharge(refs.make_jaxpr(program)(refs.new_ref(X)))


def test_arrays_alone_need_no_rule():
    p = new_primitive(1)
    traced = refs.make_jaxpr(lambda r: p.bind(r[...]))(refs.new_ref(X))
    assert primitives(refs.discharge(traced))[p.name] == 1


def scaling_primitive():
    p = new_primitive(1)

    @extend.register(p)
    def discharge_scale(ctx, eqn, args):
        cell, factor = args
        cell.write(cell.read() * factor)
        return [jnp.sum(cell.read())]

    return p


def plain_scale(a, x):
    a *= x
    return a.sum()


def test_a_rule():
    p = scaling_primitive()
    agree(lambda r, x: p.bind(r, x)[0], plain_scale, [X], np.float32(2))


def test_register_returns_the_rule_and_takes_several_primitives():
    first, second = new_primitive(), new_primitive()

    def rule(ctx, eqn, args):
        args[0].write(args[0].read() + 1)
        return []

    assert extend.register(first, second)(rule) is rule

    def program(r):
        first.bind(r)
        second.bind(r)

    def plain(a):
        a += 2

    agree(program, plain, [X])


def test_a_rule_in_control_flow_and_on_a_row():
    p = scaling_primitive()

    def program(r, x):
        def body(c, row):
            lax.cond(c > 0, lambda: p.bind(row, x)[0], lambda: c)
            return c + 1, None

        lax.scan(body, jnp.float32(0), r)

    def plain(a, x):
        a[1:] *= x

    agree(program, plain, [X.reshape(2, 2)], np.float32(2), ways=["passed"])


def test_a_rule_for_a_primitive_with_a_jaxpr():
    """The recipe in the module's docstring, with a primitive that runs its jaxpr once."""
    p = new_primitive(1)

    @extend.register(p)
    def discharge_call(ctx, eqn, args):
        jaxpr = eqn.params["jaxpr"]
        scope = ctx.scope((jaxpr, args))

        @jax.jit
        def run(arrays, state, constants):
            return scope.run(jaxpr, extend.merge(args, arrays), state, constants)

        out, state = run(extend.split(args), scope.state, scope.constants)
        scope.update(state)
        return out

    def body(r, s, x):
        r[0] = s[1] * x
        return jnp.sum(r[...])

    jaxpr = jax.make_jaxpr(body)(jax.new_ref(X), jax.new_ref(X), np.float32(1))

    def plain(a, b, x):
        a[0] = b[1] * x
        return a.sum()

    agree(lambda r, s, x: p.bind(r, s, x, jaxpr=jaxpr)[0], plain, [X, X + 3], np.float32(2))
