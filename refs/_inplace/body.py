"""A jaxpr while it is rewritten: equations that are replaced, added and put in another order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jaxlib
import numpy as np
from jax import lax

from refs import _jax
from refs._callbacks.primitives import host_callback_p
from refs._tracing.facts import facts_of
from refs._types import Atom, Aval, Eqn, Jaxpr, Value

# From there on XLA expands `optimization_barrier` after it fuses, and copies less in branches.
COPIES_LESS = jaxlib.version.__version_info__ >= (0, 11, 2)

# Below this many elements a copy is as cheap as what prevents it.
SMALLEST = 64


class Body:
    """The equations of a jaxpr, any order in which they can run, and what comes out."""

    def __init__(self, jaxpr: Jaxpr):
        self.jaxpr = jaxpr
        self.eqns = list(jaxpr.eqns)
        self.outvars = list(jaxpr.outvars)

    def close(self) -> Any:
        """The jaxpr, without what nobody needs."""
        needed = {v for v in self.outvars if is_var(v)}
        eqns = []
        for eqn in reversed(self.eqns):
            if eqn.effects or not needed.isdisjoint(eqn.outvars) or must_run(eqn):
                needed.update(filter(is_var, eqn.invars))
                eqns.append(eqn)
        return self.jaxpr.replace(eqns=eqns[::-1], outvars=self.outvars)

    def producers(self) -> dict[Any, int]:
        """Which equation makes a variable."""
        return {v: k for k, eqn in enumerate(self.eqns) for v in eqn.outvars}

    def consumers(self) -> dict[Any, list[int]]:
        """Which equations take a variable, each once."""
        found: dict[Any, list[int]] = {}
        for k, eqn in enumerate(self.eqns):
            for v in {v for v in eqn.invars if is_var(v)}:
                found.setdefault(v, []).append(k)
        return found

    def constants(self) -> set[Any]:
        """The variables that XLA computes before the program runs."""
        found: set[Any] = set()
        for eqn in self.eqns:
            if all(not is_var(v) or v in found for v in eqn.invars) and not eqn.effects:
                found.update(eqn.outvars)
        return found


def must_run(eqn: Eqn) -> bool:
    """Whether an equation, or one inside it, calls a function that may do anything.

    JAX calls programs slower that have an effect, so what such a call returns stands for one; but
    not if it is overwritten.
    """
    if eqn.primitive is host_callback_p:
        return eqn.params["plan"].spec.is_io
    return any(_has_calls(inner.jaxpr) for inner in _jax.jaxprs_in(eqn.params))


def _has_calls(jaxpr: Jaxpr) -> bool:
    if jaxpr not in _calls:
        _calls[jaxpr] = any(map(must_run, jaxpr.eqns))
    return _calls[jaxpr]


_calls: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def is_var(atom: Atom) -> bool:
    return not isinstance(atom, _jax.Literal)


def size(atom: Atom) -> int:
    """How many elements a variable has; what isn't an array has none."""
    n = 1
    for d in getattr(atom.aval, "shape", (0,)):
        if not isinstance(d, int):  # a dimension of a shape-polymorphic export
            return 0
        n *= d
    return n


def is_buffer(atom: Atom) -> bool:
    """Whether it is worth it not to copy an array."""
    return is_var(atom) and size(atom) >= SMALLEST


def is_small(atom: Atom, buffer: Atom) -> bool:
    """Whether an array is so much smaller than a buffer that it may be kept instead."""
    return 2 * size(atom) <= size(buffer)


def is_update(eqn: Eqn) -> bool:
    """Whether it changes a few cells of its first operand, and is that operand afterwards."""
    return facts_of(eqn.primitive).in_place == "update"


def may_update(eqn: Eqn) -> bool:
    """Whether it, or something inside it, may update one of its operands."""
    return is_update(eqn) or carries(eqn) is not None or eqn.primitive is _jax.cond_p


def is_add(eqn: Eqn) -> bool:
    return facts_of(eqn.primitive).in_place == "add"


def carries(eqn: Eqn) -> tuple[int, int] | None:
    """Which operands of a loop, or a callback, its first outputs go on from: the first one, and
    how many. None of any other equation.
    """
    found = facts_of(eqn.primitive).carries
    return found(eqn) if found is not None else None


def can_pass(atom: Atom) -> bool:
    """Whether a conditional can return zeros instead of an array: not if it is a PRNG key."""
    return isinstance(getattr(atom.aval, "dtype", None), np.dtype)


def renamed(atoms: Sequence[Atom], names: dict[Any, Any]) -> list[Any]:
    """What variables are called otherwise, by these names."""
    return [names.get(v, v) if is_var(v) else v for v in atoms]


def substitute(eqn: Eqn, names: dict[Any, Any]) -> Any:
    """The equation with other names for its operands."""
    invars = renamed(eqn.invars, names)
    return eqn.replace(invars=invars) if invars != eqn.invars else eqn


def splice(
    fun: Callable[..., Any], atoms: Sequence[Atom], like: Any, **static: Any
) -> tuple[list[Any], list[Any]]:
    """The equations of a function of these atoms, as if they stood where `like` does.

    Returns the equations and what comes out of them. `fun` must be a function of a module, and
    what else it takes hashable: its equations are kept, for the next atoms of these types.
    """
    template = _template(fun, tuple(a.aval for a in atoms), tuple(static.items()))
    names: dict[Any, Any] = dict(zip(template.invars, atoms, strict=True))
    eqns = []
    for eqn in template.eqns:
        outvars = [_jax.new_var(v.aval) for v in eqn.outvars]
        names.update(zip(eqn.outvars, outvars, strict=True))
        invars = renamed(eqn.invars, names)
        eqns.append(
            eqn.replace(invars=invars, outvars=outvars, source_info=like.source_info, ctx=like.ctx)
        )
    return eqns, renamed(template.outvars, names)


def barrier(*operands: Value) -> Any:
    """`lax.optimization_barrier`, to be spliced."""
    return lax.optimization_barrier(operands)


@functools.lru_cache(maxsize=1024)
def _template(fun: Callable[..., Any], avals: tuple[Aval, ...], static: Any) -> Any:
    types = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False))
        for a in avals
    ]
    # The types are what they are, whatever is the rule now, and must stay so.
    with jax.enable_x64(True):
        return jax.make_jaxpr(functools.partial(fun, **dict(static)))(*types).jaxpr
