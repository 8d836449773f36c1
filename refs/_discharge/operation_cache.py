"""Operations that come again, outside of `jit`: each is discharged and compiled once more.

JAX knows a loop, a branch or a `jit` that it has run before by its jaxprs, which come again as the
same objects. So what has been made of an operation is kept with them, for as long as they live. It
holds none of them, nor the refs that they close over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from refs import _jax
from refs._discharge.cells import Cell
from refs._discharge.interpreter import Context
from refs._discharge.rule_closures import is_open
from refs._tracing import touch_analysis
from refs._tracing.trace import AbstractArgument, unique
from refs._tracing.weak_memo import WeakMemo
from refs._types import Primitive, Value


def made_of(primitive: Primitive, params: dict[str, Any]) -> dict[Any, Any] | None:
    """What has been made of an operation, by its refs' pattern. None where it may differ by call.

    That is where derivative rules in it may touch refs, or close over what is traced.
    """
    jaxprs, rest = _jax.split_params(params)
    closed = [*map(_jax.as_closed, jaxprs)]
    if (
        not jaxprs
        or any(is_open(c.jaxpr) or touch_analysis.closes_over_tracers(c) for c in closed)
        or any(_jax.is_ref_type(aval) for c in closed for aval in c.out_avals)
    ):
        return None
    try:
        return _made.of(jaxprs).setdefault((primitive, rest), {})
    except TypeError:  # a parameter that has no hash
        return None


_made = WeakMemo()


class Compiled(NamedTuple):
    """An operation as a function `call(contents, arrays) -> (outputs, new contents)`.

    `written` says which of the refs the new contents are of.
    """

    call: Callable[..., Any]
    written: Sequence[int]


def call(
    made: dict[Any, Any],
    evaluate: Callable[[Context, Sequence[Any]], list[Any]],
    context: Callable[[], Context],
    operands: Sequence[Value],
) -> list[Any]:
    """`evaluate(context(), operands)`; what is made of it stays in `made`.

    The operands are values and cells. An operation that comes for the first time is not compiled:
    it may be the last.
    """
    places = [k for k, x in enumerate(operands) if isinstance(x, Cell)]
    cells, pattern = unique([operands[k] for k in places])
    contents = [cell.read() for cell in cells]
    arrays = [x for x in operands if not isinstance(x, Cell)]
    types = tuple(map(_jax.typeof, (*contents, *arrays)))
    key = (tuple(places), pattern, types, _jax.trace_context())
    if key not in made:
        made[key] = None
        return evaluate(context(), operands)
    if made[key] is None:
        made[key] = _compiled(evaluate, context, operands, cells, contents, arrays)
    out, new = made[key].call(contents, arrays)
    for k, value in zip(made[key].written, new, strict=True):
        cells[k].write(value)
    return out


def _compiled(
    evaluate: Callable[[Context, Sequence[Any]], list[Any]],
    context: Callable[[], Context],
    operands: Sequence[Value],
    cells: Sequence[Cell],
    contents: Sequence[Any],
    arrays: Sequence[Value],
) -> Compiled:
    written: list[int] = []

    def pure(contents: Sequence[Any], arrays: Sequence[Value]) -> Any:
        inside = {
            id(cell): Cell(value, cell.origin) for cell, value in zip(cells, contents, strict=True)
        }
        rest = iter(arrays)
        given = [inside[id(x)] if isinstance(x, Cell) else next(rest) for x in operands]
        out = evaluate(context(), given)
        new = [cell.read() for cell in inside.values()]
        written[:] = [k for k, value in enumerate(new) if value is not contents[k]]
        return out, [new[k] for k in written]

    # Only its jaxpr is kept: the function holds the refs, and rules in the jaxpr, the trace around.
    types = jax.tree.map(lambda x: AbstractArgument(_jax.typeof(x)), ([*contents], [*arrays]))
    with _jax.set_current_trace(_jax.eval_trace):
        jaxpr, out = jax.make_jaxpr(pure, return_shape=True)(*types)
    tree = jax.tree.structure(out)

    @jax.jit
    def run(contents: Sequence[Any], arrays: Sequence[Value]) -> Any:
        out = _jax.eval_jaxpr(jaxpr, jaxpr.consts, [*contents, *arrays])
        return tree.unflatten(out)

    return Compiled(run, written)
