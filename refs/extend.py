"""For rule authors: how to discharge a primitive of your own that takes refs.

A rule is a function of the current interpretation, the equation, and its operands: an array operand
is a value, a ref operand a `Cell`, which the rule reads and writes. It returns a list of values.

    from refs import extend

    @extend.register(my_scale_p)  # scales a ref by a number, in place
    def discharge_my_scale(ctx, eqn, args):
        cell, factor = args
        cell.write(cell.read() * factor)
        return []

If the primitive has a jaxpr among its parameters, the rule runs it as a pure function, through a
scope: the values of the cells that the jaxpr writes go in as state, and their new values come out.

    @extend.register(my_call_p)  # runs its jaxpr once
    def discharge_my_call(ctx, eqn, args):
        scope = ctx.scope((eqn.params["jaxpr"], args))
        run = scope.function(eqn.params["jaxpr"], args)  # of arrays, state and constants
        return scope.call(my_call(run), args)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from refs._discharge import registry
from refs._discharge.cells import Cell as Cell
from refs._discharge.cells import merge as merge
from refs._discharge.cells import root
from refs._discharge.cells import split as split
from refs._discharge.interpreter import Context as Context
from refs._discharge.lanes import Accumulator
from refs._discharge.registry import Rule as Rule
from refs._discharge.scope import Scope as Scope
from refs._jax import AccumEffect as AccumEffect
from refs._jax import ReadEffect as ReadEffect
from refs._jax import WriteEffect as WriteEffect
from refs._tracing.facts import Facts as Facts
from refs._tracing.facts import inner_calls
from refs._tracing.touch import Touch as Touch
from refs._tracing.touch_analysis import touches_of
from refs._types import Eqn, Primitive, Value


def register(*primitives: Primitive, **facts: Any) -> Callable[[Rule], Rule]:
    """Registers the decorated rule for primitives, and returns it unchanged.

    The keywords are the attributes of `Facts`, such as `touch`, `inner`, `runs_once` and
    `can_fail`: facts about the primitives that JAX doesn't know.

    In `refs.vmap`, where lanes take different branches, the rule runs in all lanes, and its writes
    take effect in those that take the branch.
    """

    def registering(rule: Rule) -> Rule:
        registry.register(*primitives, **facts)(_guarded(rule))
        return rule

    return registering


def _guarded(rule: Rule) -> Rule:
    """The rule, which may not write refs that the primitive only reads.

    Where lanes have diverged, it runs in all of them, and its writes take effect in those that take
    part.
    """

    @functools.wraps(rule)
    def run(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
        with _masked(ctx, args), _sealed(eqn, args):
            return rule(ctx, eqn, args)

    return run


@contextmanager
def _masked(ctx: Context, args: Sequence[Value]) -> Iterator[None]:
    lanes = ctx.lanes
    if lanes is None or lanes.mask is None:
        yield
        return
    cells = {root(c) for c in (*args, *ctx.cells.values()) if isinstance(c, Cell)}
    before = [(c, c.read()) for c in cells if not isinstance(c, Accumulator) and c.ended is None]
    yield
    for cell, old in before:
        if cell.ended is None and (new := cell.read()) is not old:
            cell.write(lanes.select(new, old))


@contextmanager
def _sealed(eqn: Eqn, args: Sequence[Value]) -> Iterator[None]:
    """Meanwhile the refs that the primitive only reads, by its effects or facts, refuse writes."""
    if any(True for _ in inner_calls(eqn)):
        yield
        return
    cell_of = {v: root(c) for v, c in zip(eqn.invars, args, strict=True) if isinstance(c, Cell)}
    kinds = [(cell_of[v], kind) for v, kind in touches_of(eqn) if v in cell_of]
    only_read = {c for c, _ in kinds} - {c for c, kind in kinds if kind.changes}
    before = [(cell, cell.sealed) for cell in only_read]
    for cell in only_read:
        cell.sealed = (
            f"which `{eqn.primitive}` only reads, as its effects say: give it a `WriteEffect`"
        )
    try:
        yield
    finally:
        for cell, sealed in before:
            cell.sealed = sealed
