"""Under `refs.jit` a program means what plain Python on NumPy arrays does."""

from hypothesis import given

import refs
from tests.laws import ways
from tests.strategies import programs


@ways.same_programs
@given(programs())
def test_jit_means_what_python_does(program):
    ways.check(ways.jitted, program)


@ways.fewer(4)
@given(programs(returned_refs=True))
def test_refs_may_be_returned(program):
    ways.check(ways.eager, program)
    ways.check(ways.jitted, program)


def looked_at_first(program):
    """Under `refs.jit`, after everything that must not run the program."""

    def call(fun, *args):
        compiled = refs.jit(fun)
        compiled.trace(*args)
        compiled.lower(*args)
        shapes = compiled.eval_shape(*args)
        results = compiled(*args)
        assert [(x.shape, x.dtype) for x in shapes] == [(x.shape, x.dtype) for x in results]
        return results

    return ways.run(program, ways.modules(), call)


@ways.fewer(4)
@given(programs())
def test_looking_at_a_program_changes_nothing(program):
    ways.check(looked_at_first, program)
