"""The node of `while_loop`, and of `fori_loop`s whose number of steps isn't known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from refs import _jax
from refs._reversible.build import RULES, Builder, results_of
from refs._reversible.loops import Loop, Needs, ReversedStep, like
from refs._reversible.nodes import Lookup, Operand, Solution, Var, state_of
from refs._reversible.solve import solve
from refs._types import Eqn, Value


class While(Loop):
    """`while_loop`, which counts its steps: the last of its `outs`, an int32."""

    why = (
        "the number of steps of a while_loop in another one isn't kept: use scan or fori_loop for "
        "one of the two"
    )

    def __init__(self, b: Builder, eqn: Eqn, args: Sequence[Operand], is_alone: bool):
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        of_test, of_body = args[:n_cond], args[n_cond : n_cond + n_body]
        self.line = b.line_of(eqn)
        carry = b.carry(args[n_cond + n_body :], self.line)
        states = [*map(state_of, carry)]
        test, step = (_jax.as_closed(eqn.params[k]) for k in ("cond_jaxpr", "body_jaxpr"))
        x = b.inner(test, [*of_test, *carry], None, n_cond, False)
        y = b.inner(step, [*of_body, *carry], None, n_body, False)
        self.predicate = x.builder.body(x.inputs, x.results)
        self.bodies = (y.builder.body(y.inputs, y.alike(states)),)
        self.n_consts, self.n_carry = n_body, len(carry)
        self.key = self.count = Var(_jax.array_type((), jnp.int32))
        self.saved, self.results = [self.count], results_of(eqn, states)
        self.operands = (*of_body, *carry)
        self.ins = (*self.operands, *of_test)
        self.outs = (*self.results, self.count)

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

    def solved(self, known: Solution) -> list[Solution]:
        if self.count in known:
            return super().solved(known)
        return [solve(self.body, self.given(0, known), known.is_exact)]

    def reverse(
        self,
        at: Lookup,
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


RULES[_jax.while_p] = While
