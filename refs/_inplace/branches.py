"""Stage 4: branches that update buffers do so one after the other, each in its own conditional.

XLA updates a buffer in place if one branch updates it and the others return it as it is. If several
branches update it, or different branches different buffers, XLA copies: jaxlib < 0.11 always, later
ones where branches do more than one thing. So `switch(k, A, B)` becomes `if k == 0: A` and then
`if k == 1: B`.
"""

from __future__ import annotations

import functools
from operator import or_
from typing import Any

import jax.numpy as jnp
from jax import lax

from refs import _jax
from refs._inplace.atoms import can_pass, is_var, size
from refs._inplace.body import Body, splice, zeros
from refs._inplace.model import common, is_buffer, may_update, roots
from refs._types import Eqn, Jaxpr, Value


def split_branches(body: Body) -> None:
    """Splits the conditionals of one level of a jaxpr, where that saves a copy."""
    eqns: list[Eqn] = []
    for eqn in body.eqns:
        buffers = _buffers(eqn) if eqn.primitive is _jax.cond_p else {}
        eqns += _split(eqn, buffers) if buffers else [eqn]
    body.eqns = eqns


def _buffers(eqn: Eqn) -> dict[int, int]:
    """The outputs that are operands, updated; empty if there is nothing to split.

    Each output's position -> the position of the operand among the inputs of the branches.
    """
    branches = [_jax.as_closed(b) for b in eqn.params["branches"]]
    if eqn.effects or len(eqn.params) > 1 or any(b.consts for b in branches):
        return {}
    jaxprs = [b.jaxpr for b in branches]
    inputs = common(map(roots, jaxprs))
    buffers = {
        o: k
        for o, (out, k) in enumerate(zip(eqn.outvars, inputs, strict=True))
        if k is not None and is_buffer(out)
    }
    is_simple = _jax.xla_copies_less and len(buffers) == 1 and all(map(_does_one_thing, jaxprs))
    if is_simple and not any(returns_what_it_reads(j, buffers) for j in jaxprs):
        return {}
    changing = sum(any(j.outvars[o] is not j.invars[k] for o, k in buffers.items()) for j in jaxprs)
    others = [v for o, v in enumerate(eqn.outvars) if o not in buffers]
    is_cheap = 2 * sum(map(size, others)) <= sum(size(eqn.outvars[o]) for o in buffers)
    is_once = len({*buffers.values()}) == len(buffers)
    return buffers if changing > 1 and is_cheap and is_once and all(map(can_pass, others)) else {}


def _does_one_thing(jaxpr: Jaxpr) -> bool:
    return sum(map(may_update, jaxpr.eqns)) <= 1


def returns_what_it_reads(jaxpr: Jaxpr, buffers: dict[int, int]) -> bool:
    """Whether a branch makes an output of a buffer, other than that buffer, updated.

    `buffers`: the outputs that are buffers, and their positions among the inputs.
    """
    # Sets of buffers, as bits.
    made_of: dict[Any, int] = {jaxpr.invars[k]: 1 << o for o, k in buffers.items()}
    for eqn in jaxpr.eqns:
        sources = (made_of.get(v, 0) for v in filter(is_var, eqn.invars))
        made_of.update(dict.fromkeys(eqn.outvars, functools.reduce(or_, sources, 0)))
    return any(made_of.get(v, 0) & ~(1 << o) for o, v in enumerate(jaxpr.outvars) if is_var(v))


def _split(eqn: Eqn, buffers: dict[int, int]) -> list[Eqn]:
    """A conditional for each branch; outputs that are no buffers are passed through all of them."""
    index, *operands = eqn.invars
    others = [o for o in range(len(eqn.outvars)) if o not in buffers]
    made, values = splice(zeros, [eqn.outvars[o] for o in others], eqn)
    eqns = list(made)
    branches = eqn.params["branches"]
    for k, branch in enumerate(branches):
        jaxpr = _jax.as_closed(branch).jaxpr
        more = [_jax.new_var(eqn.outvars[o].aval) for o in others]
        passed = dict(zip(others, more, strict=True))
        invars = [*jaxpr.invars, *more]
        kept = [
            jaxpr.invars[buffers[o]] if o in buffers else passed[o] for o in range(len(eqn.outvars))
        ]
        made, [chosen] = splice(_is_chosen, [index], eqn, branch=k)
        is_last = k == len(branches) - 1
        outvars = eqn.outvars if is_last else [_jax.new_var(v.aval) for v in eqn.outvars]
        choices = (
            _jax.with_equations(branch, lambda j: j.replace(invars=invars, eqns=[], outvars=kept)),  # noqa: B023
            _jax.with_equations(branch, lambda j: j.replace(invars=invars)),  # noqa: B023
        )
        eqns += made
        eqns.append(
            eqn.replace(
                invars=[chosen, *operands, *values],
                outvars=list(outvars),
                params={**eqn.params, "branches": choices},
            )
        )
        values = [outvars[o] for o in others]
        for o, position in buffers.items():
            operands[position] = outvars[o]
    return eqns


def _is_chosen(index: Value, *, branch: int) -> Value:
    return lax.convert_element_type(lax.eq(index, jnp.int32(branch)), jnp.int32)
