"""Primitives of other libraries that keep a jaxpr without its constants among their parameters."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

import refs

# What it is told of the slope it doesn't use: a solver's hint, as lineax has it.
scaled_p = Primitive("scaled_with_hint")
scaled_p.def_impl(lambda x, *, hint: 2.0 * x)
scaled_p.def_abstract_eval(lambda x, *, hint: x)
mlir.register_lowering(scaled_p, mlir.lower_fun(lambda x, *, hint: 2.0 * x, multiple_results=False))
# One with a constant, apart from it.
HINT = jax.make_jaxpr(lambda x: x * np.arange(3.0))(1.0).jaxpr


def test_are_left_alone() -> None:
    r = refs.new_ref(jnp.ones(3))

    def double() -> jax.Array:
        r[...] = scaled_p.bind(r[...], hint=HINT)
        return r[0]

    assert refs.jit(double)() == 2.0
    assert refs.jit(lambda: refs.fori_loop(0, 2, lambda _, x: double(), jnp.float32(0)))() == 8.0
    assert refs.in_place(lambda x: scaled_p.bind(x, hint=HINT))(3.0) == 6.0
    np.testing.assert_array_equal(r[...], 8.0)
