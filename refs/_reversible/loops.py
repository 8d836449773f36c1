"""Nodes of loops: undone by a loop that runs the other way.

The operands of a loop are constants, then what it carries: versions of refs and JAX's own carry,
then arrays that it scans over. A step of the reversed loop is given what the step before it made
of the carry. It finds what this was made of, and pulls the cotangents through, in one pass.
"""

from __future__ import annotations

import functools
import operator
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from refs import _jax
from refs._reversible.backward import Backward, Recovery, agree
from refs._reversible.equations import Equation
from refs._reversible.flow import FlowNode
from refs._reversible.nodes import (
    Body,
    Lookup,
    Operand,
    Solution,
    Var,
    is_smooth,
    variables,
)
from refs._reversible.places import Literal
from refs._reversible.solve import closure, solve
from refs._types import Value

# `step(carry, env, i, x)`: see `Loop.reverse`.
ReversedStep: TypeAlias = Callable[[Any, dict[Var, Value], Value, Any], tuple[Any, Any]]


class Needs(NamedTuple):
    """What a step of a reversed loop is given, to find some of the body's variables.

    Attributes:
      carried: the positions in the carry of what it must be given, and give back.
      given: all variables that it is given, those in the carry included.
    """

    carried: list[int]
    given: set[Var]


