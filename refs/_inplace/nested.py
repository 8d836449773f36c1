"""Last stage, for jaxlib before 0.11.2: a slice of a slice is read behind a barrier.

There XLA takes the two for one slice, and forgets that the inner one's places end at the outer
one's edge. It has gathers and scatters right, of which the stages before this one make slices.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jax import lax

from refs._indexing.accesses import read_p
from refs._inplace.atoms import is_like, is_var
from refs._inplace.body import barrier, splice
from refs._inplace.flatten import map_inner
from refs._types import Eqn, Jaxpr

# XLA sees a slice through these.
_SHOWING = (*(lax.reshape_p, lax.squeeze_p, lax.broadcast_in_dim_p, lax.transpose_p, lax.slice_p),)

# By a jaxpr and the positions of its inputs that are slices: it, its result, and its outputs.
_Known = dict[tuple[int, tuple[int, ...]], tuple[Jaxpr, Jaxpr, set[int]]]


def keep_slices_apart(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr, and those in it, with barriers between slices and the slices of these."""
    return _apart(jaxpr, (), {})[0]


def _apart(jaxpr: Jaxpr, inputs: Iterable[Any], known: _Known) -> tuple[Jaxpr, set[int]]:
    """The jaxpr with barriers, and the positions of its outputs that are slices.

    `inputs` are slices, as XLA inlines branches that it knows and loops that run once. It also
    moves what takes the results of a conditional into the branches.
    """
    slices = {*inputs}
    key = id(jaxpr), tuple(k for k, v in enumerate(jaxpr.invars) if v in slices)
    if key not in known:
        eqns: list[Eqn] = []
        for eqn in jaxpr.eqns:
            is_of_slice = any(v in slices for v in filter(is_var, eqn.invars[:1]))
            if eqn.primitive is read_p:
                slices.update(eqn.outvars)
                if is_of_slice:
                    made, whole = splice(barrier, eqn.invars[:1], eqn)
                    eqns += made
                    eqn = eqn.replace(invars=[*whole, *eqn.invars[1:]])
            elif eqn.primitive in _SHOWING and is_of_slice:
                slices.update(eqn.outvars)
            else:
                given = [v for v in eqn.invars if is_var(v) and v in slices]
                returned: set[int] = set()

                def within(inner: Jaxpr) -> Jaxpr:
                    """With inputs that may be what is given, by their types."""
                    like = [v for v in inner.invars if any(is_like(v, x) for x in given)]  # noqa: B023
                    new, outputs = _apart(inner, like, known)
                    returned.update(outputs)  # noqa: B023
                    return new

                eqn = map_inner(eqn, within)
                slices.update(v for k, v in enumerate(eqn.outvars) if k in returned)
            eqns.append(eqn)
        outputs = {k for k, v in enumerate(jaxpr.outvars) if is_var(v) and v in slices}
        known[key] = jaxpr, jaxpr.replace(eqns=eqns), outputs
    return known[key][1:]
