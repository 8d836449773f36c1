"""On CPUs: branches that update buffers do so one after the other, step by step.

XLA updates a buffer in place if a conditional has two branches, the second one updates it at its
end, and the first one returns it as it is. Otherwise some versions copy it (line 6 of `model`). So
`w, y = switch(k, A, B, C)`, where `A` and `B` update `w`, becomes

    y = switch(k, zeros, zeros, C)
    w, y = cond(k == 0, A, as_they_are, w, y)
    w, y = cond(k == 1, B, as_they_are, w, y)

A branch that reads what it has written has a conditional for each step. All that needs no update is
its first step, with the updates that need no other; its second what needs these; and so on. Small
values are passed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from refs import _jax
from refs._inplace.atoms import can_pass, is_var, size
from refs._inplace.body import Body, renamed, splice, substitute, zeros
from refs._inplace.model import common, continued, is_buffer, is_small, needs_fences, roots
from refs._tracing.touch_analysis import used
from refs._types import Atom, Eqn, Jaxpr, Value

# The most conditionals that one branch becomes.
MOST_STEPS = 8


class _Outputs(NamedTuple):
    """The positions of a conditional's outputs."""

    buffers: dict[int, int]  # operands, perhaps updated: the position of the operand
    others: list[int]


class _Step(NamedTuple):
    """A part of a branch: equations, the buffers after them by output, and values to pass on."""

    eqns: list[Eqn]
    after: dict[int, Any]
    passed: list[Any]


def split_branches(body: Body) -> None:
    """Splits the conditionals of one level of a jaxpr, where that saves a copy."""
    if not any(eqn.primitive is _jax.cond_p for eqn in body.eqns):
        return
    eqns: list[Eqn] = []
    names: dict[Any, Atom] = {}
    for eqn in body.eqns:
        eqn = substitute(eqn, names)
        is_cond = eqn.primitive is _jax.cond_p
        made, results = _split(eqn, body.in_loop) if is_cond else ([eqn], [])
        eqns += made
        names.update(zip(eqn.outvars, results, strict=False))
    body.eqns, body.outvars = eqns, renamed(body.outvars, names)


def _split(eqn: Eqn, in_loop: bool) -> tuple[list[Eqn], list[Atom]]:
    """The conditionals that one becomes, and its results; it itself if there is nothing to do."""
    stays: tuple[list[Eqn], list[Atom]] = [eqn], []
    closed = [_jax.as_closed(b) for b in eqn.params["branches"]]
    if eqn.effects or len(eqn.params) > 1 or any(b.consts for b in closed):
        return stays
    jaxprs = [b.jaxpr for b in closed]
    inputs = dict(enumerate(common(jaxprs)))
    buffers = {o: k for o, k in inputs.items() if k is not None and is_buffer(eqn.outvars[o])}
    outputs = _Outputs(buffers, [o for o in inputs if o not in buffers])
    others = [eqn.outvars[o] for o in outputs.others]
    is_cheap = 2 * sum(map(size, others)) <= sum(size(eqn.outvars[o]) for o in buffers)
    is_once = len({*buffers.values()}) == len(buffers)
    # Between the conditionals there must be fences.
    has_fences = any(needs_fences(eqn.outvars[o], in_loop) for o in buffers)
    if not (has_fences and is_cheap and is_once and all(map(can_pass, others))):
        return stays
    steps = {b: _steps(j, outputs) for b, j in enumerate(jaxprs) if _updates(j, buffers)}
    return _in_turn(eqn, jaxprs, outputs, steps) if _are_copied(jaxprs, buffers, steps) else stays


def _updates(jaxpr: Jaxpr, buffers: dict[int, int]) -> bool:
    return any(jaxpr.outvars[o] is not jaxpr.invars[k] for o, k in buffers.items())


def _are_copied(
    jaxprs: Sequence[Jaxpr], buffers: dict[int, int], steps: dict[int, list[_Step]]
) -> bool:
    """Whether XLA may copy a buffer that branches update."""
    if len(jaxprs) == 2 and len(steps.get(1, ())) == 1 and not _takes(jaxprs[0], buffers):
        return False
    return bool(steps)


def _takes(jaxpr: Jaxpr, buffers: dict[int, int]) -> bool:
    users = Body(jaxpr).users
    return any(jaxpr.invars[k] in users for k in buffers.values())


# --- Steps ---


def _steps(jaxpr: Jaxpr, outputs: _Outputs) -> list[_Step]:
    """The steps of a branch: none takes what a later one makes, or a buffer as it was earlier.

    It is one step if there would be too many, if they would have to pass on a large value, and if
    the branch overwrites a buffer as a whole.
    """
    last = {o: jaxpr.outvars[o] for o in outputs.buffers}
    whole = [_Step(jaxpr.eqns, last, [])]
    if any(roots(jaxpr)[o] != k for o, k in outputs.buffers.items()):  # overwritten as a whole
        return whole
    body = Body(jaxpr)
    results = [v for v in (jaxpr.outvars[o] for o in outputs.others) if is_var(v)]
    updated = _updated(body, last)
    numbers = _numbers(body, updated)
    after = {o: jaxpr.invars[k] for o, k in outputs.buffers.items()}
    older = {*updated, *after.values()} - {*last.values()}
    if not numbers or not older.isdisjoint(results):
        return whole
    until = {v: max(numbers[k] for k in users) for v, users in body.users.items()}
    until |= dict.fromkeys(results, max(numbers))
    smallest = min(last.values(), key=size)
    steps: list[_Step] = []
    for n in range(1 + max(numbers)):
        eqns = [eqn for eqn, number in zip(jaxpr.eqns, numbers, strict=True) if number == n]
        made = [v for eqn in eqns for v in eqn.outvars]
        after = after | {updated[v][0]: v for v in made if v in updated}
        passed = [v for v in made if v not in updated and until.get(v, 0) > n]
        if not all(can_pass(v) and is_small(v, smallest) for v in passed):
            return whole
        steps.append(_Step(eqns, after, passed))
    return steps


