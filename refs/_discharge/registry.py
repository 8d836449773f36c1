"""The table of discharge rules: the function that discharges each primitive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from refs._tracing.facts import declare
from refs._types import Eqn, Primitive, Value

if TYPE_CHECKING:
    from refs._discharge.interpreter import Context


class Rule(Protocol):
    """Discharges one equation."""

    def __call__(self, ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
        """Discharges `eqn`.

        Args:
          ctx: the interpretation under way; a rule evaluates inner jaxprs by `ctx.eval` or in a
            `ctx.scope`.
          eqn: the equation.
          args: a value for each array operand, a `Cell` for each ref operand.

        Returns:
          A value for each array output, a `Cell` for each ref output: always a list.
        """
        ...


_rules: dict[Primitive, Rule] = {}
_R = TypeVar("_R", bound=Rule)


def register(*primitives: Primitive, **facts: Any) -> Callable[[_R], _R]:
    """Registers the decorated rule for primitives, and returns it unchanged.

    The keywords are further facts about them: the attributes of `_tracing.facts.Facts`.
    """

    def registering(rule: _R) -> _R:
        declare(*primitives, **facts)
        for primitive in primitives:
            _rules[primitive] = rule
        return rule

    return registering


def rule_for(primitive: Primitive) -> Rule | None:
    return _rules.get(primitive)
