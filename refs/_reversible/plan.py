"""What the backward pass of a body has to find out, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from refs._reversible.explain import explain
from refs._reversible.flow import FlowNode
from refs._reversible.nodes import Body, Node, Solution, Var, is_smooth
from refs.errors import NotReversibleError


class Plan:
    """The backward pass of a body, before any value is known.

    Attributes:
      body: the body.
      varied: the variables that depend on what is differentiated.
      wanted: the variables that what has a cotangent depends on.
      active: those that are both: they have cotangents.
      used: for each equation: the operands whose values its pullback uses, by position.
      inner: the plans of the bodies of loops and branches.
      stored: the loops and branches that are left to JAX, with why they aren't undone.
      solution: what follows from what is known at the end; `is_settled`: whether it is set.
      demanded: the variables whose values pullbacks use.
    """

    def __init__(self, body: Body):
        self.body = body
        self.varied: set[Var] = set()
        self.wanted: set[Var] = set()
        self.active: set[Var] = set()
        self.used: dict[Node, list[int]] = {}
        self.inner: dict[Node, list[Plan]] = {}
        self.stored: dict[Node, str] = {}
        self.solution: Solution
        self.is_settled = False
        self.demanded: set[Var] = set()

    def plans_of(self, node: Node, bodies: Iterable[Body]) -> list[Plan]:
        """The plans of a node's bodies."""
        if node not in self.inner:
            self.inner[node] = [Plan(body) for body in bodies]
        return self.inner[node]

    def spread(self, inputs: Iterable[Var]) -> None:
        """Finds what varies with the inputs. It may be called again, with more."""
        self.varied.update(v for v in inputs if is_smooth(v))
        for node in self.body.nodes:
            node.spread(self)

    def want(self, outputs: Iterable[Var]) -> None:
        """Finds what the outputs depend on. It may be called again, with more."""
        self.wanted.update(v for v in outputs if is_smooth(v))
        for node in reversed(self.body.nodes):
            node.want(self)

    def settle(
        self,
        solution: Solution,
        hope: Callable[[], Solution] | None = None,
        around: FlowNode | None = None,
    ) -> None:
        """Finds what must be known for the pullbacks.

        Args:
          solution: what follows from what is known.
          hope: gives, for the body of a loop, what would follow if all that the loop carries could
            be undone: for the error.
          around: the loop or branch whose body it is, if what has run in it isn't known.

        Raises:
          NotReversibleError: if that can't be found from what is known at the end.
        """
        self.solution, self.is_settled = solution, True
        self.active = self.varied & self.wanted
        for node in self.body.nodes:
            if any(v in self.active for v in node.outs):
                needed = self._needs(node)
                self.demanded.update(needed)
                missing = [v for v in needed if v not in solution]
                if missing:
                    hoped = solution if hope is None else hope()
                    raise explain(self.body, hoped, node, missing[0], around)

    def _needs(self, node: Node) -> list[Var]:
        """The variables whose values the pullback of a node uses."""
        if not isinstance(node, FlowNode) or node.equation is None:
            return [*node.needs(self)]
        if node.is_left_to_jax and self._are_known(needed := [*node.equation.needs(self)]):
            self.stored[node] = "it is left to JAX"
            return needed
        why = "what it takes isn't known at the end"
        try:
            if self._are_known(needed := [*node.needs(self)]):
                return needed
        except NotReversibleError as error:
            why = str(error)
        self.stored[node] = why
        return [*node.equation.needs(self)]

    def _are_known(self, needed: Iterable[Var]) -> bool:
        return all(v in self.solution for v in needed)

    def pulled(self, node: Node) -> Node:
        """The node that cotangents are pulled through in the place of this one."""
        if isinstance(node, FlowNode) and node.equation is not None and node in self.stored:
            return node.equation
        return node
