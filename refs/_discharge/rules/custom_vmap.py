"""Rule of `custom_vmap`: it stays one, and the user's batching rule gets refs, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from refs import _jax
from refs._discharge.cells import Cell, Row, merge
from refs._discharge.interpreter import Context
from refs._discharge.lanes import Accumulator
from refs._discharge.registry import register
from refs._handles.ref_type import RefType
from refs._types import Eqn, Value
from refs.errors import RefValueError


@register(_jax.custom_vmap_p)
def discharge_custom_vmap(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    [closed] = _jax.jaxprs_in(eqn.params)
    scope = ctx.scope((closed, args))
    rule = _jax.vmap_rule(eqn.params)
    call = jax.custom_batching.custom_vmap(scope.function(closed, args))

    @call.def_vmap
    def run_rule(
        size: int,
        is_batched: tuple[list[bool], list[bool], list[bool]],
        arrays: list[Value],
        state: list[Value],
        constants: list[Value],
    ) -> Any:
        """Runs the user's rule on refs that hold the contents of all lanes' refs, batched."""
        for a in args:
            if isinstance(a, Row | Accumulator):
                raise RefValueError(
                    f"vmap: {a.describe()}, {_what(a)}, can't be given to the batching rule of the "
                    f"custom_vmap function at {_jax.user_line(eqn)}: let the function return what "
                    "is to be written, and write it outside"
                )
        inside = scope.enter(state, constants)
        inside.ctx.lanes = None
        of_arrays, of_state, of_constants = is_batched
        of_cell = dict(zip(scope.written, of_state, strict=True))
        of_cell |= dict(zip(scope.read, of_constants[: len(scope.read)], strict=True))
        rest = iter(of_arrays)
        flags = [of_cell.get(a, False) if isinstance(a, Cell) else next(rest) for a in args]
        of_outputs: list[bool] = []

        def over_refs(*operands: Value) -> list[Value]:
            out, of_outputs[:] = rule(size, flags, operands)
            return out

        operands = inside.args(merge(args, arrays))
        traced = jax.make_jaxpr(over_refs)(*map(_abstract, operands))
        out = inside.ctx.eval(traced, operands)
        return (out, inside.state), (of_outputs, of_state)

    return scope.call(call, args)


def _what(cell: Cell) -> str:
    return "a row of which is at hand" if isinstance(cell, Row) else "which the lanes share"


def _abstract(x: Value) -> _jax.AbstractArgument:
    """An argument of a trace that stands for a value or, if `x` is a cell, for a ref."""
    if not isinstance(x, Cell):
        return _jax.AbstractArgument(jax.typeof(x))
    return _jax.AbstractArgument(RefType.of(_jax.AbstractRef(jax.typeof(x.read())), x.origin))
