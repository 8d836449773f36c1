"""The choice of the equations that are discharged: those that involve a ref of the program.

The ref is among the operands, or a jaxpr that the equation runs closes over it. Any other equation
is bound as it is, even if it has refs of its own inside, as a Pallas kernel has. But where a
function of arrays makes refs, its jaxpr is discharged within the equation: JAX lowers few such
functions.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from refs import _jax
from refs._discharge.cells import Cell
from refs._discharge.registry import Rule, rule_for
from refs._handles.access import describe
from refs._handles.predicates import is_ref
from refs._origin import user_site
from refs._tracing import touch_analysis
from refs._tracing.derivative_rules import has_custom_rules
from refs._tracing.facts import can_fail
from refs._types import ClosedJaxpr, Eqn, Jaxpr, Primitive, Value
from refs.errors import MissingRuleError


def rule_of(eqn: Eqn, args: Sequence[Value], must_discharge: bool) -> Rule | None:
    """The rule that discharges an equation, or None if it is bound as it is.

    If the primitive has a rule, refs that it makes or that its jaxprs make count, too, and the rule
    applies if `must_discharge` in any case. If it has none, only the refs of the program count.

    Raises:
      MissingRuleError: if a primitive without a rule takes a ref of the program.
    """
    rule = rule_for(_jax.primitive_of(eqn))
    if rule is not None:
        return rule if must_discharge or _involves_refs(eqn, args) else None
    inner = _jax.jaxprs_in(eqn.params)
    described = next(taken(args, inner), None)
    if described is None:
        return _discharge_inside if any(map(_makes_refs, inner)) else None
    raise MissingRuleError(
        f"primitive `{eqn.primitive}` at {_jax.user_line(eqn)} takes {described}, and no "
        f"discharge rule is registered for it: {_INSTEAD.get(eqn.primitive.name, _OTHERWISE)}"
    )


_OTHERWISE = (
    "read the ref before (`ref[...]`) and write it after, or register a rule with "
    "`refs.extend.register`"
)
_KERNEL = (
    "Pallas' `core_map` works on refs only. Make it a kernel of values, `pl.kernel` or "
    "`pl.pallas_call`, give it the ref's, and write what it returns, `ref[...] = kernel(ref[...])`"
)
# By the primitive's name, as JAX renames some.
_INSTEAD = {"core_map": _KERNEL, "mpmd_map": _KERNEL}


class Operation(NamedTuple):
    """An operation that is run and not recorded: as much of an equation as rules look at.

    Attributes:
      is_used: whether its result is used.
    """

    primitive: Primitive
    params: dict[str, Any]
    is_used: bool = True


def refuse_hidden(operation: Eqn | Operation) -> None:
    """Raises where the derivative of an operation would leave out what a ref holds.

    Equinox makes what is no array a parameter of its primitives: a function, which may read a
    global ref, and with JAX before 0.12 a ref, too.
    """
    for within in _jax.all_equations([operation]):
        items = [x for value in within.params.values() if type(value) is tuple for x in value]
        for ref in filter(is_ref, itertools.chain.from_iterable(map(_held, items))):
            if jnp.issubdtype(ref.dtype, jnp.inexact):
                line = _jax.user_line(within) if hasattr(within, "source_info") else user_site()
                raise MissingRuleError(
                    f"derivative of primitive `{within.primitive}` at {line}, among whose "
                    f"parameters is {describe(ref)}, or a function that names it: what the ref "
                    "holds would count as constant. Read the ref before, `ref[...]`, and use the "
                    "value"
                )


def _held(parameter: Any) -> Iterable[Any]:
    """What a parameter is; of a function, what it closes over or finds among its globals."""
    if not inspect.isfunction(parameter):
        return (parameter,)
    names = inspect.getclosurevars(parameter)
    return itertools.chain(names.nonlocals.values(), names.globals.values())


def takes_or_makes_refs(operation: Any, operands: Sequence[Value]) -> bool:
    """Whether an operation takes a ref, or makes one."""
    return (
        operation.primitive in _MAKERS
        or _jax.is_scan_of_refs(operation)
        or any(map(is_ref, operands))
    )


_MAKERS = frozenset([_jax.new_ref_p, _jax.empty_ref_p])


def runs_over_refs(primitive: Primitive, inner: Sequence[ClosedJaxpr]) -> bool:
    """Whether `rule_of` would give a rule for an operation because of the jaxprs that it runs."""
    if rule_for(primitive) is not None:
        return any(map(touch_analysis.holds_refs, inner))
    return any(touch_analysis.closed_over(closed) or _makes_refs(closed) for closed in inner)


def only_computes(closed: ClosedJaxpr) -> bool:
    """Whether no refs, no derivative rules, no callbacks and no values of traces are in a jaxpr."""
    return not closed.consts and _only_computes(closed.jaxpr)


@_jax.once_per_jaxpr
def _only_computes(jaxpr: Jaxpr) -> bool:
    closed = _jax.as_closed(jaxpr)
    return not (
        touch_analysis.holds_refs(closed)
        or touch_analysis.closes_over_tracers(closed)
        or has_custom_rules(jaxpr)
        or can_fail(closed)
    )


def _involves_refs(eqn: Eqn, args: Sequence[Value]) -> bool:
    return (
        _jax.is_scan_of_refs(eqn)
        or any(isinstance(a, Cell) for a in args)
        or any(_jax.is_ref_type(v.aval) for v in eqn.outvars)
        or any(
            touch_analysis.holds_refs(closed) or touch_analysis.closes_over_tracers(closed)
            for closed in _jax.jaxprs_in(eqn.params)
        )
    )


def taken(args: Sequence[Value], inner: Sequence[ClosedJaxpr]) -> Iterator[str]:
    """Descriptions, for messages, of the refs of the program that an equation takes."""
    yield from (a.describe() for a in args if isinstance(a, Cell))
    for closed in inner:
        yield from map(describe, touch_analysis.closed_over(closed))


def _makes_refs(closed: ClosedJaxpr) -> bool:
    """True of a function of arrays that makes refs. A kernel is a function of refs."""
    return touch_analysis.uses_refs(closed) and not any(
        _jax.is_ref_type(v.aval) for v in closed.jaxpr.invars
    )


def _discharge_inside(ctx: Any, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    """Binds an equation as it is, but with those of its jaxprs that make refs discharged."""

    def pure(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr | ClosedJaxpr:
        closed = _jax.as_closed(jaxpr)
        makes_refs = closed is jaxpr and _makes_refs(closed)
        arguments = map(_jax.AbstractArgument, closed.in_avals)
        discharged = jax.make_jaxpr(lambda *xs: type(ctx)().eval(closed, xs))
        return discharged(*arguments) if makes_refs else jaxpr

    return _jax.bind_eqn(_jax.map_closed(eqn, pure), args)
