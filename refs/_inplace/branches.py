"""Stage 6: branches that update buffers do so one after the other, each in its own conditional.

XLA updates a buffer in place if one branch updates it and the others return it as it is. If several
branches update it, or different branches different buffers, XLA copies: jaxlib < 0.11 always, later
ones where branches do more than one thing. So `switch(k, A, B)` becomes `if k == 0: A` and then
`if k == 1: B`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from refs import _jax
from refs._inplace.body import (
    Body,
    can_pass,
    carries,
    is_buffer,
    is_update,
    is_var,
    may_update,
    size,
    splice,
    zeros,
)
from refs._types import Atom, Eqn, Value


def updated_operands(eqn: Eqn) -> set[int]:
    """The positions of the operands of a conditional that a branch returns updated."""
    found: set[int] = set()
    for branch in eqn.params["branches"]:
        body = Body(_jax.as_closed(branch).jaxpr)
        for v in filter(is_buffer, body.outvars):
            k = _root(body, v)
            if k is not None and v is not body.jaxpr.invars[k]:
                found.add(1 + k)
    return found


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
    bodies = [Body(b.jaxpr) for b in branches]
    buffers: dict[int, int] = {}
    for o, out in enumerate(eqn.outvars):
        roots = {_root(body, body.outvars[o]) for body in bodies}
        if is_buffer(out) and len(roots) == 1 and None not in roots:
            [buffers[o]] = roots  # type: ignore[assignment]
    if _jax.xla_copies_less and len(buffers) == 1 and all(map(_does_one_thing, bodies)):
        [[o, k]] = buffers.items()
        if not any(returns_what_it_reads(b, o, k) for b in bodies):
            return {}
    changing = sum(
        any(b.outvars[o] is not b.jaxpr.invars[k] for o, k in buffers.items()) for b in bodies
    )
    others = [v for o, v in enumerate(eqn.outvars) if o not in buffers]
    is_cheap = 2 * sum(map(size, others)) <= sum(size(eqn.outvars[o]) for o in buffers)
    is_once = len({*buffers.values()}) == len(buffers)
    return buffers if changing > 1 and is_cheap and is_once and all(map(can_pass, others)) else {}


def _does_one_thing(body: Body) -> bool:
    return sum(map(may_update, body.eqns)) <= 1


def returns_what_it_reads(body: Body, output: int, position: int) -> bool:
    """Whether a branch returns something, but the updated buffer, that it makes of the buffer."""
    made_of = {body.jaxpr.invars[position]}
    for eqn in body.eqns:
        if not made_of.isdisjoint(filter(is_var, eqn.invars)):
            made_of.update(eqn.outvars)
    others = (v for o, v in enumerate(body.outvars) if o != output)
    return not made_of.isdisjoint(filter(is_var, others))


def _root(body: Body, v: Atom) -> int | None:
    """The position of the input that a value is, after updates; None if it is none."""
    made_by = body.producers()
    while is_var(v) and v in made_by:
        eqn = body.eqns[made_by[v]]
        output = list(eqn.outvars).index(v)
        if is_update(eqn):
            v = eqn.invars[0]
        elif (carried := carries(eqn)) is not None:
            first, n = carried
            if output >= n:
                return None
            v = eqn.invars[first + output]
        elif eqn.primitive is _jax.cond_p:
            inner = [Body(_jax.as_closed(b).jaxpr) for b in eqn.params["branches"]]
            roots = {_root(b, b.outvars[output]) for b in inner}
            if len(roots) > 1 or None in roots:
                return None
            v = eqn.invars[1 + roots.pop()]  # type: ignore[operator]
        else:
            return None
    inputs = body.jaxpr.invars
    return next((k for k, x in enumerate(inputs) if x is v), None)


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
