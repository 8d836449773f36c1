"""Custom derivative rules in a jaxpr: whether there are any, and which refs they touch.

A forward rule is in no jaxpr: JAX traces it when it needs it, and then it is too late to have a
loop around it carry the refs that the rule touches. So the rule is traced once before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from refs import _jax
from refs._tracing import touch_analysis
from refs._tracing.facts import inner_calls
from refs._tracing.touch_analysis import Touch, Touches
from refs._types import ClosedJaxpr, Eqn


def touches(closed: ClosedJaxpr) -> Touches:
    """`touch_analysis.touches` of a differentiated jaxpr: its forward rules are counted.

    There may be traced refs among the hidden ones, too.
    """
    return with_rules(closed, touch_analysis.touches(closed))


def with_rules(closed: ClosedJaxpr, found: Touches) -> Touches:
    """The touches of a jaxpr and those of the forward rules in it, at any depth."""
    jaxpr = closed.jaxpr
    if not has_custom_rules(jaxpr):
        return found
    variables = (*jaxpr.constvars, *jaxpr.invars)
    kinds = dict(zip(map(id, variables), (*found.consts, *found.inputs), strict=True))
    made_here = {id(v) for eqn in jaxpr.eqns for v in eqn.outvars}
    hidden = [*found.hidden]
    for eqn in jaxpr.eqns:
        for ref, kind in touched_by_rules(eqn):
            name = id(_jax.var_of(ref) if isinstance(ref, _jax.Tracer) else ref)
            if name in kinds:
                kinds[name] |= kind
            elif name not in made_here:
                hidden.append((ref, kind))
    consts, inputs = ([kinds[id(v)] for v in vs] for vs in (jaxpr.constvars, jaxpr.invars))
    return Touches(tuple(consts), tuple(inputs), tuple(hidden))


def touches_of_call(eqn: Eqn, closed: ClosedJaxpr) -> Touches:
    """`touches` of a function that has a rule, and of the rule.

    A ref that the function is given and doesn't touch has `Touch.NONE`, even if the rule touches
    it: the caller makes that `Touch.HELD`.
    """
    found = touch_analysis.touches(closed)
    kinds: dict[int, Touch] = {}
    for v, kind in zip(eqn.invars, found.inputs, strict=True):
        kinds[id(v)] = kinds.get(id(v), Touch.NONE) | kind
    hidden = [*found.hidden]
    for ref, kind in touched_by_rules(eqn):
        if id(ref) not in kinds:
            hidden.append((ref, kind))
        elif kinds[id(ref)]:
            kinds[id(ref)] |= kind
    return Touches(found.consts, tuple(kinds[id(v)] for v in eqn.invars), tuple(hidden))


def touched_by_rules(eqn: Eqn) -> Iterator[tuple[Any, Touch]]:
    """The touches of forward rules in a differentiated equation, and of the jaxprs around them.

    The refs are variables of the equation, concrete refs and traced ones.
    """
    if not _jax.has_rules(eqn):
        for called, operands in inner_calls(eqn):
            if has_custom_rules(called.jaxpr):
                found = touches(called)
                yield from _refs([*called.consts, *operands], [*found.consts, *found.inputs])
                yield from found.hidden
        return
    try:
        jaxpr, consts, operands = _jax.forward_rule(eqn)
    except Exception:  # JAX may never trace the rule. If it does, this is raised then.
        return
    found = touch_analysis.jaxpr_touches(jaxpr, consts[: len(jaxpr.constvars)])
    given = [*consts, *operands]
    yield from _refs(given, [*found.consts, *found.inputs][: len(given)])
    yield from found.hidden


def _refs(items: Sequence[Any], kinds: Sequence[Touch]) -> Iterator[tuple[Any, Touch]]:
    for x, kind in zip(items, kinds, strict=True):
        if isinstance(x, _jax.NativeRef) or _jax.is_ref_type(getattr(x, "aval", None)):
            yield x, kind


# Whether a jaxpr has, at any depth, a custom rule for the backward pass; any custom rule.
has_custom_vjp = _jax.anywhere(_jax.is_custom_vjp)
has_custom_rules = _jax.anywhere(_jax.has_rules)
