"""A compiled function that is called again inside of another one: it isn't traced again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs

WAYS = {
    "refs.jit": refs.jit,
    "jax.jit": jax.jit,
    "grad": refs.grad,
    "scan": lambda f: lambda x: refs.scan(lambda c, _: (f(c), None), x, length=1)[0],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_function_that_closes_over_a_ref_and_a_value(way):
    r, traces = refs.new_ref(jnp.zeros(3)), []

    def program(x):
        y = x * 1.0

        @refs.jit
        def add():
            traces.append(1)
            r[...] += y

        add()
        add()
        return r[0] * y

    result = WAYS[way](program)(2.0)
    assert len(traces) == 1
    np.testing.assert_allclose(result, 8)
    np.testing.assert_allclose(r[...], 4)


def test_nested_functions_are_traced_once_a_level():
    r, traces = refs.new_ref(0.0), []

    def level(depth):
        def body():
            traces.append(depth)
            r[...] += 1.0
            if depth:
                inner = refs.jit(level(depth - 1))
                inner()
                inner()

        return body

    refs.jit(level(6))()
    assert r[...] == 2**7 - 1
    assert sorted(traces) == [0, 1, 2, 3, 4, 5, 6]


def test_a_function_of_a_trace_that_has_ended_is_traced_again():
    """What it closes over is another value then."""
    r, given = refs.new_ref(0.0), {}

    @refs.jit
    def add():
        r[...] += given["x"]

    @refs.jit
    def program(x):
        given["x"] = x * 1.0
        add()

    program(jnp.float32(1))
    program(jnp.ones(()).astype(jnp.bfloat16))
    assert r[...] == 2
