"""The node of `while_loop`, and of `fori_loop`s whose number of steps isn't known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from refs import _jax
from refs._reversible.loops import Loop, Needs, ReversedStep, like
from refs._reversible.nodes import Body, Operand, Solution, Var
from refs._reversible.solve import solve
from refs._types import Value


class While(Loop):
    """`while_loop`, which counts its steps: the last of its `outs`, an int32."""

    why = (
        "the number of steps of a while_loop in another one isn't kept: use scan or fori_loop for "
        "one of the two"
    )

    def __init__(
        self,
        predicate: Body,
        body: Body,
        ins: Sequence[Operand],
        of_predicate: Sequence[Operand],
        outs: Sequence[Var],
        n_consts: int,
        line: str,
    ):
        self.predicate, self.body, self.line = predicate, body, line
        self.ins = (*ins, *of_predicate)
        self.n_consts, self.n_carry = n_consts, len(outs)
        self.key = self.count = Var(_jax.array_type((), jnp.int32))
        self.outs = (*outs, self.count)

    def run(self, values: Sequence[Value]) -> list[Value]:
        consts, of_test = values[: self.n_consts], values[len(self.operands) :]
        first = jax.tree.map(_jax.strong, list(values[self.n_consts : len(self.operands)]))

        def test(loop: Any) -> Value:
            carry, _ = loop
            [go_on], _ = self.predicate.results([*of_test, *carry])
            return go_on

        def step(loop: Any) -> Any:
            carry, n = loop
            out, _ = self.body.results([*consts, *carry])
            return like(out, carry), n + 1

        carry, n = lax.while_loop(test, step, (first, jnp.int32(0)))
        return [*carry, n]

    def solved(self, known: Solution) -> tuple[Solution, list[int]]:
        if self.count in known:
            return super().solved(known)
        return solve(self.body, self.given_from(known), known.is_exact), []

    def outside(self, needs: Needs) -> list[Var]:
        return [*super().outside(needs), self.count]

    def reverse(
        self,
        at: Callable[[Operand], Value],
        needs: Needs,
        carry: Any,
        step: ReversedStep,
        extra: Any,
    ) -> tuple[Any, Any]:
        inputs = self.body.inputs[: self.n_consts]
        fixed = {
            mine: at(v) for mine, v in zip(inputs, self.ins, strict=False) if mine in needs.given
        }

        def one(k: Value, carry: Any) -> Any:
            before = n - 1 - k
            return step(carry, {**fixed, **self._counted(at, needs, before)}, before, extra)[0]

        n = at(self.count)
        return _jax.fori_loop(0, n, one, carry), extra