def _updated(body: Body, last: dict[int, Any]) -> dict[Any, tuple[int, Any]]:
    """What the updates of buffers make: the buffer's output, and the buffer before the update.

    `last`: the buffers after all updates, by output.
    """
    found: dict[Any, tuple[int, Any]] = {}
    for o, v in last.items():
        while v in body.made_by:
            eqn = body.eqns[body.made_by[v]]
            [k] = (k for out, k in zip(eqn.outvars, continued(eqn), strict=False) if out is v)
            assert k is not None
            found[v] = o, eqn.invars[k]
            v = eqn.invars[k]
    return found


def _numbers(body: Body, updated: dict[Any, tuple[int, Any]]) -> list[int]:
    """The number of the step to which each equation belongs; none if there are too many steps.

    What takes a buffer that has been updated comes a step later, but for the next update; and that
    not before any step that takes the buffer. There is no end to it where a true second use of a
    buffer needs an update of it.
    """
    waits: list[list[tuple[int, bool]]] = []  # the equations, and whether for the step after theirs
    for k, eqn in enumerate(body.eqns):
        before = [updated[v][1] for v in eqn.outvars if v in updated]
        of_eqn = [(j, False) for v in before for j in body.users[v] if j != k]
        for v in filter(is_var, eqn.invars):
            if v in body.made_by:
                of_eqn.append((body.made_by[v], v in updated and v not in before))
        waits.append(of_eqn)
    numbers, old = [0] * len(waits), list[int]()
    while numbers != old:
        old = [*numbers]
        for k, of_eqn in enumerate(waits):
            numbers[k] = max((numbers[j] + is_later for j, is_later in of_eqn), default=0)
        if max(numbers) >= MOST_STEPS:
            return []
    return numbers


# --- Conditionals ---


def _in_turn(
    eqn: Eqn, jaxprs: Sequence[Jaxpr], outputs: _Outputs, steps: dict[int, list[_Step]]
) -> tuple[list[Eqn], list[Atom]]:
    """A conditional of the branches that update nothing, one for each step; and the results."""
    buffers, others = outputs
    index, *operands = eqn.invars
    eqns, values = splice(zeros, [eqn.outvars[o] for o in others], eqn)
    more = [_jax.new_var(eqn.outvars[o].aval) for o in others]  # the values, in a branch

    def decide(index: Atom, atoms: Sequence[Atom], branches: Sequence[Jaxpr]) -> Sequence[Atom]:
        eqns.append(_conditional(eqn, index, atoms, branches))
        return eqns[-1].outvars

    if others and len(steps) < len(jaxprs):
        readers = [
            j.replace(invars=[*j.invars, *more], eqns=[], outvars=more)
            if b in steps
            else j.replace(invars=[*j.invars, *more], outvars=[j.outvars[o] for o in others])
            for b, j in enumerate(jaxprs)
        ]
        values = decide(index, [*operands, *values], readers)
    for b, of_branch in steps.items():
        jaxpr = jaxprs[b]
        made, [is_chosen] = splice(_is_chosen, [index], eqn, branch=b)
        eqns += made
        inputs = [*jaxpr.invars, *more]
        now: dict[Any, Atom] = dict(zip(inputs, [*operands, *values], strict=True))
        before = {o: jaxpr.invars[k] for o, k in buffers.items()}
        for step in of_branch:
            written = [o for o in buffers if step.after[o] is not before[o]]
            old, new = ([of_step[o] for o in written] for of_step in (before, step.after))
            # The values pass each step: an update that needs the readers' has no fence for these.
            is_last = step is of_branch[-1]
            results = [jaxpr.outvars[o] for o in others] if is_last else more
            made, instead = splice(zeros, step.passed, eqn)
            kept = jaxpr.replace(invars=[*now], eqns=made, outvars=[*old, *instead, *more])
            outvars = [*new, *step.passed, *results]
            run = jaxpr.replace(invars=[*now], eqns=step.eqns, outvars=outvars)
            out = decide(is_chosen, [*now.values()], [kept, run])
            now |= zip([*new, *step.passed, *more], out, strict=True)
            before = step.after
        values = [now[v] for v in more]
        for o, k in buffers.items():
            operands[k] = now[before[o]]
    found = {o: operands[k] for o, k in buffers.items()} | dict(zip(others, values, strict=True))
    return eqns, [found[o] for o in range(len(eqn.outvars))]


def _conditional(
    like: Eqn, index: Atom, operands: Sequence[Atom], branches: Sequence[Jaxpr]
) -> Eqn:
    """A conditional without operands that no branch takes."""
    kept = sorted({k for j in branches for k, v in enumerate(j.invars) if v in used(j)})
    first = like.params["branches"][0]

    def branch(jaxpr: Jaxpr) -> Any:
        invars = [jaxpr.invars[k] for k in kept]
        return _jax.with_equations(first, lambda _: jaxpr.replace(invars=invars))

    return like.replace(
        invars=[index, *(operands[k] for k in kept)],
        outvars=[_jax.new_var(v.aval) for v in branches[0].outvars],
        params={**like.params, "branches": tuple(map(branch, branches))},
    )


def _is_chosen(index: Value, *, branch: int) -> Value:
    return lax.convert_element_type(lax.eq(index, jnp.int32(branch)), jnp.int32)