class Loop(FlowNode):
    """A loop. Its `outs` are the carry, then, of a scan, the stacked results.

    Attributes:
      body: its inputs are the operands; its outputs the new carry, then results of the step.
      n_consts: how many of the operands are constants.
      n_carry: how many are carried.
      stacked: the values in each step of what the body has `saved`.
    """

    n_consts: int
    n_carry: int
    stacked: Sequence[Var] = ()

    @property
    def body(self) -> Body:
        return self.bodies[0]

    def initial(self, c: int) -> Operand:
        """The operand that is the `c`-th part of the carry at first."""
        return self.ins[self.n_consts + c]

    def before(self, c: int) -> Var:
        """The `c`-th part of the carry at the beginning of a step."""
        return self.body.inputs[self.n_consts + c]

    def after(self, c: int) -> Operand:
        """The same at the end of the step."""
        return self.body.outputs[c]

    @property
    def carry(self) -> range:
        return range(self.n_carry)

    @property
    def carried(self) -> Sequence[tuple[int, int]]:
        return [(c, self.n_consts + c) for c in self.carry]

    @functools.cached_property
    def counters(self) -> dict[int, Literal]:
        """The parts of the carry that each step adds a constant to, with that: integers."""
        found: dict[int, Literal] = {}
        for node in self.body.nodes:
            if isinstance(node, Equation) and node.eqn.primitive is lax.add_p:
                for k in (0, 1):
                    step = node.ins[1 - k]
                    for c in self.carry:
                        if (
                            node.ins[k] is self.before(c)
                            and node.outs[0] is self.after(c)
                            and isinstance(step, Literal)
                            and not is_smooth(self.before(c))
                        ):
                            found[c] = step
        return found

    def _counted(self, at: Lookup, needs: Needs, n: Value) -> dict[Var, Value]:
        """The values of counters at the beginning of the step after `n` other ones."""
        return {
            self.before(c): at(self.initial(c)) + jnp.asarray(n, step.aval.dtype) * step.value
            for c, step in self.counters.items()
            if self.before(c) in needs.given
        }

    # --- What is known

    def given(self, k: int, known: Solution) -> dict[Var, Operand]:
        """What is known in each step because something outside is."""
        inputs, n, counters = self.body.inputs, self.n_consts, self.counters
        pairs = [
            *((m, v) for m, v in zip(inputs[:n], self.operands, strict=False)),
            *((self.before(c), self.initial(c)) for c in counters),
            *zip(inputs[n + self.n_carry :], self.operands[n + self.n_carry :], strict=True),
            *zip(self.body.saved, self.stacked, strict=False),
        ]
        return {m: v for m, v in pairs if v in known}

    def solved(self, known: Solution) -> list[Solution]:
        given = {*self.given(0, known)}
        carried = [c for c in self.carry if self.outs[c] in known and self.before(c) not in given]
        while True:
            after = variables(self.after(c) for c in carried)
            found = solve(self.body, {*given, *after}, known.is_exact)
            left = [c for c in carried if self.before(c) in found]
            if left == carried:
                return [found]
            carried = left

    def inside(self, known: Solution) -> list[Solution]:
        given = {*self.given(0, known), *variables(map(self.after, self.carry))}
        return [solve(self.body, given, known.is_exact)]

    def needs_of(self, known: Solution, inner: Solution, wanted: Iterable[Var]) -> Needs:
        """What a step must be given to find the `wanted` variables."""
        given = self.given(0, known)
        wanted, carried = {*wanted}, list[int]()
        while True:
            found = closure(inner, wanted) & inner.given
            # Two parts of the carry may end as one value.
            ends = [c for c in self.carry if self.before(c) in inner]
            left = [c for c in ends if self.after(c) in found - {*given}]
            if left == carried:
                return Needs(carried, found)
            carried = left
            wanted |= {self.before(c) for c in carried}

    def outside(
        self, known: Solution, inner: Sequence[Solution], wanted: Sequence[Iterable[Var]]
    ) -> list[Var]:
        needs, given = self.needs_of(known, inner[0], wanted[0]), self.given(0, known)
        same = (v for m, v in given.items() if m in needs.given)
        ends = (self.outs[c] for c in needs.carried)
        return [*variables((*same, *ends, *([] if self.key is None else [self.key])))]

    def can_return(self, j: int, known: Solution) -> bool:
        c = j - self.n_consts
        return c in self.carry and self.outs[c] in known

    def restored(self, known: Solution, inner: Sequence[Solution], j: int) -> Callable[..., Value]:
        [solution] = inner
        needs = self.needs_of(known, solution, [self.body.inputs[j]])

        def find(at: Lookup) -> Value:
            def step(state: Any, env: dict[Var, Value], i: Value, extra: Any) -> Any:
                found = Recovery(solution, {**env, **self._ending_in(needs, state)})
                return like([found.value(self.before(k)) for k in needs.carried], state), ()

            state = [at(self.outs[k]) for k in needs.carried]
            state, _ = self.reverse(at, needs, state, step, ())
            return state[needs.carried.index(j - self.n_consts)]

        return find

    def _ending_in(self, needs: Needs, state: Sequence[Value]) -> dict[Var, Value]:
        """The body's variables for what a step has carried at its end."""
        pairs = zip(needs.carried, state, strict=True)
        return {v: x for c, x in pairs if isinstance(v := self.after(c), Var)}

    @abstractmethod
    def reverse(
        self,
        at: Lookup,
        needs: Needs,
        carry: Any,
        step: ReversedStep,
        extra: Any,
    ) -> tuple[Any, Any]:
        """A loop of as many steps, the last one first: the final carry and the stacked results.

        `step(carry, env, i, x)` gets the values of the constants and scanned arrays that `needs`
        lists, how many steps there were before this one, and its part of `extra`.
        """

    # --- The backward pass

    def pull(self, run: Backward) -> None:
        [plan] = run.plan.inner[self]
        body = self.body
        wanted = {*plan.demanded}
        wanted |= {self.before(c) for c in self.carry if run.is_restored_by(self, self.initial(c))}
        needs = self.needs_of(run.solution, plan.solution, wanted)
        moving = [
            c for c in self.carry if self.before(c) in plan.active or self.after(c) in plan.active
        ]
        consts = [k for k in range(self.n_consts) if body.inputs[k] in plan.active]
        scanned = range(self.n_consts + self.n_carry, len(self.operands))
        rows = [k for k in scanned if body.inputs[k] in plan.active]
        stacked = range(self.n_carry, len(body.outputs))
        results = [k for k in stacked if run.is_active(self.outs[k])]

        def at_first(v: Var) -> Value:
            ct = run.take(v)
            return run.zeros(v) if ct is None else ct

        state = [run.value(self.outs[c]) for c in needs.carried]
        cts = [at_first(self.outs[c]) for c in moving]
        of_results = [at_first(self.outs[k]) for k in results]
        sums = [run.zeros(self.ins[k]) for k in consts]
        anchors = self._anchors(run, needs)

        def step(loop: Any, env: dict[Var, Value], i: Value, extra: Any) -> Any:
            state, cts, sums, is_right = loop
            before = [self.before(c) for c in needs.carried]
            inner = Backward(plan, {**env, **self._ending_in(needs, state)}, before)
            for c, ct in zip(moving, cts, strict=True):
                inner.give(self.after(c), ct)
            for k, ct in zip(results, extra, strict=True):
                inner.give(body.outputs[k], ct)
            inner.pull()
            found = [*map(inner.value, before)]
            if anchors is not None:
                found, flags = anchors(i, found)
                inner.flags += flags
            of_carry = [inner.cotangent(self.before(c)) for c in moving]
            of_consts = [
                s + inner.cotangent(body.inputs[k]) for s, k in zip(sums, consts, strict=True)
            ]
            of_rows = [inner.cotangent(body.inputs[k]) for k in rows]
            for flag in inner.flags:
                is_right &= flag
            return like((found, of_carry, of_consts, is_right), loop), of_rows

        is_right = jnp.asarray(True)
        for x in jax.tree.leaves((state, cts)):
            is_right = _jax.vary_as(is_right, x)
        loop = (state, cts, sums, is_right)
        (state, cts, sums, is_right), of_rows = self.reverse(
            run.value, needs, loop, step, of_results
        )
        run.flags.append(is_right)
        self._check(run, needs, state)
        for c, ct in zip(moving, cts, strict=True):
            run.give(self.initial(c), ct)
        for k, ct in zip(consts, sums, strict=True):
            run.give(self.ins[k], ct)
        for k, ct in zip(rows, of_rows, strict=True):
            run.give(self.ins[k], ct)

    def _check(self, run: Backward, needs: Needs, state: Sequence[Value]) -> None:
        """Compares what was found with what was kept, and goes on with that."""
        states = []
        for c, found in zip(needs.carried, state, strict=True):
            v = self.initial(c)
            if isinstance(v, Var):
                if run.kept is not None and v in run.kept.values:
                    kept = run.kept.values[v]
                    states.append((found, kept, run.value(self.outs[c])))
                    found = kept
                run.find(v, found)
        if run.kept is not None:
            run.flags += agree(states, run.kept.tolerance)

    def _anchors(self, run: Backward, needs: Needs) -> Any:
        """A function that compares a state with an anchor where there is one, or None."""
        if run.kept is None or self not in run.kept.anchors:
            return None
        every, tolerance = run.kept.every, run.kept.tolerance
        buffers = [run.kept.anchors[self][c] for c in needs.carried]

        def kept_in(row: Value) -> list[Value]:
            return jax.tree.map(lambda b: lax.dynamic_index_in_dim(b, row, keepdims=False), buffers)

        def at_anchor(i: Value, found: list[Value]) -> tuple[list[Value], list[Value]]:
            always = jnp.asarray(True)
            for x in jax.tree.leaves(found):
                always = _jax.vary_as(always, x)

            def here() -> tuple[list[Value], Value]:
                # The last row has what some step began with.
                kept, later = kept_in(i // every), kept_in(i // every + 1)
                states = zip(found, kept, later, strict=True)
                return kept, functools.reduce(operator.and_, agree(states, tolerance), always)

            new, flag = lax.cond(i % every == 0, here, lambda: (found, always))
            return new, [flag]

        return at_anchor


def like(new: Any, old: Any) -> Any:
    """Values of the types of the loop's carry, which are never weak."""
    return jax.tree.map(lambda a, b: _jax.vary_as(_jax.strong(a).astype(b.dtype), b), new, old)
