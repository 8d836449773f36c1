"""Last stage, for jaxlib before 0.11.2: a slice of a slice is read behind a barrier.

There XLA takes the two for one slice, and forgets that the inner one's places end at the outer
one's edge. It has gathers and scatters right, of which the stages before this one make slices.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jax import lax

from refs._inplace.body import barrier, is_like, is_var, splice
from refs._inplace.flatten import map_inner
from refs._types import Eqn, Jaxpr

# XLA sees a slice through these.
_SHOWING = (*(lax.reshape_p, lax.squeeze_p, lax.broadcast_in_dim_p, lax.transpose_p, lax.slice_p),)

# The results for jaxprs, and the positions of their inputs that are slices.
Known = dict[tuple[int, tuple[int, ...]], tuple[Jaxpr, Jaxpr]]


def keep_slices_apart(jaxpr: Jaxpr, known: Known, inputs: Iterable[Any] = ()) -> Jaxpr:
    """The jaxpr, and those in it, with barriers between slices and the slices of these.

    `known` are the jaxprs seen in this pass and their results. `inputs` are slices; XLA inlines
    loops that run once, and branches that it knows.
    """
    slices = {*inputs}
    key = id(jaxpr), tuple(k for k, v in enumerate(jaxpr.invars) if v in slices)
    if key not in known:
        eqns: list[Eqn] = []
        for eqn in jaxpr.eqns:
            is_of_slice = any(v in slices for v in filter(is_var, eqn.invars[:1]))
            if eqn.primitive is lax.dynamic_slice_p:
                slices.update(eqn.outvars)
                if is_of_slice:
                    made, whole = splice(barrier, eqn.invars[:1], eqn)
                    eqns += made
                    eqn = eqn.replace(invars=[*whole, *eqn.invars[1:]])
            elif eqn.primitive in _SHOWING and is_of_slice:
                slices.update(eqn.outvars)
            else:
                given = [v for v in eqn.invars if is_var(v) and v in slices]
                eqn = map_inner(eqn, lambda inner: _within(inner, known, given))  # noqa: B023
            eqns.append(eqn)
        known[key] = jaxpr, jaxpr.replace(eqns=eqns)
    return known[key][1]


def _within(jaxpr: Jaxpr, known: Known, given: list[Any]) -> Jaxpr:
    """A jaxpr of an equation that is given slices: its inputs of their types may be these."""
    inputs = [v for v in jaxpr.invars if any(is_like(v, x) for x in given)]
    return keep_slices_apart(jaxpr, known, inputs)
