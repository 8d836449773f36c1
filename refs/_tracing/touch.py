"""What is done to a ref, and what an equation makes of a value that was read from one."""

from __future__ import annotations

import enum
from collections import Counter
from typing import Any

from refs import _jax


class Touch(enum.Flag):
    """What is done to a ref."""

    NONE = 0
    READ = 1
    WRITE = 2
    ACCUMULATE = 4
    MULTIPLY = 8
    MIN = 16
    MAX = 32
    HELD = 64  # only given to a function with derivative rules: those may touch it

    def settled(self, held: Touch) -> Touch:
        """What counts of it, where `held` is what rules may do to a ref that is only given.

        Where that is to read it, among lanes, it may be too much besides what else is done.
        """
        rest = self & ~Touch.HELD
        if rest == self or (held == Touch.READ and rest):
            return rest
        return rest | held

    @property
    def changes(self) -> bool:
        return bool(self & ~(Touch.READ | Touch.HELD))

    @property
    def method(self) -> str | None:
        """What is done to it, as a method of `ref.at[...]`, if that is all and has no order."""
        return _METHODS.get(self)

    @property
    def methods(self) -> list[str]:
        """All updates of the kind that `method` names."""
        return [name for kind, name in _METHODS.items() if kind & self]


_METHODS = {
    Touch.ACCUMULATE: "add",
    Touch.MULTIPLY: "multiply",
    Touch.MIN: "min",
    Touch.MAX: "max",
}


def uses_in(jaxpr: Any) -> Counter[Any]:
    """How often each variable of a jaxpr is used."""
    atoms = [v for eqn in jaxpr.eqns for v in eqn.invars] + list(jaxpr.outvars)
    return Counter(v for v in atoms if not isinstance(v, _jax.Literal))


# What each of these makes of an operand; of the first one only, where the others are no numbers.
_UPDATING = {
    "add": Touch.ACCUMULATE,
    "add_any": Touch.ACCUMULATE,
    "sub": Touch.ACCUMULATE,
    "scatter-add": Touch.ACCUMULATE,
    "mul": Touch.MULTIPLY,
    "scatter-mul": Touch.MULTIPLY,
    "min": Touch.MIN,
    "scatter-min": Touch.MIN,
    "max": Touch.MAX,
    "scatter-max": Touch.MAX,
}
_OF_FLAGS = {"or": Touch.MAX, "and": Touch.MIN}
_OF_FIRST = {"sub", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"}


def update_of(eqn: Any, k: int) -> Touch | None:
    """What an equation's result is of its `k`-th operand, if it is that updated."""
    name = eqn.primitive.name
    if name in _OF_FLAGS and eqn.invars[k].aval.dtype == bool:
        return _OF_FLAGS[name]
    if name in _UPDATING:
        return None if k and name in _OF_FIRST else _UPDATING[name]
    if eqn.primitive is _jax.jit_p or _is_scatter_with_derivative(eqn):
        [called] = _jax.jaxprs_in(eqn.params)
        return _update_inside(called.jaxpr, k)
    return None


def _is_scatter_with_derivative(eqn: Any) -> bool:
    """JAX's `scatter-mul` has none. Another function's rule may not be that of what it does."""
    return eqn.primitive is _jax.custom_jvp_call_p and any(
        e.primitive.name == "scatter-mul"
        for called in _jax.jaxprs_in(eqn.params)
        for e in called.jaxpr.eqns
    )


def _update_inside(jaxpr: Any, k: int) -> Touch | None:
    """What the result of a function is of its `k`-th argument, if it is that updated."""
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
