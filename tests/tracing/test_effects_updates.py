"""Touch analysis of updates whose order doesn't matter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

import refs
from refs._tracing.touch_analysis import Touch
from tests.tracing.test_effects import touch


@pytest.mark.parametrize(
    "op, want",
    [
        (jnp.multiply, Touch.MULTIPLY),
        (jnp.minimum, Touch.MIN),
        (jnp.maximum, Touch.MAX),
        (jax.jit(jnp.maximum), Touch.MAX),
        (jax.jit(lambda x, y: jnp.maximum(jax.jit(jnp.maximum)(1.0, x), y)), Touch.MAX),
        (jax.jit(lambda x, y: x * y + y), Touch.READ | Touch.WRITE),
        (jax.jit(lambda x, y: x * x), Touch.READ | Touch.WRITE),
        (jnp.power, Touch.READ | Touch.WRITE),
    ],
)
def test_updates_whose_order_does_not_matter(op, want):
    def program(r, x):
        r[1] = op(r[1], x)

    assert touch(program, jnp.float32(1)) == want


def test_another_derivative_is_another_update():
    """`relu` is a maximum, but at 0 its derivative isn't."""

    def program(r):
        r[...] = jax.nn.relu(r[...])

    assert touch(program) == Touch.READ | Touch.WRITE


class Table:
    """A parameter that is hashed by identity, and compares as an array."""

    def __init__(self, *places):
        self.places = np.array(places)

    def __eq__(self, other):
        return self.places == other.places

    __hash__ = object.__hash__


look_up_p = Primitive("look_up")


@look_up_p.def_impl
def look_up(i, *, table):
    return jnp.asarray(table.places, jnp.int32)[i % table.places.size]


look_up_p.def_abstract_eval(lambda i, *, table: jax.core.ShapedArray(i.shape, jnp.int32))
mlir.register_lowering(look_up_p, mlir.lower_fun(look_up, multiple_results=False))


ONE = Table(2, 1, 0)


@pytest.mark.parametrize(
    "one, other, want",
    [
        (ONE, ONE, Touch.ACCUMULATE),
        (ONE, Table(2, 1, 0), Touch.READ | Touch.WRITE),
        (ONE, Table(2, 1), Touch.READ | Touch.WRITE),
        (Table(2), Table(2), Touch.ACCUMULATE),
        (Table(2), Table(1), Touch.READ | Touch.WRITE),
    ],
)
def test_parameters_that_hold_arrays(one, other, want):
    def program(r, i):
        r[look_up_p.bind(i, table=one)] = r[look_up_p.bind(i, table=other)] + 1

    assert touch(program, jnp.int32(1)) == want
    for run in (program, refs.jit(program)):
        r = refs.new_ref(jnp.arange(3))
        run(r, jnp.int32(1))
        wanted = np.arange(3)
        wanted[look_up(1, table=one)] = wanted[look_up(1, table=other)] + 1
        np.testing.assert_array_equal(r, wanted)


def test_operands_as_many_as_they_like():
    def program(r, a, b):
        r[lax.concatenate([a, b], 0)] = r[lax.concatenate([a, b, b[:0]], 0)] + 1

    assert touch(program, jnp.array([0]), jnp.array([1])) == Touch.READ | Touch.WRITE


def test_a_long_way_to_an_index():
    def far(i):
        for _ in range(2000):
            i = (i + 1) % 3
        return i

    def program(r, i):
        r[far(i)] = r[far(i)] + 1

    assert touch(program, jnp.int32(1)) == Touch.ACCUMULATE
