"""Stage 2, on CPUs: a branch says what it writes, and that is written after the conditional.

XLA copies a buffer that one branch updates and another one reads; jaxlib < 0.11.2 also one that a
branch updates and returns something of. So the updates are taken out, which compilers call
predication:

    w, y = cond(p, lambda w: (w.at[i].set(f(w)), a), lambda w: (w, g(w)), w)

becomes

    is_set, i, x, y = cond(p, lambda w: (True, i, f(w), a), lambda w: (False, 0, 0, g(w)), w)
    w = w.at[i].set(where(is_set, x, w[i]))

A branch that reads what it has itself written goes on after the update, in a conditional of its
own: its second part. An update is taken out only if no later part reads the buffer as it was before
the update. Where several branches update, `branches` does with less.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp

from refs import _jax
from refs._indexing.access import Access
from refs._indexing.accesses import update_p
from refs._inplace.atoms import can_pass, is_var, size, type_of
from refs._inplace.body import Body, must_run, renamed, splice, substitute, zeros
from refs._inplace.branches import returns_what_it_reads
from refs._inplace.flatten import has_parts, is_worth_it, map_jaxprs
from refs._inplace.model import is_buffer, is_small
from refs._tracing.touch_analysis import used
from refs._types import Atom, Eqn, Jaxpr, Value

# The most conditionals that one becomes.
MOST_PARTS = 8

# A result of a conditional, as each branch has it; None stands for zeros.
_Column: TypeAlias = list[Atom | None]


def predicate(jaxpr: Jaxpr, known: dict[int, tuple[Jaxpr, Jaxpr]]) -> Jaxpr:
    """The jaxpr, and those in it, with updates of a few elements taken out of branches.

    `known` are the jaxprs seen in this pass and their results, by id.
    """
    if not is_worth_it(jaxpr) or not any(map(has_parts, jaxpr.eqns)):
        return jaxpr
    if id(jaxpr) not in known:
        body = Body(jaxpr)
        names: dict[Any, Atom] = {}
        eqns: list[Eqn] = []
        for eqn in body.eqns:
            eqn = map_jaxprs(substitute(eqn, names), lambda inner: predicate(inner, known))
            parts, results = _in_parts(eqn) if eqn.primitive is _jax.cond_p else ([eqn], [])
            eqns += parts
            names.update(zip(eqn.outvars, results, strict=False))
        body.eqns, body.outvars = eqns, renamed(body.outvars, names)
        known[id(jaxpr)] = jaxpr, body.close()
    return known[id(jaxpr)][1]


def _in_parts(eqn: Eqn) -> tuple[list[Eqn], list[Atom]]:
    """A conditional for each part of the branches, with its updates; and the results.

    It is `eqn` itself, with no results, if updates needn't or can't be taken out.
    """
    stays: tuple[list[Eqn], list[Atom]] = [eqn], []
    jaxprs = [_jax.as_closed(branch) for branch in eqn.params["branches"]]
    if eqn.effects or len(eqn.params) > 1 or any(j.consts for j in jaxprs) or must_run(eqn):
        return stays
    buffers = _updated([j.jaxpr for j in jaxprs])
    others = [o for o in range(len(eqn.outvars)) if o not in buffers]
    branches = [_Branch(j.jaxpr, buffers) for j in jaxprs]
    updating = [branch for branch in branches if branch.updates]
    if len(updating) != 1 or not _is_worth_it(branches, buffers):
        return stays
    index, *operands = eqn.invars
    smallest = min((operands[k] for k in buffers.values()), key=size)
    eqns: list[Eqn] = []
    for _ in range(MOST_PARTS):
        parts = [branch.take(eqn, smallest) for branch in branches]
        # What has been written is known only after these updates, so no result here can be it.
        new = {
            b.inputs[s.number] for b, part in zip(branches, parts, strict=True) for s in part.slots
        }
        is_last = all(branch.is_done for branch in branches) and not any(
            is_var(b.outvars[o]) and b.outvars[o] in new for b in branches for o in others
        )
        if is_last:
            passed: list[_Column] = [[b.outvars[o] for b in branches] for o in others]
        else:
            passed = _packed([b.needs(part) for b, part in zip(branches, parts, strict=True)])
            if not all(_is_light(_some(column), smallest) for column in passed):
                return stays
        slots = [slot for part in parts for slot in part.slots]
        if not (slots or is_last):
            return stays
        written = [v for slot in slots for v in slot.operands]
        columns = [[v if b in updating else None for b in branches] for v in written] + passed
        conditional = _conditional(eqn, [index, *operands], parts, columns)
        eqns.append(conditional)
        results = iter(conditional.outvars)
        for slot in slots:
            k, given = slot.number, [next(results) for _ in slot.operands]
            made, [operands[k]] = splice(update_p.bind, [operands[k], *given], eqn, **slot.params)
            eqns += made
        if is_last:
            rest = {o: operands[k] for o, k in buffers.items()}
            rest |= dict(zip(others, results, strict=True))
            return eqns, [rest[o] for o in range(len(eqn.outvars))]
        operands += results
        for b, branch in enumerate(branches):
            branch.inputs += [c[b] or _jax.new_var(_some(c).aval) for c in passed]
    return stays


def _is_worth_it(branches: Sequence[_Branch], buffers: dict[int, int]) -> bool:
    """Whether XLA would copy a buffer that one branch updates."""
    if any(b.reads(buffers.values()) for b in branches if not b.updates):
        return True
    return not _jax.xla_copies_less and any(
        returns_what_it_reads(b.jaxpr, buffers) for b in branches
    )


def _updated(jaxprs: Sequence[Jaxpr]) -> dict[int, int]:
    """The outputs that are a buffer among the inputs, perhaps updated; and that input's position.

    There are none if two outputs are the same one.
    """
    first, *others = ({o: k for o, (k, _) in _updates(j).items()} for j in jaxprs)
    found = {o: k for o, k in first.items() if all(other.get(o) == k for other in others)}
    return found if len({*found.values()}) == len(found) else {}


def _updates(jaxpr: Jaxpr) -> dict[int, tuple[int, set[Any]]]:
    """The outputs that are a buffer among the inputs, after updates; that input's position, and
    the updates' results."""
    made_by = {out: eqn for eqn in jaxpr.eqns if _is_update(eqn) for out in eqn.outvars}
    position = {v: k for k, v in enumerate(jaxpr.invars) if is_buffer(v)}
    found: dict[int, tuple[int, set[Any]]] = {}
    for o, v in enumerate(jaxpr.outvars):
        results = set()
        while is_var(v) and v in made_by:
            results.add(v)
            v = made_by[v].invars[0]
        if is_var(v) and v in position:
            found[o] = position[v], results
    return found


