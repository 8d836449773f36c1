"""Stage 5: deposits, values put into zeros to be added to a buffer, are added to the buffer itself.

The transpose of a read is an array of zeros with the cotangent put where the read was, and the
cotangents of a buffer are added up: `ct + update(zeros, u, i)` costs the whole buffer for each
read. Here it becomes `ct[i] += u`. Where the zeros go through a loop or a branch first, `ct` goes
in their place.

Floats may be summed in another order, and a zero may keep its sign (`-0.0 + 0.0` is `0.0`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from refs import _jax
from refs._indexing.places import place_dtype
from refs._inplace.body import (
    Body,
    carries,
    is_add,
    is_like,
    is_literal_zero,
    is_var,
    is_zeros,
    renamed,
    splice,
    substitute,
)
from refs._types import Atom, Aval, Eqn, Jaxpr, Value


def accumulate(jaxpr: Jaxpr) -> Body:
    """One level of a jaxpr, with deposits put onto their buffers; its equations in any order."""
    body = Body(jaxpr)
    while _Sums(body).rewrite():  # A rewritten sum may be nothing but zeros and deposits now.
        pass
    return body


class _Deposit(NamedTuple):
    """An output of an equation, zeros with something put into them. The fields are positions."""

    eqn: int
    output: int


class _Sums:
    def __init__(self, body: Body):
        self.body = body
        self.made_by = body.producers()
        self.uses = _count_uses(body)
        self.new: dict[int, list[Eqn]] = {}  # The equations that replace one.
        self.names: dict[Any, Atom] = {}
        self.absorbed: set[int] = set()

    def rewrite(self) -> bool:
        """Rewrites the sums that it can; returns whether there was one."""
        for k in range(len(self.body.eqns) - 1, -1, -1):
            if is_add(self.body.eqns[k]) and k not in self.absorbed:
                self._rewrite_sum(k)
        if self.new:
            eqns = [e for k, eqn in enumerate(self.body.eqns) for e in self.new.get(k, [eqn])]
            for old in list(self.names):
                while (new := self.names[old]) in self.names:
                    self.names[old] = self.names[new]
            self.body.eqns = [substitute(eqn, self.names) for eqn in eqns]
            self.body.outvars = renamed(self.body.outvars, self.names)
        return bool(self.new)

    def _rewrite_sum(self, k: int) -> None:
        """Turns a sum into deposits on one operand, if the other is nothing but deposits."""
        eqn = self.body.eqns[k]
        left, right = eqn.invars
        aval: Aval = left.aval
        if not is_like(left, right) or not aval.shape:
            return
        for base, other in ((left, right), (right, left)):
            found = self.deposits(other, 1)
            if found is None:
                continue
            deposits, sums = found
            # Each is put onto the output of the one before it.
            bases = [base, *(self.body.eqns[d.eqn].outvars[d.output] for d in deposits)]
            if any(self._depends(b, d.eqn) for n, d in enumerate(deposits) for b in bases[: n + 1]):
                continue
            self.absorbed |= sums
            self.new[k] = []
            for deposit in deposits:
                base = self._put(deposit, base, self.new[k])
                self.made_by.setdefault(base, k)  # It needs what the sum needs: see `_depends`.
            self.names[eqn.outvars[0]] = base
            return

    def deposits(self, start: Atom, uses: int) -> tuple[list[_Deposit], set[int]] | None:
        """The deposits that an array is the sum of, and the sums, if it is nothing else; or None.

        `uses` is how often `start` may be used. The deposits and sums in it may be used only once.
        """
        found: list[_Deposit] = []
        sums: set[int] = set()
        waiting = [start]
        while waiting:
            v = waiting.pop()
            if self._is_zeros(v):
                continue
            if not is_var(v) or v not in self.made_by or self.uses[v] > (uses if v is start else 1):
                return None
            k = self.made_by[v]
            eqn = self.body.eqns[k]
            if is_add(eqn) and k not in self.new:
                sums.add(k)
                waiting += eqn.invars
            elif self._starts_from_zeros(k, output := list(eqn.outvars).index(v)):
                found.append(_Deposit(k, output))
            else:
                return None
        return found[::-1], sums

    def _is_zeros(self, atom: Atom) -> bool:
        k = self.made_by.get(atom) if is_var(atom) else None
        return is_zeros(atom, None if k is None else self.body.eqns[k])

    def _starts_from_zeros(self, k: int, output: int) -> bool:
        """Whether an output of equation `k` is a deposit."""
        eqn = self.body.eqns[k]
        if eqn.primitive in (lax.dynamic_update_slice_p, lax.scatter_add_p):
            return self._is_zeros(eqn.invars[0])
        if eqn.primitive is lax.pad_p:
            edges = eqn.params["padding_config"]
            return is_literal_zero(eqn.invars[1]) and all(
                low >= 0 and high >= 0 and not between for low, high, between in edges
            )
        if eqn.effects:
            return False
        if eqn.primitive is _jax.scan_p:
            first, n = carries(eqn) or (0, 0)
            return (
                output < n
                and self._is_zeros(eqn.invars[first + output])
                and _only_adds(_jax.scan_params(eqn.params).jaxpr.jaxpr, first + output, output)
            )
        if eqn.primitive is _jax.cond_p:
            bodies = [Body(_jax.as_closed(b).jaxpr) for b in eqn.params["branches"]]
            return any(_Sums(b).deposits(b.outvars[output], 2) is not None for b in bodies)
        return False

    def _depends(self, atom: Atom, k: int) -> bool:
        """Whether a value depends on a loop or conditional `k`, and so can't become its operand."""
        if self.body.eqns[k].primitive not in (_jax.scan_p, _jax.cond_p):
            return False
        seen: set[int] = set()
        waiting = [atom]
        while waiting:
            v = waiting.pop()
            j = self.made_by.get(v) if is_var(v) else None
            if j == k:
                return True
            if j is not None and j not in seen:
                seen.add(j)
                waiting += self.body.eqns[j].invars
        return False

    def _put(self, deposit: _Deposit, base: Atom, into: list[Eqn]) -> Atom:
        """Puts a deposit onto `base` instead of zeros; appends equations and returns the result."""
        eqn = self.body.eqns[deposit.eqn]
        if eqn.primitive is _jax.scan_p:
            invars = list(eqn.invars)
            invars[_jax.scan_params(eqn.params).num_consts + deposit.output] = base
            self.body.eqns[deposit.eqn] = eqn.replace(invars=invars)
            return eqn.outvars[deposit.output]
        if eqn.primitive is _jax.cond_p:
            branches = tuple(
                _jax.with_equations(b, lambda j: _adding(j, deposit.output, base.aval, eqn))
                for b in eqn.params["branches"]
            )
            self.body.eqns[deposit.eqn] = eqn.replace(
                invars=[*eqn.invars, base], params={**eqn.params, "branches": branches}
            )
            return eqn.outvars[deposit.output]
        if eqn.primitive is lax.scatter_add_p:
            out = _jax.new_var(base.aval)
            into.append(eqn.replace(invars=[base, *eqn.invars[1:]], outvars=[out]))
            return out
        if eqn.primitive is lax.pad_p:
            starts = tuple(int(low) for low, _, _ in eqn.params["padding_config"])
            made, [out] = splice(_add_block, [base, eqn.invars[0]], eqn, starts=starts)
        else:
            made, [out] = splice(_add_slice, [base, *eqn.invars[1:]], eqn)
        into += made
        return out


