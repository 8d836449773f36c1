"""The backward pass: values are found when they are needed, cotangents in the reverse order."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from refs import _jax
from refs._indexing.sharded import sharded_as
from refs._reversible.equations import Pullback
from refs._reversible.nodes import Node, Operand, Solution, Step, Var
from refs._reversible.places import Literal
from refs._reversible.plan import Plan
from refs._reversible.solve import closure
from refs._types import Value


class Kept(NamedTuple):
    """What the forward pass has kept to check the backward pass by.

    Attributes:
      values: the states at the beginning, and before each outermost loop.
      anchors: for each outermost scan, the states after each `every` steps, stacked.
    """

    values: Mapping[Var, Value]
    tolerance: float
    anchors: Mapping[Node, Sequence[Value]]
    every: int | None


class Recovery:
    """Values of a body's variables, each found by its step when something asks for it."""

    def __init__(self, solution: Solution, env: Mapping[Var, Value]):
        self.solution, self.env = solution, dict(env)

    def value(self, x: Operand) -> Value:
        if isinstance(x, Literal):
            return x.value
        waiting = [x]
        while waiting:
            v = waiting[-1]
            if v in self.env:
                waiting.pop()
                continue
            step = self.solution.steps[v]
            missing = [d for d in step.deps if d not in self.env]
            if missing:
                waiting += missing
            else:
                self._take(step)
        return self.env[x]

    def _take(self, step: Step) -> None:
        for v, x in zip(step.gives, self.evaluated(step), strict=True):
            self.env.setdefault(v, x)

    def evaluated(self, step: Step) -> Any:
        return step.compute(self.value)


class Backward(Recovery):
    """The cotangents of a body's variables, and what they are computed of.

    Attributes:
      plan: the body's plan.
      required: variables whose values are asked for when all is done.
      kept: values that the forward pass has kept, to compare with what is found: the states at
        the beginning of each loop.
      pullbacks: of the equations that were evaluated here.
      flags: bool scalars, all true where what was found is certainly right.
    """

    def __init__(
        self,
        plan: Plan,
        env: Mapping[Var, Value],
        required: Iterable[Var] = (),
        kept: Kept | None = None,
    ):
        super().__init__(plan.solution, env)
        self.plan, self.kept = plan, kept
        self.needed = closure(plan.solution, {*plan.demanded, *required})
        self.pullbacks: dict[Node, Pullback] = {}
        self.flags: list[Value] = []
        self._cts: dict[Var, Value] = {}

    def evaluated(self, step: Step) -> Any:
        if not step.runs:
            return super().evaluated(step)
        is_encoded = any(v.state is not None and v.state.fixed for v in step.gives)
        node = step.node if is_encoded else self.plan.pulled(step.node)
        out = node.evaluate(self, [self.value(x) for x in node.ins])
        found = dict(zip(node.outs, out, strict=True))
        return [found[v] if v in found else self.env[v] for v in step.gives]

    def has_active(self, node: Node) -> bool:
        """Whether a result of a node has a cotangent."""
        return any(v in self.plan.active for v in node.outs)

    def find(self, v: Var, x: Value) -> None:
        """Notes a value that was found otherwise."""
        self.env.setdefault(v, x)

    def is_restored_by(self, node: Node, x: Operand) -> bool:
        """Whether a value is needed, and the undoing of a loop or branch gives it."""
        if not isinstance(x, Var) or x not in self.needed or x in self.env:
            return False
        return x not in self.solution.given and self.solution.steps[x].node is node

    def is_active(self, x: Operand) -> bool:
        return x in self.plan.active

    def zeros(self, x: Operand) -> Value:
        """Zeros of the type of a variable's cotangent."""
        return _jax.zeros_like_aval(x.aval)

    def give(self, x: Operand, ct: Value | None) -> None:
        """Adds to a cotangent, if the variable has one."""
        if ct is None or not isinstance(x, Var) or x not in self.plan.active:
            return
        ct = sharded_as(_jax.varying_no_more(ct.astype(x.aval.dtype), x.aval), x.aval)
        self._cts[x] = self._cts[x] + ct if x in self._cts else ct

    def put(self, x: Operand, ct: Value) -> None:
        """Replaces a cotangent."""
        assert isinstance(x, Var)
        self._cts[x] = ct

    def take(self, x: Operand) -> Value | None:
        """The cotangent of a result, which is complete: all uses come later in the program."""
        return self._cts.pop(x, None) if isinstance(x, Var) else None

    def cotangent(self, x: Operand) -> Value:
        """The cotangent so far."""
        assert isinstance(x, Var)
        return self._cts[x] if x in self._cts else self.zeros(x)

    def pull(self) -> None:
        """Pulls the cotangents of the results back to the inputs."""
        for node in reversed(self.plan.body.nodes):
            if self.has_active(node):
                self.plan.pulled(node).pull(self)


def agree(states: Iterable[tuple[Value, Value, Value]], tolerance: float) -> list[Value]:
    """Whether what was found is what it should be: a list of bool scalars.

    Args:
      states: for each variable: the value that was found, what was kept, and its later value, from
        which it was found.
      tolerance: how far floats may be off, in units of the largest finite number of the array. For
        an array of zeros it is that of its later value, if that isn't zero, too, or of all the
        arrays, if that is less.
    """
    flags, floats = [], []
    for found, kept, later in states:
        # Of bits that products have lost, what is popped of a stack is still there.
        if isinstance(kept, tuple) or _jax.is_key(kept.dtype):
            continue
        if not jnp.issubdtype(kept.dtype, jnp.inexact):
            flags.append(jnp.all(found == kept))
        else:
            same = (found == kept) | (jnp.isnan(found) & jnp.isnan(kept))
            off = _largest(jnp.where(same, 0, found - kept))
            finite = (jnp.where(jnp.isfinite(x), x, 0) for x in (kept, later))
            floats.append((off, *map(_largest, finite)))
    largest = functools.reduce(jnp.maximum, (size for _, size, _ in floats), 0.0)
    for off, size, later in floats:
        of_all = jnp.where(later > 0, jnp.minimum(largest, later), largest)
        instead = jnp.where(largest > 0, of_all, later)
        flags.append(off <= tolerance * jnp.where(size > 0, size, instead))
    return flags


def _largest(x: Value) -> Value:
    return jnp.max(jnp.abs(x), initial=0).astype(jnp.result_type(float))
