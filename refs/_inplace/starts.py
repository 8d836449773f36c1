"""On one CPU: many slices of one buffer are taken at places that XLA doesn't know.

XLA compiles equal kernels once: those of the layers of a network, for one. But a kernel that takes
a slice has the slice's place in it, so the kernels of layers whose parameters are slices of one
buffer are all different, and each takes some 5 ms to compile. They are equal again if the place is
an operand that XLA can't compute: the outputs of one conditional.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from refs._indexing.places import place_dtype
from refs._inplace.atoms import shape, size
from refs._inplace.body import Body, replaced, splice
from refs._inplace.fence import always, can_tell
from refs._inplace.model import is_read
from refs._types import Atom, Eqn, Jaxpr, Value

# Of fewer slices the kernels are compiled as fast as the conditional.
FEWEST = 16


def hide_starts(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr, with dynamic slices for the slices of inputs of which there are many."""
    body = Body(jaxpr)
    users = body.users
    of_input: dict[Any, list[Eqn]] = {v: [] for v in jaxpr.invars if can_tell(v)}
    for eqn in jaxpr.eqns:
        if _is_row(eqn) and eqn.invars[0] in of_input and not _is_read(eqn.outvars[0], body, users):
            of_input[eqn.invars[0]].append(eqn)
    many = [slices for slices in of_input.values() if len(slices) >= FEWEST]
    return _hidden_in(body, many).close() if many else jaxpr


def _is_row(eqn: Eqn) -> bool:
    """Whether an equation is a slice of an array of one axis."""
    is_slice = eqn.primitive is lax.slice_p and len(shape(eqn.outvars[0])) == 1
    return is_slice and eqn.params["strides"] in (None, (1,))


def _is_read(v: Any, body: Body, users: dict[Any, list[int]]) -> bool:
    """Whether parts of a slice are read: see `_buffers.lens.Part` for what XLA makes of that."""
    of_v = [body.eqns[k] for k in users.get(v, ())]
    return any(
        is_read(eqn) or (eqn.primitive is lax.reshape_p and _is_read(eqn.outvars[0], body, users))
        for eqn in of_v
    )


def _hidden_in(body: Body, many: Sequence[Sequence[Eqn]]) -> Body:
    """A body with dynamic slices for these slices, one sequence for each input."""
    eqns: list[Eqn] = []
    start_of: dict[int, Atom] = {}  # by the id of the slice
    for slices in many:
        places = [eqn.params["start_indices"][0] for eqn in slices]
        starts = tuple(dict.fromkeys(places))
        made, out = splice(_hidden, slices[0].invars, slices[0], starts=starts)
        eqns += made
        known = dict(zip(starts, out, strict=True))
        start_of |= {id(eqn): known[place] for eqn, place in zip(slices, places, strict=True)}
    for eqn in body.eqns:
        if id(eqn) in start_of:
            operands = [*eqn.invars, start_of[id(eqn)]]
            eqns += replaced(eqn, _slice, operands, size=size(eqn.outvars[0]))
        else:
            eqns.append(eqn)
    body.eqns = eqns
    return body


def _hidden(x: Value, *, starts: tuple[int, ...]) -> list[Value]:
    """These numbers, which XLA can't compute before the program runs."""
    dtype = place_dtype(x.size)
    return lax.cond(
        always([x]),
        lambda: [jnp.asarray(start, dtype) for start in starts],
        lambda: [jnp.zeros((), dtype)] * len(starts),
    )


def _slice(x: Value, start: Value, *, size: int) -> Value:
    return lax.dynamic_slice(x, (start,), (size,))
