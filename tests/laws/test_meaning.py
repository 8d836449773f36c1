"""The first law: a program means what plain Python on NumPy arrays does, however it is run."""

from hypothesis import given

from tests.laws import ways
from tests.strategies import programs


@given(programs())
def test_a_program_means_the_same_however_it_is_run(program):
    ways.check(ways.eager, program)
    ways.check(ways.discharged, program)
    ways.check(ways.jitted, program)
