"""The body of a reversible function: each write makes a new version of a ref, and nothing changes.

A function over refs becomes a list of nodes over variables that are assigned once. A version of a
ref is such a variable, and a write is a node from one version to the next. So "what can be known of
the past from the present?" is a question about a graph: each node says in which ways it gives
values (`ways`), forwards or backwards, and `solve` follows them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import jax.numpy as jnp

from refs._origin import Origin
from refs._reversible.fixed import Fixed
from refs._reversible.places import Literal
from refs._types import Atom, Aval, Value

if TYPE_CHECKING:
    from refs._reversible.backward import Backward
    from refs._reversible.plan import Plan


class State(NamedTuple):
    """A ref of a body: its origin, and how its contents are kept between writes."""

    origin: Origin
    fixed: Fixed | None


class Var:
    """A variable, assigned once. A version of a ref has the `state` that it is a version of."""

    __slots__ = ("aval", "state")

    def __init__(self, aval: Aval, state: State | None = None):
        self.aval, self.state = aval, state


Operand: TypeAlias = Var | Literal
Lookup: TypeAlias = Callable[[Operand], Value]


class Step(NamedTuple):
    """One way to find values: `compute(lookup)` gives those of `gives` from those of `deps`.

    `runs`: whether this is the node's own evaluation, as in the forward pass.
    """

    node: Node
    deps: tuple[Var, ...]
    gives: tuple[Var, ...]
    compute: Callable[[Lookup], Sequence[Value]]
    runs: bool = False


class Node(ABC):
    """An operation of a body. Subclasses define what its attributes mean.

    Attributes:
      line: the user's line that it comes from.
      ins: its operands.
      outs: its results.
      rank: which steps of a node that aren't its own evaluation are taken first: see `solve`.
      rounds: whether it encodes an operand, which must then be computed to the same bits each time.
    """

    rank = 2
    rounds = False
    line: str
    ins: tuple[Operand, ...]
    outs: tuple[Var, ...]

    @abstractmethod
    def run(self, values: Sequence[Value]) -> Sequence[Value]:
        """The results, from the values of the operands."""

    @abstractmethod
    def ways(self, known: Solution) -> Iterator[Step]:
        """The steps that can be done where the variables in `known` are known."""

    def needs(self, plan: Plan) -> Iterable[Var]:
        """The variables whose values `pull` uses."""
        return ()

    def evaluate(self, run: Backward, values: Sequence[Value]) -> Sequence[Value]:
        """The results, in the backward pass, where `pull` comes after."""
        return self.run(values)

    @abstractmethod
    def pull(self, run: Backward) -> None:
        """Takes the cotangents of the results, and adds to those of the operands."""

    @property
    def watched(self) -> Iterable[Var]:
        """The variables that bring about a way if they become known."""
        return (*variables(self.ins), *self.outs)

    def spread(self, plan: Plan) -> None:
        """Adds to `plan.varied` the results that vary if operands do."""
        if any(v in plan.varied for v in self.ins):
            plan.varied.update(v for v in self.outs if is_smooth(v))

    def want(self, plan: Plan) -> None:
        """Adds to `plan.wanted` the operands that a wanted result depends on."""
        if any(v in plan.wanted for v in self.outs):
            plan.wanted.update(v for v in variables(self.ins) if is_smooth(v))

    def own_way(self, known: Solution) -> Iterator[Step]:
        """The node's own evaluation, if all operands are known."""
        deps = tuple(variables(self.ins))
        if all(v in known for v in deps) and any(v not in known for v in self.outs):
            yield Step(self, deps, self.outs, lambda at: self.run([at(a) for a in self.ins]), True)


class Relation(Node):
    """A node that computes nothing: it says how a value follows from others."""

    rank = 0
    ins = ()
    outs = ()
    line = "the end"

    def run(self, values: Sequence[Value]) -> list[Value]:
        return []

    def pull(self, run: Backward) -> None:
        """There is nothing to pull."""


class Solution:
    """What is known, and by which steps: a set of variables that grows.

    Attributes:
      given: what is known at first.
      is_exact: whether floats must be found to the bit.
      is_careful: whether products are not to be undone.
      steps: the step that gives each variable that wasn't known at first.
      offered: the nodes that have offered a step to a variable, each with that: the first step that
        is offered is taken.
    """

    def __init__(self, given: Iterable[Var], is_exact: bool, is_careful: bool):
        self.given = frozenset(given)
        self.is_exact, self.is_careful = is_exact, is_careful
        self.steps: dict[Var, Step] = {}
        self.offered: set[tuple[Node, Var]] = set()

    def __contains__(self, x: Operand) -> bool:
        return isinstance(x, Literal) or x in self.given or x in self.steps


class Body:
    """A function of variables.

    Attributes:
      inputs: its parameters.
      nodes: its operations, in the program's order.
      outputs: its results.
      saved: variables inside that the backward pass is given: counts of steps of `while_loop`s.
      is_careful: whether products, which lose digits when they are undone, are not to be.
      solutions: those that `solve` has found, by what was known and whether to the bit.
    """

    def __init__(
        self,
        inputs: Sequence[Var],
        nodes: Sequence[Node],
        outputs: Sequence[Operand],
        saved: Sequence[Var] = (),
        is_careful: bool = False,
    ):
        self.inputs, self.nodes, self.outputs = tuple(inputs), tuple(nodes), tuple(outputs)
        self.saved, self.is_careful = tuple(saved), is_careful
        self.solutions: dict[tuple[frozenset[Var], bool], Solution] = {}

    def run(
        self,
        inputs: Sequence[Value],
        evaluate: Callable[[Node, Sequence[Value]], Sequence[Value]] = lambda node, xs: node.run(
            xs
        ),
    ) -> dict[Var, Value]:
        """The values of all variables; `evaluate(node, operands)` gives the results of a node."""
        env: dict[Var, Value] = dict(zip(self.inputs, inputs, strict=True))
        for node in self.nodes:
            out = evaluate(node, [value_of(env, a) for a in node.ins])
            env.update(zip(node.outs, out, strict=True))
        return env

    def results(self, inputs: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        """The values of `outputs` and of `saved`."""
        env = self.run(inputs)
        return [value_of(env, a) for a in self.outputs], [env[v] for v in self.saved]


def variables(operands: Iterable[Operand]) -> Iterator[Var]:
    return (x for x in operands if isinstance(x, Var))


def value_of(env: dict[Var, Value], x: Operand) -> Value:
    return x.value if isinstance(x, Literal) else env[x]


def state_of(x: Operand) -> State | None:
    """The ref that an operand is a version of."""
    return x.state if isinstance(x, Var) else None


def is_smooth(v: Operand | Atom) -> bool:
    """Whether values of this type have derivatives."""
    return jnp.issubdtype(v.aval.dtype, jnp.inexact)


def unbroadcast(ct: Value, operand: Operand) -> Value:
    """The cotangent of an operand, perhaps of fewer or shorter axes, from that of the sum."""
    shape = operand.aval.shape
    if ct.shape == shape:
        return ct
    extra = ct.ndim - len(shape)
    short = [k + extra for k, n in enumerate(shape) if n != ct.shape[k + extra]]
    return jnp.sum(ct, (*range(extra), *short), keepdims=True).reshape(shape)