def _add_slice(base: Value, update: Value, *starts: Value) -> Value:
    """`base[starts : starts + update.shape] += update`, starts clamped as XLA does."""
    old = lax.dynamic_slice_p.bind(base, *starts, slice_sizes=update.shape)
    return lax.dynamic_update_slice_p.bind(base, lax.add(old, update), *starts)


def _add_block(base: Value, update: Value, *, starts: tuple[int, ...]) -> Value:
    """`_add_slice` at static starts."""
    stops = [a + n for a, n in zip(starts, update.shape, strict=True)]
    new = lax.add(lax.slice(base, starts, stops), update)
    places = [jnp.asarray(start, place_dtype(max(base.shape))) for start in starts]
    return lax.dynamic_update_slice(base, new, places, allow_negative_indices=False)


def _adding(jaxpr: Jaxpr, output: int, aval: Aval, like: Eqn) -> Jaxpr:
    """The jaxpr of a branch that adds an output to one more operand."""
    base = _jax.new_var(aval)
    made, [out] = splice(_jax.add_any_p.bind, [base, jaxpr.outvars[output]], like)
    outvars = list(jaxpr.outvars)
    outvars[output] = out
    return jaxpr.replace(invars=[*jaxpr.invars, base], eqns=[*jaxpr.eqns, *made], outvars=outvars)


def _only_adds(jaxpr: Jaxpr, carried: int, output: int) -> bool:
    """Whether a loop's body only adds to a carry, its input `carried` and its output `output`."""
    body = Body(jaxpr)
    consumers = body.consumers()
    uses = _count_uses(body)
    v = jaxpr.invars[carried]
    while v is not jaxpr.outvars[output]:
        if uses.get(v) != 1:
            return False
        eqn = body.eqns[consumers[v][0]]
        is_sum = is_add(eqn)
        if not is_sum and not (eqn.primitive is lax.scatter_add_p and eqn.invars[0] is v):
            return False
        [v] = eqn.outvars
    return uses[v] == 2


def _count_uses(body: Body) -> dict[Any, int]:
    """How often each variable is used; an output must not be taken apart, and counts twice."""
    uses: dict[Any, int] = {}
    for v in (*_operands(body), *body.outvars, *body.outvars):
        if is_var(v):
            uses[v] = uses.get(v, 0) + 1
    return uses


def _operands(body: Body) -> Iterator[Atom]:
    for eqn in body.eqns:
        yield from eqn.invars
