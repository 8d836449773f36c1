"""Outside any trace a program means what plain Python on NumPy arrays does."""

from hypothesis import given

from tests.laws import ways
from tests.strategies import programs


@ways.same_programs
@given(programs())
def test_eager_operations_mean_what_python_does(program):
    ways.check(ways.eager, program)


@ways.fewer(4)
@given(programs())
def test_disable_jit_changes_nothing(program):
    ways.check(ways.disable_jit, program)
