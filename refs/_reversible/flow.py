"""What nodes of loops and branches have in common: bodies, which are solved in their own right."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from refs._reversible.nodes import (
    Body,
    Node,
    Operand,
    Solution,
    Step,
    Var,
    is_smooth,
    variables,
)
from refs._types import Value

if TYPE_CHECKING:
    from refs._reversible.equations import Equation
    from refs._reversible.plan import Plan


class FlowNode(Node):
    """A loop or branch. Its `outs` are the outputs of its bodies, and then what is its own.

    Attributes:
      bodies: what it runs: one of them, or the same one in each step.
      operands: the inputs of the bodies, a part of `ins`.
      carried: what a step returns for the next one: by its place among the outputs of the body, and
        by that among the inputs.
      results: those of `outs` that are the equation's own.
      saved: those of `outs` that the backward pass is given.
      key: the variable that says what has run in it.
      equation: of one over arrays alone: the same, as an equation. JAX differentiates that, and
        stores the steps.
      is_left_to_jax: whether it is, if that is possible; else only if it can't be undone.
      why: why it can't be undone, if each of its writes could.
    """

    bodies: tuple[Body, ...]
    operands: tuple[Operand, ...]
    carried: Sequence[tuple[int, int]] = ()
    results: Sequence[Var]
    saved: Sequence[Var]
    key: Operand | None = None
    equation: Equation | None = None
    is_left_to_jax = False
    why = "the loop there doesn't give back what the ref held before"

    # --- What varies, and what is wanted

    def spread(self, plan: Plan) -> None:
        for inner in plan.plans_of(self, self.bodies):
            inputs, outputs = inner.body.inputs, inner.body.outputs
            varied = {m for v, m in zip(self.operands, inputs, strict=True) if v in plan.varied}
            n = -1
            while n < len(varied):
                n = len(varied)
                inner.spread(varied)
                varied |= {inputs[j] for k, j in self.carried if outputs[k] in inner.varied}
            found = {v for v, m in zip(self.outs, outputs, strict=False) if m in inner.varied}
            found |= {self.outs[k] for k, j in self.carried if inputs[j] in inner.varied}
            plan.varied |= found

    def want(self, plan: Plan) -> None:
        for inner in plan.inner[self]:
            inputs, outputs = inner.body.inputs, inner.body.outputs
            pairs = zip(self.outs, outputs, strict=False)
            wanted = {m for v, m in pairs if v in plan.wanted and isinstance(m, Var)}
            n = -1
            while n < len(wanted):
                n = len(wanted)
                inner.want(wanted)
                again = (outputs[k] for k, j in self.carried if inputs[j] in inner.wanted)
                wanted.update(v for v in variables(again) if is_smooth(v))
            pairs = zip(self.operands, inputs, strict=True)
            found = (v for v, m in pairs if m in inner.wanted and is_smooth(v))
            plan.wanted.update(variables(found))
        # A loop of no steps returns the carry that it is given.
        initial = (self.operands[j] for k, j in self.carried if self.outs[k] in plan.wanted)
        plan.wanted.update(variables(initial))

    # --- What is known

    @abstractmethod
    def given(self, k: int, known: Solution) -> dict[Var, Operand]:
        """What is known in a body because something outside is, and which variable that is."""

    @abstractmethod
    def solved(self, known: Solution) -> list[Solution]:
        """What can be known in the bodies, where what follows them is undone."""

    @abstractmethod
    def inside(self, known: Solution) -> list[Solution]:
        """What would follow in the bodies if all that they return were known: for messages."""

    @abstractmethod
    def outside(
        self, known: Solution, inner: Sequence[Solution], wanted: Sequence[Iterable[Var]]
    ) -> list[Var]:
        """The variables outside that give the bodies what the `wanted` variables follow from."""

    @abstractmethod
    def restored(self, known: Solution, inner: Sequence[Solution], j: int) -> Callable[..., Value]:
        """What finds an operand, from the values of variables outside."""

    def can_return(self, j: int, known: Solution) -> bool:
        """Whether what the operand has become is known."""
        return True

    def ways(self, known: Solution) -> Iterator[Step]:
        yield from self.own_way(known)
        if self.unknown(known) is not None:
            return
        unknown = [
            (j, v)
            for j, v in enumerate(self.operands)
            if isinstance(v, Var) and v not in known and (self, v) not in known.offered
            if self.can_return(j, known)
        ]
        inner = self.solved(known) if unknown else []
        for j, v in unknown:
            wanted = [body.inputs[j] for body in self.bodies]
            if all(w in s for w, s in zip(wanted, inner, strict=True)):
                deps = self.outside(known, inner, [[w] for w in wanted])
                find = self.restored(known, inner, j)
                yield Step(self, tuple(deps), (v,), lambda at, find=find: [find(at)])

    def unknown(self, known: Solution) -> FlowNode | None:
        """Itself, if it isn't known what has run in it."""
        return None if self.key is None or self.key in known else self

    def needs(self, plan: Plan) -> Iterable[Var]:
        inner, known = plan.inner[self], plan.solution
        solutions = self.solved(known)
        for k, (one, solution) in enumerate(zip(inner, solutions, strict=True)):
            one.settle(solution, lambda k=k: self.inside(known)[k], self.unknown(known))
        return self.outside(known, solutions, [one.demanded for one in inner])
