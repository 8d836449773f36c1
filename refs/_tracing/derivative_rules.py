"""Custom derivative rules in a jaxpr: whether there are any, and which refs they touch.

A forward rule is in no jaxpr: JAX traces it when it needs it, and then it is too late to have a
loop around it carry the refs that the rule touches. So the rule is traced once before. What a
backward rule touches is known once it has run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from refs import _jax
from refs._tracing import touch_analysis
from refs._tracing.facts import inner_calls
from refs._tracing.touch_analysis import Touch, Touches
from refs._types import ClosedJaxpr, Eqn, Jaxpr

# Whether a jaxpr has, at any depth, a custom rule for the backward pass; any custom rule.
has_custom_vjp = _jax.anywhere(_jax.is_custom_vjp)
has_custom_rules = _jax.anywhere(_jax.has_rules)


def touches(closed: ClosedJaxpr) -> Touches:
    """`touch_analysis.touches` of a differentiated jaxpr: its forward rules are counted.

    There may be traced refs among the hidden ones, too.
    """
    return with_rules(closed, touch_analysis.touches(closed))


def with_rules(closed: ClosedJaxpr, found: Touches) -> Touches:
    """The touches of a jaxpr and those of the forward rules in it, at any depth."""
    jaxpr = closed.jaxpr
    touched = _touched_in(jaxpr)
    if not touched:
        return found
    variables = (*jaxpr.constvars, *jaxpr.invars)
    kinds = dict(zip(map(id, variables), (*found.consts, *found.inputs), strict=True))
    made_here = {id(v) for eqn in jaxpr.eqns for v in eqn.outvars}
    hidden = [*found.hidden]
    for ref, kind in touched:
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


def touched_by_rules(eqn: Eqn) -> list[tuple[Any, Touch]]:
    """The touches of forward rules in a differentiated equation, and of the jaxprs around them.

    The refs are variables of the equation, concrete refs and traced ones.
    """
    if _jax.has_rules(eqn):
        rule = _forward_rule(eqn)
        operands = eqn.invars[len(eqn.invars) - len(rule.operands) :]
        return [*rule.closed_over, *_of_refs(operands, rule.operands)]
    touched: list[tuple[Any, Touch]] = []
    for called, operands in inner_calls(eqn):
        if has_custom_rules(called.jaxpr):
            found = touches(called)
            touched += _of_refs([*called.consts, *operands], [*found.consts, *found.inputs])
            touched += found.hidden
    return touched


@_jax.once_per_jaxpr
def _touched_in(jaxpr: Jaxpr) -> list[tuple[Any, Touch]]:
    if not has_custom_rules(jaxpr):
        return []
    return [touched for eqn in jaxpr.eqns for touched in touched_by_rules(eqn)]


class _ForwardRule(NamedTuple):
    """The touches of a forward rule; `is_closed`: whether it closes over arrays only."""

    closed_over: Sequence[tuple[Any, Touch]] = ()
    operands: Sequence[Touch] = ()
    is_closed: bool = False


def _forward_rule(eqn: Eqn) -> _ForwardRule:
    rules = _jax.rules_of(eqn)
    if rules not in _forward_rules:
        _forward_rules[rules] = _traced_rule(eqn)
    return _forward_rules[rules]


_forward_rules: WeakKeyDictionary[Any, _ForwardRule] = WeakKeyDictionary()


def _traced_rule(eqn: Eqn) -> _ForwardRule:
    try:
        jaxpr, consts, operands = _jax.forward_rule(eqn)
    except Exception:  # JAX may never trace the rule. If it does, this is raised then.
        return _ForwardRule()
    found = touch_analysis.jaxpr_touches(jaxpr, consts[: len(jaxpr.constvars)])
    kinds = [*found.consts, *found.inputs]
    closed_over = [*_of_refs(consts, kinds[: len(consts)]), *found.hidden]
    is_closed = are_arrays(consts) and not found.hidden
    return _ForwardRule(closed_over, kinds[len(consts) :][: len(operands)], is_closed)


def _of_refs(items: Sequence[Any], kinds: Sequence[Touch]) -> Iterator[tuple[Any, Touch]]:
    for x, kind in zip(items, kinds, strict=True):
        if isinstance(x, _jax.NativeRef) or _jax.is_ref_type(getattr(x, "aval", None)):
            yield x, kind


def is_open(eqn: Eqn, is_known: bool = False) -> bool:
    """Whether rules in an equation may touch refs or close over values of the trace around it.

    A backward rule may. With `is_known`, one that has run, and closes over arrays only, doesn't.
    """
    if not _jax.has_rules(eqn):
        return any(is_open_in(inner.jaxpr, is_known) for inner in _jax.jaxprs_in(eqn.params))
    is_closed = not _jax.is_custom_vjp(eqn) or (is_known and _jax.rules_of(eqn) in _closed)
    return not (is_closed and _forward_rule(eqn).is_closed)


def is_open_in(jaxpr: Jaxpr, is_known: bool = True) -> bool:
    """`is_open` of any equation of a jaxpr."""
    return has_custom_rules(jaxpr) and any(is_open(eqn, is_known) for eqn in jaxpr.eqns)


def rules_may_touch_refs(jaxpr: Jaxpr) -> bool:
    """Whether derivative rules in a jaxpr may touch refs, their own function's operands too."""
    return has_custom_rules(jaxpr) and any(
        is_open(eqn, is_known=True) or any(_jax.is_ref_type(v.aval) for v in eqn.invars)
        if _jax.has_rules(eqn)
        else any(rules_may_touch_refs(inner.jaxpr) for inner in _jax.jaxprs_in(eqn.params))
        for eqn in jaxpr.eqns
    )


def are_arrays(consts: Sequence[Any]) -> bool:
    """Whether what a rule closes over is neither a ref nor a value of a trace."""
    return not any(isinstance(c, _jax.Tracer | _jax.NativeRef) for c in consts)


def note_closed(eqn: Eqn) -> None:
    """Notes that the backward rule of a function has run, and closes over arrays only."""
    _closed.add(_jax.rules_of(eqn))


_closed: WeakSet[Any] = WeakSet()
