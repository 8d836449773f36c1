"""Whether an equation updates a value that was read from a ref, and how."""

from __future__ import annotations

from collections import Counter
from typing import Any

from jax import lax

from refs import _jax
from refs._tracing.facts import facts_of
from refs._tracing.touch import Touch
from refs._types import Atom, Eqn, Jaxpr


def uses_in(jaxpr: Jaxpr) -> Counter[Any]:
    """How often each variable of a jaxpr is used."""
    atoms = [v for eqn in jaxpr.eqns for v in eqn.invars] + list(jaxpr.outvars)
    return Counter(v for v in atoms if not isinstance(v, _jax.Literal))


def update_of(eqn: Eqn, k: int) -> Touch | None:
    """The kind of update by which an equation makes its result of its `k`-th operand, or None."""
    facts = facts_of(eqn)
    operand: Atom = eqn.invars[k]
    if facts.updates_flags and operand.aval.dtype == bool:
        return facts.updates_flags
    if facts.updates:
        return None if k and facts.of_first else facts.updates
    if eqn.primitive is _jax.jit_p or _is_scatter_with_derivative(eqn):
        [called] = _jax.jaxprs_in(eqn.params)
        return _update_inside(called.jaxpr, k)
    return None


def _is_scatter_with_derivative(eqn: Eqn) -> bool:
    """Whether an equation is a `scatter-mul` with a custom rule, as JAX's has no derivative.

    The rule of any other custom function may not be the derivative of what the function computes.
    """
    return _jax.primitive_of(eqn) is _jax.custom_jvp_call_p and any(
        e.primitive is lax.scatter_mul_p
        for called in _jax.jaxprs_in(eqn.params)
        for e in called.jaxpr.eqns
    )


def _update_inside(jaxpr: Jaxpr, k: int) -> Touch | None:
    """The kind of update by which a jaxpr makes its only output of its `k`-th input, or None."""
    v, kind, uses = jaxpr.invars[k], None, uses_in(jaxpr)
    for eqn in jaxpr.eqns:
        places = [j for j, x in enumerate(eqn.invars) if x is v]
        if not places:
            continue
        one = update_of(eqn, places[0])
        if uses[v] > 1 or one is None or kind not in (None, one):
            return None
        v, kind = eqn.outvars[0], one
    return kind if len(jaxpr.outvars) == 1 and jaxpr.outvars[0] is v and uses[v] == 1 else None
