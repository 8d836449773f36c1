"""A callback's NumPy function does to refs what it does to NumPy arrays, wherever it is called."""

from hypothesis import assume, given, note

import refs
from tests import oracle
from tests.laws import ways
from tests.strategies_callbacks import Callback, callback_programs, mapped_callback_programs
from tests.strategies_syntax import walk


@ways.fewer(8)
@given(callback_programs())
def test_at_top_level_a_callback_means_the_function(program):
    ways.check(ways.eager, program)


@ways.fewer(4)
@given(callback_programs())
def test_under_jit_a_callback_means_the_function(program):
    ways.check(ways.jitted, program)


@ways.fewer(8)
@given(callback_programs())
def test_discharged_a_callback_means_the_function(program):
    ways.check(ways.discharged, program)


@ways.fewer(4)
@given(mapped_callback_programs())
def test_in_lanes_a_callback_means_the_function_in_each(program):
    ways.check(ways.jitted, program)


@ways.fewer(16)
@given(mapped_callback_programs())
def test_in_lanes_at_top_level_too(program):
    ways.check(ways.eager, program)


@ways.fewer(8)
@given(callback_programs(ordered=True, wrappers=("jax.jit", "refs.jit")))
def test_ordered_callbacks_are_made_in_the_programs_order(program):
    assume(any(isinstance(node, Callback) for node in walk(program)))
    note(ways.script(program, "jitted"))
    expected, got = oracle.namespace(), ways.modules()
    ways.by_definition(program, expected)
    compiled = []

    def call(fun, *args):
        if not compiled:
            compiled.append(refs.jit(fun))
        return compiled[0](*args)

    ways.run(program, got, call)
    assert got["log"] == expected["log"]