def _is_update(eqn: Eqn) -> bool:
    return eqn.primitive is update_p


class _Slot(NamedTuple):
    """What a branch writes: the operands of a masked update of its operand `number`."""

    number: int
    operands: tuple[Atom, ...]
    params: dict[str, Any]


class _Part(NamedTuple):
    """A part of a branch: its equations, and the updates that come after them."""

    jaxpr: Jaxpr
    inputs: list[Atom]
    eqns: list[Eqn]
    slots: list[_Slot]


class _Branch:
    """What is left of a branch when the first parts have been taken out.

    Attributes:
      inputs: its operands; a buffer among them as it is after the updates so far.
      eqns, outvars: what is left.
      updates: the results of the updates of buffers among that.
    """

    def __init__(self, jaxpr: Jaxpr, buffers: dict[int, int]):
        self.jaxpr, self._buffers = jaxpr, buffers
        self.inputs, self.eqns, self.outvars = [*jaxpr.invars], [*jaxpr.eqns], [*jaxpr.outvars]
        updates = _updates(jaxpr)
        self.updates = {v for o in buffers for v in updates[o][1]}

    @property
    def is_done(self) -> bool:
        """Whether nothing is left."""
        return not self.eqns and not self.updates

    def reads(self, numbers: Iterable[int]) -> bool:
        """Whether an equation takes one of these operands."""
        taken = {v for eqn in self.eqns for v in eqn.invars if is_var(v)}
        return any(self.inputs[k] in taken for k in numbers)

    def take(self, like: Eqn, buffer: Atom) -> _Part:
        """Takes out the next part: all that needs none of the updates, and those of these.

        What is written must be small, compared with `buffer`.
        """
        body = Body(self.jaxpr)
        body.eqns, inputs = self.eqns, [*self.inputs]
        users = body.users
        for v in filter(is_var, self.outvars):
            users.setdefault(v, []).append(len(self.eqns))
        late: set[Any] = set()
        is_late = [False] * len(self.eqns) + [True]  # the last is for the branch's results
        for k, eqn in enumerate(self.eqns):
            is_late[k] = not late.isdisjoint(filter(is_var, eqn.invars)) or not (
                self.updates.isdisjoint(eqn.outvars)
            )
            if is_late[k]:
                late.update(eqn.outvars)
        part = [eqn for k, eqn in enumerate(self.eqns) if not is_late[k]]
        number_of: dict[Any, int] = {self.inputs[k]: k for k in self._buffers.values()}
        slots: list[_Slot] = []
        taken: set[int] = set()
        for k, eqn in enumerate(self.eqns):
            if self.updates.isdisjoint(eqn.outvars) or eqn.invars[0] not in number_of:
                continue
            before, *operands = eqn.invars
            readers = {*users[before]} - {k}
            if not late.isdisjoint(filter(is_var, operands)) or any(is_late[j] for j in readers):
                continue
            if not _is_light(operands[0], buffer):
                continue
            access: Access = eqn.params["access"]
            mask = [operands.pop()] if access.is_masked else []
            made, out = splice(_mask, mask, like, batch=access.batch)
            part += made
            params = {**eqn.params, "access": access._replace(is_masked=True)}
            number = number_of.pop(before)
            [after] = eqn.outvars
            self.inputs[number] = after
            number_of[after] = number
            self.updates.remove(after)
            slots.append(_Slot(number, (*operands, *out), params))
            taken.add(k)
        self.eqns = [eqn for k, eqn in enumerate(self.eqns) if is_late[k] and k not in taken]
        return _Part(self.jaxpr, inputs, part, slots)

    def needs(self, part: _Part) -> list[Atom]:
        """The values made by a part that has been taken out which the rest, or a result, needs."""
        made = {v for eqn in part.eqns for v in eqn.outvars}
        used = (*(v for eqn in self.eqns for v in eqn.invars), *self.outvars)
        return [*dict.fromkeys(v for v in used if is_var(v) and v in made)]


