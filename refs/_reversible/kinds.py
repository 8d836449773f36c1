"""What an equation is to a reversible function, told from the equation and the jaxpr around it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from refs import _jax
from refs._reversible.nodes import Operand
from refs._reversible.parts import new_version_p, read_part_p, update_part_p
from refs._reversible.places import Literal
from refs._types import Atom, Eqn, Jaxpr

_CALLS = {
    _jax.jit_p,
    _jax.remat_p,
    *_jax.inlined_call_primitives,
    *_jax.metadata_call_primitives,
}
# Whether a jaxpr reads or writes refs, or makes them.
has_parts = _jax.anywhere(lambda eqn: eqn.primitive in (new_version_p, read_part_p, update_part_p))
# Whether it would be noticed if a jaxpr ran again: messages may come twice.
_is_noticed = _jax.anywhere(
    lambda eqn: (
        _jax.has_side_effects(eqn)
        and not _jax.jaxprs_in(eqn.params)
        and eqn.primitive not in _jax.debug_primitives
    )
)


def is_inlined(eqn: Eqn, touches_refs: bool) -> bool:
    """Whether it is a call that says no more than what is computed, or what is said must go."""
    if _jax.primitive_of(eqn) not in _CALLS:
        return False
    if eqn.primitive is _jax.jit_p:  # It may say where.
        p = _jax.jit_params(eqn.params)
        shardings = (*p.in_shardings, *p.out_shardings)
        return touches_refs or all(map(_jax.is_unspecified, shardings))
    return touches_refs or eqn.primitive in _jax.inlined_call_primitives


def can_be_undone(eqn: Eqn, touches_refs: bool) -> bool:
    """Whether a loop or branch may be one that is undone, and isn't left to JAX in any case."""
    # Each lane of a `vmap` would take its own number of steps.
    if eqn.primitive is _jax.while_p and eqn.params["cond_jaxpr"].out_avals[0].shape != ():
        return False
    inner = _jax.jaxprs_in(eqn.params)
    return touches_refs or not any(_is_noticed(closed.jaxpr) for closed in inner)


def key_of(eqn: Eqn, args: Sequence[Operand]) -> Any:
    """What the results of an equation depend on, if it may be evaluated once for several."""
    if eqn.effects or _jax.jaxprs_in(eqn.params):
        return None
    operands = [
        ("literal", str(a.aval), np.asarray(a.value).tobytes())
        if isinstance(a, Literal) and not isinstance(a.value, jax.Array) and a.aval.size <= 1000
        else a
        for a in args
    ]
    return (eqn.primitive, tuple(eqn.params.items()), *operands)


def stored_values(jaxpr: Jaxpr) -> dict[Any, Any]:
    """The values that are written to refs and used beside that, each with a version of the ref."""
    uses = Counter(v for eqn in jaxpr.eqns for v in {*filter(_is_var, eqn.invars)})
    uses.update(filter(_is_var, jaxpr.outvars))
    first: dict[Any, Any] = {}
    found: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive is update_part_p:
            version, value, *_ = eqn.invars
            first[eqn.outvars[0]] = first.get(version, version)
            if _is_var(value) and uses[value] > 1 and eqn.params["method"] == "set":
                found[value] = first[eqn.outvars[0]]
    return found


def _is_var(v: Atom) -> bool:
    return not isinstance(v, _jax.Literal)
