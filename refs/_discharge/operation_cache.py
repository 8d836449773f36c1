"""A cache of operations outside of `jit`: one that is repeated is discharged and compiled once.

When a loop, a branch or a `jit` is called again, its jaxprs are the same objects. So the compiled
forms of an operation are cached with its jaxprs, for as long as these live. A compiled form holds
neither the jaxprs nor the refs that they close over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from refs import _jax
from refs._discharge.cells import Cell
from refs._discharge.interpreter import Context
from refs._tracing import derivative_rules, touch_analysis
from refs._tracing.trace import unique
from refs._tracing.weak_memo import WeakMemo
from refs._types import Primitive, PyTree, Value


def made_of(primitive: Primitive, params: dict[str, Any]) -> dict[Any, Any] | None:
    """The cached forms of an operation, by the pattern of its refs; None if none can be cached.

    If derivative rules in it may touch refs, or if it closes over tracers, the form may differ from
    call to call.
    """
    jaxprs, rest = _jax.split_params(params)
    closed = [*map(_jax.as_closed, jaxprs)]
    if (
        not jaxprs
        or any(
            derivative_rules.is_open_in(c.jaxpr) or touch_analysis.closes_over_tracers(c)
            for c in closed
        )
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

    `written`: the positions, among the refs, of those that the new contents belong to.
    """

    call: Callable[..., Any]
    written: Sequence[int]


def call(
    made: dict[Any, Any],
    evaluate: Callable[[Context, Sequence[Any]], list[Any]],
    context: Callable[[], Context],
    operands: Sequence[Value],
) -> list[Any]:
    """`evaluate(context(), operands)`, by a compiled form in `made` if the operation is repeated.

    The operands are values and cells. The first time, an operation isn't compiled: there may be no
    second time.
    """
    places = [k for k, x in enumerate(operands) if isinstance(x, Cell)]
    cells, pattern = unique([operands[k] for k in places])
    contents = [cell.read() for cell in cells]
    arrays = [x for x in operands if not isinstance(x, Cell)]
    types = tuple(map(jax.typeof, (*contents, *arrays)))
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
    contents: Sequence[Value],
    arrays: Sequence[Value],
) -> Compiled:
    written: list[int] = []

    def pure(contents: Sequence[Value], arrays: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        inside = {
            id(cell): Cell(value, cell.origin) for cell, value in zip(cells, contents, strict=True)
        }
        rest = iter(arrays)
        given = [inside[id(x)] if isinstance(x, Cell) else next(rest) for x in operands]
        out = evaluate(context(), given)
        new = [cell.read() for cell in inside.values()]
        written[:] = [k for k, value in enumerate(new) if value is not contents[k]]
        return out, [new[k] for k in written]

    # Only the jaxpr of `pure` is kept, as `pure` holds the refs. It is traced in `eval_trace`, as
    # rules in it hold the trace around them.
    types = jax.tree.map(lambda x: _jax.AbstractArgument(jax.typeof(x)), ([*contents], [*arrays]))
    with _jax.set_current_trace(_jax.eval_trace):
        jaxpr, out = jax.make_jaxpr(pure, return_shape=True)(*types)
    tree = jax.tree.structure(out)

    # Closed-over arrays are operands, as they are where the operation isn't compiled: XLA computes
    # otherwise with constants.
    @jax.jit
    def run(consts: Sequence[Value], contents: Sequence[Value], arrays: Sequence[Value]) -> PyTree:
        out = _jax.eval_jaxpr(jaxpr, consts, [*contents, *arrays])
        return tree.unflatten(out)

    return Compiled(functools.partial(run, jaxpr.consts), written)
