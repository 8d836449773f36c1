"""Rule of `reversible`: a pure function with a derivative that undoes it."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from refs import _jax
from refs._discharge.cells import merge, split
from refs._discharge.interpreter import Context
from refs._discharge.registry import register
from refs._reversible.call import differentiable
from refs._reversible.fixed import Fixed
from refs._reversible.primitive import Settings, reversible_p
from refs._reversible.program import Program, known_index
from refs._tracing.discharged import are_parts_kept, parts_kept
from refs._types import ClosedJaxpr, Eqn, Value


@register(reversible_p, runs_once=True)
def discharge_reversible(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    [closed] = _jax.jaxprs_in(eqn.params)
    return call_reversible(ctx, closed, eqn.params["settings"], args)


def call_reversible(
    ctx: Context, closed: ClosedJaxpr, settings: Settings, args: Sequence[Value]
) -> list[Value]:
    """Calls a function over these cells and arrays. Its derivative undoes it.

    Where lanes of a `vmap` diverge, or share a ref that they accumulate into, the function is the
    plain one: the steps of different lanes can't be told apart afterwards.
    """
    if are_parts_kept():  # It is a part of another one.
        return ctx.eval(closed, args)
    pure = Pure(ctx, closed, args)
    is_divided = ctx.lanes is not None and (ctx.lanes.mask is not None or bool(pure.scope.sums))
    if is_divided or pure.scope.places:
        out = pure.run(pure.inputs)
    else:
        out = differentiable(lambda: pure.program(settings.fixed), settings, pure.run)(pure.inputs)
    n_out = len(closed.out_avals)
    pure.scope.update(out[n_out:])
    return out[:n_out]


class Pure:
    """A function over cells and arrays as a pure one.

    Attributes:
      scope: what it does to which cells.
      inputs: the values of the cells that it writes, its constants, and arrays.
    """

    def __init__(self, ctx: Context, closed: ClosedJaxpr, args: Sequence[Value]):
        self.scope = scope = ctx.scope((closed, args))
        self._ctx, self._closed, self._args = ctx, closed, args
        state, constants = scope.state, scope.constants
        self.inputs = [*map(_jax.output, (*state, *constants, *split(args)))]
        self._ends = len(state), len(state) + len(constants)

    def run(self, inputs: Sequence[Value]) -> list[Value]:
        """The results, then what the cells that it writes hold at last."""
        k, n = self._ends
        state, constants, arrays = inputs[:k], inputs[k:n], inputs[n:]
        out, new = self.scope.run(self._closed, merge(self._args, arrays), state, constants)
        return [*map(_jax.output, out), *new]

    def program(self, fixed: Fixed | None) -> Program:
        """The function as one that can be undone."""
        scope = self.scope
        with parts_kept(), self._ctx.outside_lanes():
            like = [_jax.AbstractArgument(jax.typeof(x)) for x in self.inputs]
            closed = jax.make_jaxpr(lambda *inputs: self.run(inputs))(*like)
        arrays = enumerate(split(self._args), self._ends[1])
        literals = {k: known_index(x) for k, x in arrays}
        return Program.of(
            closed,
            len(scope.written),
            [c.origin for c in (*scope.written, *scope.read)],
            {k: x for k, x in literals.items() if x is not None},
            fixed,
        )
