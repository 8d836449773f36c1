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

from refs.discharge._cells import Cell as Cell
from refs.discharge._interpreter import Context as Context
from refs.discharge._interpreter import Scope as Scope
from refs.discharge._interpreter import merge as merge
from refs.discharge._interpreter import split as split
from refs.discharge._registry import Rule as Rule
from refs.discharge._registry import register as register
