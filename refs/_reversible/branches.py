"""The node of `cond` and `switch`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from refs import _jax
from refs._reversible.backward import Backward, Recovery
from refs._reversible.build import RULES, Builder, results_of
from refs._reversible.flow import FlowNode
from refs._reversible.nodes import (
    Body,
    Lookup,
    Operand,
    Solution,
    Var,
    state_of,
    variables,
)
from refs._reversible.places import Literal
from refs._reversible.solve import closure, solve
from refs._types import Eqn, Value


class Branch(FlowNode):
    """A choice among bodies. The first operand is the choice, the others are those of the bodies.

    Its `outs` are the outputs of the bodies, then what each body has `saved`, zeros for the others.
    """

    why = (
        "which branch was taken isn't known afterwards. Choose by what isn't written again, a "
        "counter for instance"
    )

    def __init__(
        self, b: Builder, eqn: Eqn, index: Operand, operands: Sequence[Operand], branches: Any
    ):
        inner = [
            b.inner(_jax.as_closed(branch), operands, 1, len(operands), False)
            for branch in branches
        ]
        # What is a version in one branch is one in all.
        states = [
            next(filter(None, map(state_of, results)), None)
            for results in zip(*(x.results for x in inner), strict=True)
        ]
        results = [x.alike(states) for x in inner]
        theirs = [x.outside() for x in inner]
        outside = [u for some in theirs for u in some]
        bodies: list[Body] = []
        for x, own, out in zip(inner, theirs, results, strict=True):
            # Each branch is given the buffers of all of them, and returns the others' as they are.
            mine = dict(zip(map(id, own), x.builder.buffers, strict=True))
            pairs = [
                (mine[id(u)].first, mine[id(u)].last) if id(u) in mine else [Var(u.first.aval)] * 2
                for u in outside
            ]
            bodies.append(
                x.builder.body(
                    [*(first for first, _ in pairs), *x.inputs],
                    [*(last for _, last in pairs), *out],
                )
            )
        self.bodies = tuple(bodies)
        self.of_body = [[Var(v.aval) for v in body.saved] for body in bodies]
        self.saved = [v for own in self.of_body for v in own]
        self.results = results_of(eqn, states)
        self.operands = (*(u.first for u in outside), *operands)
        self.ins = (b.array(index), *self.operands)
        self.outs = (*(u.last for u in outside), *self.results, *self.saved)
        self.key, self.line = self.ins[0], b.line_of(eqn)

    def run(self, values: Sequence[Value]) -> list[Value]:
        index, *operands = values

        def chosen(k: int) -> Callable[[list[Value]], list[Value]]:
            def body(operands: list[Value]) -> list[Value]:
                out, own = self.bodies[k].results(operands)
                saved = [
                    own if j == k else [_jax.zeros_like_aval(v.aval) for v in theirs]
                    for j, theirs in enumerate(self.of_body)
                ]
                out = jax.tree.map(_jax.strong, out)
                return [*out, *(x for some in saved for x in some)]

            return body

        return lax.switch(index, [chosen(k) for k in range(len(self.bodies))], operands)

    # --- What is known

    def given(self, k: int, known: Solution) -> dict[Var, Operand]:
        body = self.bodies[k]
        pairs = [
            *zip(body.inputs, self.operands, strict=True),
            *zip(body.outputs, self.outs, strict=False),
            *zip(body.saved, self.of_body[k], strict=True),
        ]
        return {m: v for m, v in pairs if isinstance(m, Var) and v in known}

    def solved(self, known: Solution) -> list[Solution]:
        return [
            solve(body, self.given(k, known), known.is_exact) for k, body in enumerate(self.bodies)
        ]

    def inside(self, known: Solution) -> list[Solution]:
        return [
            solve(body, {*self.given(k, known), *variables(body.outputs)}, known.is_exact)
            for k, body in enumerate(self.bodies)
        ]

    def outside(
        self, known: Solution, inner: Sequence[Solution], wanted: Sequence[Iterable[Var]]
    ) -> list[Var]:
        found: dict[Operand, None] = {self.ins[0]: None}
        for k, (solution, some) in enumerate(zip(inner, wanted, strict=True)):
            given = self.given(k, known)
            found |= {given[m]: None for m in closure(solution, some) & solution.given}
        return [*variables(found)]

    def restored(self, known: Solution, inner: Sequence[Solution], j: int) -> Callable[..., Value]:
        def find(at: Lookup) -> Value:
            def chosen(k: int) -> Callable[[], Value]:
                wanted, given = self.bodies[k].inputs[j], self.given(k, known)
                found = closure(inner[k], [wanted]) & inner[k].given
                env = {m: at(given[m]) for m in found}
                return lambda: Recovery(inner[k], env).value(wanted)

            return lax.switch(at(self.ins[0]), [chosen(k) for k in range(len(self.bodies))])

        return find

    # --- The backward pass

    def pull(self, run: Backward) -> None:
        plans = run.plan.inner[self]
        cts = {}
        for v in self.outs:
            if run.is_active(v):
                ct = run.take(v)
                cts[v] = run.zeros(v) if ct is None else ct
        active = [
            j
            for j, v in enumerate(self.operands)
            if run.is_active(v) and any(p.body.inputs[j] in p.active for p in plans)
        ]
        restored = [j for j, v in enumerate(self.operands) if run.is_restored_by(self, v)]

        def chosen(k: int) -> Callable[[], Any]:
            plan, given = plans[k], self.given(k, run.solution)
            inputs = plan.body.inputs
            wanted = {*plan.demanded, *(inputs[j] for j in restored)}
            found = closure(plan.solution, wanted) & plan.solution.given
            env = {m: run.value(given[m]) for m in found}

            def body() -> Any:
                inner = Backward(plan, env, [inputs[j] for j in restored])
                for v, m in zip(self.outs, plan.body.outputs, strict=False):
                    inner.give(m, cts.get(v))
                inner.pull()
                of_operands = [inner.cotangent(inputs[j]) for j in active]
                states = [inner.value(inputs[j]) for j in restored]
                is_right = jnp.asarray(True)
                for flag in inner.flags:
                    is_right &= flag
                return of_operands, jax.tree.map(_jax.strong, states), is_right

            return body

        branches = [chosen(k) for k in range(len(self.bodies))]
        of_operands, states, is_right = lax.switch(run.value(self.ins[0]), branches)
        run.flags.append(is_right)
        for j, ct in zip(active, of_operands, strict=True):
            run.give(self.operands[j], ct)
        for j, x in zip(restored, states, strict=True):
            v = self.operands[j]
            assert isinstance(v, Var)
            run.find(v, x)


class Checkpoint(Branch):
    """`jax.checkpoint`: there is no choice. It is left to JAX, if its operands are known."""

    is_left_to_jax = True


def _branch(b: Builder, eqn: Eqn, args: Sequence[Operand], is_alone: bool) -> Branch:
    return Branch(b, eqn, args[0], args[1:], eqn.params["branches"])


def _checkpoint(b: Builder, eqn: Eqn, args: Sequence[Operand], is_alone: bool) -> Branch:
    first, branches = jnp.int32(0), _jax.jaxprs_in(eqn.params)
    return Checkpoint(b, eqn, Literal(first, jax.typeof(first)), args, branches)


RULES[_jax.cond_p] = _branch
RULES[_jax.remat_p] = _checkpoint
