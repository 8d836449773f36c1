"""The discharge of a program is pure, and means what plain Python on NumPy arrays does."""

from hypothesis import given, note

import refs
from refs import _jax
from tests.laws import ways
from tests.strategies import programs


@ways.same_programs
@given(programs())
def test_discharge_means_what_python_does(program):
    ways.check(ways.discharged, program)


@ways.fewer(2)
@given(programs())
def test_nothing_of_refs_is_left_and_nothing_happens_meanwhile(program):
    note(ways.script(program, "discharged"))
    space = ways.modules()
    exec(str(program), space)
    args = eval(program.arguments(), space)
    cells = ways.cells_of(program, space)
    before = ways.observed((), cells)
    pure = refs.discharge(refs.make_jaxpr(space["program"])(*args))
    assert ways.same_outcome(before, ways.observed((), cells))
    assert not pure.effects
    assert "Ref{" not in str(pure)
    assert not any(ways.is_ref(const) for const in pure.consts)
    assert equations(refs.discharge(pure)) == equations(pure)


def equations(closed):
    """What a jaxpr computes, in order and at any depth; JAX orders the constants as it likes."""

    def types(atoms):
        return [str(atom.aval) for atom in atoms]

    return [
        (
            eqn.primitive.name,
            types(eqn.invars),
            types(eqn.outvars),
            [equations(inner) for inner in _jax.jaxprs_in(eqn.params)],
        )
        for eqn in closed.jaxpr.eqns
    ]
