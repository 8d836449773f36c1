"""Touch analysis of updates whose order doesn't matter."""

import jax
import jax.numpy as jnp
import pytest

from refs._effects import Touch
from tests.test_effects import touch


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
