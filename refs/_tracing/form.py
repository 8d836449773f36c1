"""The form of a jaxpr: equal for programs that do the same, though traced from other functions."""

from __future__ import annotations

import types
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

from refs import _jax
from refs._types import Atom, ClosedJaxpr, Eqn, Jaxpr


class NoForm(TypeError):
    """A program that can't be compared with another one."""


def form_of(closed: ClosedJaxpr) -> Hashable:
    """A key: what is equal computes the same from constants and inputs of the same types.

    It is kept, so it holds no arrays and no refs. What derivatives would be doesn't count.

    Raises:
      NoForm: if a jaxpr inside has constants, or calls a function, of a callback for instance, that
        may hold some. `TypeError` if a parameter has no hash.
    """
    numbers: dict[Any, int] = {}

    def named(atom: Atom) -> Hashable:
        if isinstance(atom, _jax.Literal):
            return atom.aval, np.asarray(atom.val).tobytes()
        return numbers.setdefault(atom, len(numbers))

    def equation(eqn: Eqn) -> Hashable:
        inputs, outputs = tuple(map(named, eqn.invars)), tuple(map(named, eqn.outvars))
        avals = tuple(v.aval for v in eqn.outvars)
        return _jax.primitive_of(eqn), inputs, outputs, avals, eqn.ctx, _params_of(eqn)

    jaxpr: Jaxpr = closed.jaxpr
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    return (
        tuple((named(v), v.aval) for v in inputs),
        tuple(map(equation, jaxpr.eqns)),
        tuple(map(named, jaxpr.outvars)),
    )


def _params_of(eqn: Eqn) -> Hashable:
    jaxprs, rest = _jax.split_params(eqn.params)
    inner = [_jax.as_closed(x) for x in jaxprs]
    # Only derivatives ask for rules and for policies.
    rest = () if _jax.has_rules(eqn) else tuple(x for x in rest if x[0] != "policy")
    if any(x.consts for x in inner) or _may_hold(rest):
        raise NoForm
    return tuple(map(form_of, inner)), rest


def _may_hold(param: Any) -> bool:
    """Whether a parameter is a function that may hold values, or has one in it."""
    if isinstance(param, tuple | list):
        return any(map(_may_hold, param))
    if isinstance(param, types.FunctionType):
        return param.__closure__ is not None
    return callable(param) and not isinstance(param, type | jax.sharding.Mesh)
