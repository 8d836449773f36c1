"""Laws of `refs.jit`. That it computes the right thing is in `test_meaning`."""

from hypothesis import given, settings

import refs
from tests.laws import ways
from tests.strategies import programs

fewer = settings(max_examples=settings.default.max_examples // 4)


@fewer
@given(programs(returned_refs=True))
def test_refs_may_be_returned(program):
    ways.check(ways.eager, program)
    ways.check(ways.jitted, program)


@fewer
@given(programs())
def test_looking_changes_nothing(program):
    def look_and_call(fun, *args):
        compiled = refs.jit(fun)
        compiled.lower(*args)
        shapes = compiled.eval_shape(*args)
        compiled.trace(*args)
        results = compiled(*args)
        assert [(x.shape, x.dtype) for x in shapes] == [(x.shape, x.dtype) for x in results]
        return results

    def looked_at(program):
        return ways.run(program, ways.modules(), look_and_call)

    ways.check(looked_at, program)
