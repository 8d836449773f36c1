"""For rule authors: how to discharge a primitive of your own that takes refs.

A rule is a function of the interpretation under way, the equation, and its operands: an array
operand is a value, a ref operand a `Cell`, to be read and written. It returns a list of values.

    from refs import extend

    @extend.register(my_scale_p)  # scales a ref by a number, in place
    def discharge_my_scale(ctx, eqn, args):
        cell, factor = args
        cell.write(cell.read() * factor)
        return []

A primitive with a jaxpr among its parameters runs it as a pure function through a scope: the
values of the cells that the jaxpr writes go in as state, and their new values come out.

    @extend.register(my_call_p)  # runs its jaxpr once
    def discharge_my_call(ctx, eqn, args):
        scope = ctx.scope((eqn.params["jaxpr"], args))
        run = scope.function(eqn.params["jaxpr"], args)  # of arrays, state and constants
        return scope.call(my_call(run), args)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from refs.discharge import _registry
from refs.discharge._cells import Cell as Cell
from refs.discharge._cells import root
from refs.discharge._interpreter import Context as Context
from refs.discharge._interpreter import Scope as Scope
from refs.discharge._interpreter import merge as merge
from refs.discharge._interpreter import split as split
from refs.discharge._lanes import Sum
from refs.discharge._registry import Rule as Rule


def register(*primitives: Any) -> Callable[[Rule], Rule]:
    """Registers the decorated rule for primitives, and returns it unchanged.

    In `refs.vmap`, where lanes go different ways, all of them run the rule; what it writes counts
    for those that are meant.
    """

    def registering(rule: Rule) -> Rule:
        _registry.register(*primitives)(_for_lanes(rule))
        return rule

    return registering


def _for_lanes(rule: Rule) -> Rule:
    @functools.wraps(rule)
    def masked(ctx: Context, eqn: Any, args: Sequence[Any]) -> list[Any]:
        lanes = ctx.lanes
        if lanes is None or lanes.mask is None:
            return rule(ctx, eqn, args)
        cells = {root(c) for c in (*args, *ctx.cells.values()) if isinstance(c, Cell)}
        before = [(c, c.read()) for c in cells if not isinstance(c, Sum) and c.ended is None]
        out = rule(ctx, eqn, args)
        for cell, old in before:
            if cell.ended is None and (new := cell.read()) is not old:
                cell.write(lanes.select(new, old))
        return out

    return masked