def _packed(values: Sequence[Sequence[Atom]]) -> list[_Column]:
    """The values that each branch passes on, those of equal types in one column."""
    columns: list[_Column] = []
    of_type: defaultdict[Hashable, list[_Column]] = defaultdict(list)
    for b, own in enumerate(values):
        taken: Counter[Hashable] = Counter()  # how many columns of a type this branch has
        for v in own:
            of_v, n = of_type[type_of(v)], taken[type_of(v)]
            if n == len(of_v):
                of_v.append([None] * len(values))
                columns.append(of_v[n])
            of_v[n][b] = v
            taken[type_of(v)] += 1
    return columns


def _conditional(
    eqn: Eqn, operands: Sequence[Atom], parts: Sequence[_Part], columns: Sequence[_Column]
) -> Eqn:
    """The conditional of one part of each branch, which returns the columns."""
    jaxprs = []
    for b, part in enumerate(parts):
        eqns, outvars = [*part.eqns], []
        for column in columns:
            v = column[b]
            if v is None:
                made, [v] = splice(zeros, [_jax.new_var(_some(column).aval)], eqn)
                eqns += made
            outvars.append(v)
        jaxpr = part.jaxpr.replace(invars=part.inputs, eqns=eqns, outvars=outvars)
        jaxprs.append(Body(jaxpr).close())
    taken = [used(jaxpr) for jaxpr in jaxprs]
    kept = [
        k
        for k in range(len(operands) - 1)
        if any(part.inputs[k] in of_part for of_part, part in zip(taken, parts, strict=True))
    ]
    branches = tuple(
        _jax.with_equations(
            branch,
            lambda _: jaxpr.replace(invars=[part.inputs[k] for k in kept]),  # noqa: B023
        )
        for branch, jaxpr, part in zip(eqn.params["branches"], jaxprs, parts, strict=True)
    )
    return eqn.replace(
        invars=[operands[0], *(operands[1 + k] for k in kept)],
        outvars=[_jax.new_var(_some(column).aval) for column in columns],
        params={**eqn.params, "branches": branches},
    )


def _some(row: Sequence[Any]) -> Any:
    """The first in a row that isn't None."""
    return next(x for x in row if x is not None)


def _is_light(atom: Atom, buffer: Atom) -> bool:
    """Whether to compute a value, or zeros, costs less than a copy of the buffer."""
    return can_pass(atom) and is_small(atom, buffer)


def _mask(*mask: Value, batch: tuple[int, ...]) -> list[Value]:
    return [mask[0] if mask else jnp.full(batch, True)]
