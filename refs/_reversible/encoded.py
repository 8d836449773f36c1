"""Nodes of encoded values: see `fixed`. Their cotangents are those of the floats they stand for."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import jax
from jax import lax

from refs._reversible.equations import Equation
from refs._reversible.fixed import Fixed
from refs._reversible.nodes import (
    Node,
    Operand,
    Relation,
    Solution,
    Step,
    Var,
    unbroadcast,
    variables,
)
from refs._types import Value

if TYPE_CHECKING:
    from refs._reversible.backward import Backward


class OnEncoded(Node):
    """A function of encoded values, or to one.

    Attributes:
      compute: the function of the operands.
      undo: gives the first operand, from the result and the other operands; None if nothing does.
      signs: for each operand: whether the result grows with it (1) or shrinks (-1).
    """

    def __init__(
        self,
        ins: Sequence[Operand],
        out: Var,
        line: str,
        compute: Callable[..., Value],
        undo: Callable[..., Value] | None = None,
        signs: tuple[int, ...] = (1,),
        rounds: bool = False,
    ):
        self.ins, self.outs, self.line = tuple(ins), (out,), line
        self.compute, self.undo, self.signs, self.rounds = compute, undo, signs, rounds

    def run(self, values: Sequence[Value]) -> list[Value]:
        return [self.compute(*values)]

    def ways(self, known: Solution) -> Iterator[Step]:
        yield from self.own_way(known)
        (s, *rest), [out] = self.ins, self.outs
        undo = self.undo
        if undo is None or not isinstance(s, Var) or s in known:
            return
        if out in known and all(x in known for x in rest):
            deps = (out, *variables(rest))
            yield Step(self, deps, (s,), lambda at: [undo(at(out), *map(at, rest))])

    def pull(self, run: Backward) -> None:
        ct = run.take(self.outs[0])
        for operand, sign in zip(self.ins, self.signs, strict=True):
            if ct is not None and run.is_active(operand):
                run.give(operand, unbroadcast(ct if sign > 0 else -ct, operand))


def encode(fixed: Fixed, x: Operand, out: Var, line: str) -> OnEncoded:
    """An array, encoded: written over what a ref holds, or its initial contents."""
    return OnEncoded([x], out, line, fixed.encode, rounds=True)


def decode(fixed: Fixed, s: Operand, out: Var, line: str) -> OnEncoded:
    """The array that an encoded value stands for."""
    return OnEncoded([s], out, line, lambda s: fixed.decode(s, out.aval.dtype))


def plus(fixed: Fixed, s: Operand, x: Operand, sign: int, out: Var, line: str) -> OnEncoded:
    """The sum of an encoded value and an array (`sign` -1: the difference)."""
    added, subtracted = (functools.partial(fixed.plus, sign=by) for by in (sign, -sign))
    return OnEncoded([s, x], out, line, added, subtracted, (1, sign), rounds=True)


def negative(s: Operand, out: Var, line: str) -> OnEncoded:
    """An encoded value, negated."""
    return OnEncoded([s], out, line, operator.neg, operator.neg, (-1,))


class Meaning(Relation):
    """The array that an encoded value stands for, where it is computed in another way, too."""

    def __init__(self, fixed: Fixed, s: Var, x: Var):
        self.fixed, self.s, self.x = fixed, s, x

    @property
    def watched(self) -> Iterable[Var]:
        return (self.s,)

    def ways(self, known: Solution) -> Iterator[Step]:
        s, x = self.s, self.x
        if s in known and x not in known:
            yield Step(self, (s,), (x,), lambda at: [self.fixed.decode(at(s), x.aval.dtype)])


class Moved(Equation):
    """An equation that only moves elements, on encoded values. Its other operands are indices."""

    keeps_pullback = False

    @property
    def encoded(self) -> int:
        """The number of operands that are encoded: the first ones."""
        return 1 if self.eqn.primitive is lax.gather_p else len(self.ins)

    def _of_type(self, found: Value, k: int) -> Value:
        return found  # an integer, where the equation has a float

    def pull(self, run: Backward) -> None:
        cts = [run.take(v) for v in self.outs]
        if all(ct is None for ct in cts):
            return
        rest = [run.value(x) for x in self.ins[self.encoded :]]
        operands = self.ins[: self.encoded]
        given = jax.linear_transpose(lambda *xs: self.run([*xs, *rest]), *map(run.zeros, operands))(
            [run.zeros(v) if ct is None else ct for v, ct in zip(self.outs, cts, strict=True)]
        )
        for operand, ct in zip(operands, given, strict=True):
            run.give(operand, ct)
