"""Laws of what discharge makes. That it computes the right thing is in `test_meaning`."""

from hypothesis import given, note, settings

import refs
from tests.laws import ways
from tests.strategies import programs

# Nothing is compiled here.
fewer = settings(max_examples=settings.default.max_examples // 2)


def pure_jaxpr(program):
    note(ways.script(program, "discharged"))
    space = ways.modules()
    exec(str(program), space)
    args = eval(program.arguments(), space)
    cells = ways.cells_of(program, space)
    before = ways.observed((), cells)
    pure = refs.discharge(refs.make_jaxpr(space["program"])(*args))
    assert ways.same_outcome(before, ways.observed((), cells))
    return pure


@fewer
@given(programs())
def test_nothing_of_refs_is_left_and_nothing_happens_while_tracing(program):
    pure = pure_jaxpr(program)
    assert not pure.effects
    assert "Ref{" not in str(pure)
    assert not any(isinstance(const, refs.Ref) for const in pure.consts)


@fewer
@given(programs())
def test_a_pure_program_is_its_own_discharge(program):
    pure = pure_jaxpr(program)
    assert str(refs.discharge(pure)) == str(pure)
