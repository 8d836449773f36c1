"""Outside any trace a program means what plain Python on NumPy arrays does."""

import jax
import jax.numpy as jnp
from hypothesis import given

import refs
from tests.laws import ways
from tests.strategies import programs


@ways.same_programs
@given(programs())
def test_eager_operations_mean_what_python_does(program):
    ways.check(ways.eager, program)


@ways.fewer(4)
@given(programs(wrappers=("jax.jit", "refs.jit")))  # `jax.checkpoint` is traced all the same
def test_disable_jit_changes_nothing(program):
    ways.check(ways.disable_jit, program)


def test_what_is_written_under_disable_jit_is_as_good_as_any():
    ref = refs.new_ref(jnp.int32(1))
    with jax.disable_jit():
        ref[...] = 2
        ref[...] += jnp.int32(1)
        assert ref[...] == 3

    @jax.jit
    def natively():
        ref[...] += jnp.int32(1)

    natively()
    assert ref[...] == 4


def test_what_is_written_under_disable_jit_is_a_copy():
    ref, value = refs.new_ref(jnp.zeros(3)), jnp.ones(3)
    with jax.disable_jit():
        ref[...] = value
    ref[0] = 5
    assert value.tolist() == [1, 1, 1]
