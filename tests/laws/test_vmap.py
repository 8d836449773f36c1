"""A function mapped over refs means what a Python loop over the lanes does."""

from hypothesis import given

from tests.laws import ways
from tests.strategies_lanes import mapped_programs


@ways.fewer(8)
@given(mapped_programs())
def test_a_map_at_top_level_means_a_loop(program):
    ways.check(ways.eager, program)


@given(mapped_programs())
def test_a_map_under_jit_means_a_loop(program):
    ways.check(ways.jitted, program)
