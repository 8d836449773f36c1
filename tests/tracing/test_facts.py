"""What is known of a primitive: one record, with its rule or in `array_facts`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

import refs
from refs import extend
from refs._tracing.facts import Facts, can_fail, declare, facts_of, inner_calls
from refs._tracing.touch_analysis import touches
from tests.jax.test_jax import PRIMITIVES, X

RESULT = jax.ShapeDtypeStruct(X.shape, X.dtype)
CAN_FAIL = {
    "pure_callback": lambda x: jax.pure_callback(np.sin, RESULT, x),
    "io_callback": lambda x: jax.experimental.io_callback(np.sin, RESULT, x),
    "debug.callback": lambda x: jax.debug.callback(print, x),
    "debug.print": lambda x: jax.debug.print("{}", x),
    "ffi_call": jax.ffi.ffi_call("tests_nothing", RESULT),
}


@pytest.mark.parametrize("name", CAN_FAIL)
def test_what_can_fail_at_run_time(name):
    program = CAN_FAIL[name]
    assert can_fail(jax.make_jaxpr(program)(X))

    def body(carry, _):
        jax.jit(program)(X)
        return carry, None

    assert can_fail(jax.make_jaxpr(lambda: lax.scan(body, 0, None, length=2))())


@pytest.mark.parametrize("name", PRIMITIVES)
def test_what_can_not_fail(name):
    assert not can_fail(jax.make_jaxpr(PRIMITIVES[name])(X))


def test_facts_add_up():
    p = Primitive("p")
    p.def_abstract_eval(lambda: jax.core.ShapedArray((), jnp.float32))
    [eqn] = jax.make_jaxpr(p.bind)().eqns
    assert facts_of(eqn) == Facts()
    declare(p, can_fail=True)
    declare(p, lanes="agree")
    assert facts_of(eqn) == Facts(can_fail=True, lanes="agree")
    with pytest.raises(TypeError, match="colour"):
        declare(p, colour="red")


# Runs its jaxpr on the rest of its operands; the first is a number that it has for itself.
wrapped_p = Primitive("wrapped")
wrapped_p.multiple_results = True
wrapped_p.def_abstract_eval(lambda *args, jaxpr: [])


def what_it_runs(eqn):
    yield eqn.params["jaxpr"], eqn.invars[1:]


@extend.register(wrapped_p, inner=what_it_runs)
def discharge_wrapped(ctx, eqn, args):
    jaxpr, operands = eqn.params["jaxpr"], args[1:]
    scope = ctx.scope((jaxpr, operands))
    _, state = scope.run(jaxpr, operands, scope.state, scope.constants)
    scope.update(state)
    return []


# Asks Python, in a way that JAX can't know.
asks_p = Primitive("asks")


@extend.register(asks_p, touch=extend.Touch.READ, can_fail=True)
def discharge_asks(ctx, eqn, args):
    return [args[0].read().sum()]


@asks_p.def_abstract_eval
def asks_type(ref):
    return jax.core.ShapedArray((), ref.dtype)


def test_which_jaxprs_a_primitive_of_ones_own_runs():
    """Without `inner` its jaxpr has another number of inputs: all refs would count as written."""
    r, s = refs.new_ref(jnp.arange(3.0)), refs.new_ref(1.0)

    def once(r, s):
        r[...] += s[...]

    def program(r, s):
        wrapped_p.bind(7, r, s, jaxpr=refs.make_jaxpr(once)(r, s))

    traced = refs.make_jaxpr(program)(r, s)
    [(_, operands)] = inner_calls(traced.eqns[0])
    assert len(operands) == 2
    assert [kind.changes for kind in touches(traced).inputs] == [True, False]
    refs.jit(program)(r, s)
    np.testing.assert_array_equal(r[...], [1, 2, 3])
    # What lanes share and only read, they may share.
    rows = refs.new_ref(jnp.zeros((2, 3)))
    refs.vmap(program, (0, None))(rows, s)
    np.testing.assert_array_equal(rows[...], np.ones((2, 3)))


def test_what_a_primitive_of_ones_own_does_to_refs():
    r = refs.new_ref(jnp.arange(3.0))
    traced = refs.make_jaxpr(asks_p.bind)(r)
    assert touches(traced).inputs == (extend.Touch.READ,)
    assert can_fail(traced)
    assert float(refs.jit(asks_p.bind)(r)) == 3
    np.testing.assert_array_equal(refs.vmap(lambda x: x * asks_p.bind(r))(jnp.arange(3)), [0, 3, 6])
