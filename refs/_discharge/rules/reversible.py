"""Rule of `reversible`: a pure function with a derivative that undoes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from refs import _jax
from refs._discharge.cells import Cell, merge, split
from refs._discharge.interpreter import Context
from refs._discharge.registry import register
from refs._reversible.call import differentiable
from refs._reversible.primitive import Settings, reversible_p
from refs._reversible.program import Contents, Program, known_index
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
    scope = ctx.scope((closed, args))
    n_written, n_constants = len(scope.written), len(scope.constants)

    def parts(inputs: Sequence[Any]) -> tuple[Any, Any, Any]:
        end = n_written + n_constants
        return inputs[:n_written], inputs[n_written:end], inputs[end:]

    def plain(inputs: list[Value]) -> list[Value]:
        state, constants, arrays = parts(inputs)
        out, new = scope.run(closed, merge(args, arrays), state, constants)
        return [*map(_jax.output, out), *new]

    inputs = [*map(_jax.output, (*scope.state, *scope.constants, *split(args)))]
    types = [*map(jax.typeof, inputs)]

    def program() -> Program:
        state, constants, arrays = parts(types)
        return Program.of(
            closed,
            [id(a) if isinstance(a, Cell) else known_index(a) for a in args],
            [Contents(id(c), c.origin, t) for c, t in zip(scope.written, state, strict=True)],
            [Contents(id(c), c.origin, t) for c, t in zip(scope.read, constants, strict=False)],
            constants[len(scope.read) :],
            arrays,
            lambda ref: id(scope.bindings.find(ref)),
            settings.fixed,
        )

    is_divided = ctx.lanes is not None and (ctx.lanes.mask is not None or bool(scope.sums))
    if is_divided or scope.places:
        out = plain(inputs)
    else:
        out = differentiable(program, settings, plain)(inputs)
    n_out = len(closed.out_avals)
    scope.update(out[n_out:])
    return out[:n_out]
