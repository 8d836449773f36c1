"""Deposits, values put into zeros to be added to a buffer, are added to the buffer itself.

The transpose of a read is an array of zeros with the cotangent put where the read was, and the
cotangents of a buffer are added up: `ct + update(zeros, u, i)` costs the whole buffer for each
read. Here it becomes `ct[i] += u`. Where the zeros go through a loop or a branch first, `ct` goes
in their place.

Floats of 32 bits or more may be summed in another order, and a zero may keep its sign (`-0.0 + 0.0`
is `0.0`). In shorter ones the order is kept: beside a large number small terms would be lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from refs import _jax
from refs._indexing.access import Access
from refs._indexing.accesses import update_p
from refs._inplace.atoms import is_like, is_literal_zero, is_var, is_zeros, shape
from refs._inplace.body import Body, renamed, splice, substitute
from refs._inplace.flatten import has_parts
from refs._inplace.model import carries, is_add
from refs._types import Atom, Aval, Eqn, Jaxpr


def accumulate(body: Body) -> None:
    """Puts the deposits of one level of a jaxpr onto their buffers."""
    within: dict[Jaxpr, _Sums] = {}
    while _Sums(body, within).rewrite():  # A rewritten sum may be only zeros and deposits now.
        body.sort()  # A deposit may stand before what it is put onto.


class _Deposit(NamedTuple):
    """An output of an equation, zeros with something put into them. The fields are positions."""

    eqn: int
    output: int


class _Sums:
    """The sums of one level of a jaxpr.

    Attributes:
      deposited: whether a value is a deposit, or the sum of deposits that are used only once.
      lowest: no equation before this one takes what is made later, by a sum that was rewritten.
    """

    def __init__(self, body: Body, within: dict[Jaxpr, _Sums]):
        """`within`: those of the loops and branches in it that were looked at."""
        self.body, self._within = body, within
        self.made_by = {**body.made_by}
        self.uses = _count_uses(body)
        self.new: dict[int, list[Eqn]] = {}  # The equations that replace one.
        self.names: dict[Any, Atom] = {}
        self.lowest = len(body.eqns)
        self.absorbed: set[int] = set()
        self.deposited: dict[Any, bool] = {}
        for eqn in filter(is_add, body.eqns):
            [out] = eqn.outvars
            # Of all operands, before a sum is moved into a branch and makes it another one.
            operands = [self.is_deposited(v, 1) for v in eqn.invars]
            self.deposited[out] = all(operands)

    def _maker(self, atom: Atom) -> int:
        """The equation that makes a value; -1 if none does."""
        return self.made_by.get(atom, -1) if is_var(atom) else -1

    def within(self, jaxpr: Jaxpr) -> _Sums:
        """The sums of a loop or branch."""
        if jaxpr not in self._within:
            self._within[jaxpr] = _Sums(Body(jaxpr), self._within)
        return self._within[jaxpr]

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
        is_short = jnp.issubdtype(aval.dtype, jnp.floating) and aval.dtype.itemsize < 4
        for base, other in ((left, right), (right, left)):
            if is_short and self._is_of_several(other):
                continue
            found = self.deposits(other)
            if found is None or self._needs_itself(base, found[0]):
                continue
            deposits, sums = found
            self.absorbed |= sums
            self.new[k] = []
            for deposit in deposits:
                base = self._put(deposit, base, self.new[k])
                self.made_by.setdefault(base, k)  # It needs what the sum needs.
            self.names[eqn.outvars[0]] = base
            return

    def is_deposited(self, atom: Atom, uses: int) -> bool:
        """Whether an array, used that often or less, is nothing but zeros and deposits."""
        if self._is_zeros(atom):
            return True
        if self._maker(atom) < 0 or self.uses[atom] > uses:
            return False
        if atom not in self.deposited:
            self.deposited[atom] = self._starts_from_zeros(self._deposit(atom))
        return self.deposited[atom]

    def deposits(self, start: Atom) -> tuple[list[_Deposit], set[int]] | None:
        """The deposits that an array is the sum of, and the sums; None if it is anything else."""
        found: list[_Deposit] = []
        sums: set[int] = set()
        waiting = [start]
        while waiting:
            v = waiting.pop()
            if self._is_zeros(v):
                continue
            if not self.is_deposited(v, 1) or (k := self.made_by[v]) in self.new:
                return None
            if is_add(self.body.eqns[k]):
                sums.add(k)
                waiting += self.body.eqns[k].invars
            else:
                found.append(self._deposit(v))
        return found[::-1], sums

    def _deposit(self, v: Atom) -> _Deposit:
        k = self.made_by[v]
        return _Deposit(k, list(self.body.eqns[k].outvars).index(v))

    def _is_zeros(self, atom: Atom) -> bool:
        k = self._maker(atom)
        return is_zeros(atom, None if k < 0 else self.body.eqns[k])

    def _starts_from_zeros(self, deposit: _Deposit) -> bool:
        """Whether an output of an equation is a deposit."""
        eqn, output = self.body.eqns[deposit.eqn], deposit.output
        if eqn.primitive is update_p or eqn.primitive is lax.scatter_add_p:
            is_sum = _adds_to_first(eqn) or eqn.params["access"].is_unique
            return is_sum and self._is_zeros(eqn.invars[0])
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
                and self.within(_jax.scan_params(eqn).jaxpr.jaxpr).only_adds(first + output, output)
            )
        if eqn.primitive is _jax.cond_p:
            branches = [_jax.as_closed(b).jaxpr for b in eqn.params["branches"]]
            return any(self.within(b).is_deposited(b.outvars[output], 2) for b in branches)
        return False

    def only_adds(self, carried: int, output: int) -> bool:
        """Whether a loop's body only adds to a carry; the positions of that input and output."""
        v, end = self.body.jaxpr.invars[carried], self.body.outvars[output]
        while v is not end:
            if self.uses.get(v) != 1:
                return False
            eqn = self.body.eqns[self.body.users[v][0]]
            is_sum = is_add(eqn)
            if not is_sum and not (_adds_to_first(eqn) and eqn.invars[0] is v):
                return False
            [v] = eqn.outvars
        return self.uses[v] == 2

    def _is_of_several(self, deposited: Atom) -> bool:
        """Whether several numbers may have been added to one element of what was zeros."""
        eqn = self.body.eqns[self._maker(deposited)]
        is_sum = is_add(eqn) or eqn.primitive is _jax.scan_p
        if eqn.primitive is update_p:
            return not eqn.params["access"].is_unique
        return is_sum or not eqn.params.get("unique_indices", True)

    def _needs_itself(self, base: Atom, deposits: list[_Deposit]) -> bool:
        """Whether a deposit by a loop or conditional would be its own operand.

        Each deposit is to be put onto the output of the one before it, the first onto `base`.
        """
        parts = {d.eqn for d in deposits if has_parts(self.body.eqns[d.eqn])}
        if not parts:
            return False
        lowest = min(self.lowest, *parts)  # What comes before needs none of them.
        needed: set[int] = set()
        waiting = [base]
        for k, output in deposits:
            while waiting:
                j = self._maker(waiting.pop())
                if j >= lowest and j not in needed:
                    needed.add(j)
                    waiting += self.body.eqns[j].invars
            if k in needed and k in parts:
                return True
            waiting = [self.body.eqns[k].outvars[output]]
        return False

    def _put(self, deposit: _Deposit, base: Atom, into: list[Eqn]) -> Atom:
        """Puts a deposit onto `base` instead of zeros; appends equations and returns the result."""
        eqn = self.body.eqns[deposit.eqn]
        if has_parts(eqn) and self._maker(base) > deposit.eqn:
            self.lowest = min(self.lowest, deposit.eqn)
        if eqn.primitive is _jax.scan_p:
            invars = list(eqn.invars)
            invars[_jax.scan_params(eqn).num_consts + deposit.output] = base
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
        invars, params = [base, *eqn.invars[1:]], eqn.params
        primitive = eqn.primitive
        if primitive is lax.pad_p:
            starts = tuple(int(low) for low, _, _ in params["padding_config"])
            invars, primitive = [base, eqn.invars[0]], update_p
            params = {"access": Access(starts, shape(eqn.invars[0]))}
        if primitive is update_p:
            params = {**params, "method": "add"}
        out = _jax.new_var(base.aval)
        new = eqn.replace(primitive=primitive, params=params, invars=invars, outvars=[out])
        into.append(new)
        return out


def _adds_to_first(eqn: Eqn) -> bool:
    """Whether an equation adds blocks to its first operand."""
    is_sum = eqn.primitive is update_p and eqn.params["method"] == "add"
    return is_sum or eqn.primitive is lax.scatter_add_p


def _adding(jaxpr: Jaxpr, output: int, aval: Aval, like: Eqn) -> Jaxpr:
    """The jaxpr of a branch that adds an output to one more operand."""
    base = _jax.new_var(aval)
    made, [out] = splice(_jax.add_any_p.bind, [base, jaxpr.outvars[output]], like)
    outvars = list(jaxpr.outvars)
    outvars[output] = out
    return jaxpr.replace(invars=[*jaxpr.invars, base], eqns=[*jaxpr.eqns, *made], outvars=outvars)


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
