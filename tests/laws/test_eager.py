"""Laws of concrete refs outside any trace."""

from hypothesis import given, settings

from tests.laws import ways
from tests.strategies import programs

# `test_meaning` runs each program eagerly, too.
fewer = settings(max_examples=settings.default.max_examples // 4)


@fewer
@given(programs())
def test_disable_jit_changes_nothing(program):
    ways.check(ways.disable_jit, program)
