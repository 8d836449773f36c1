"""What is known of each primitive, in one record: what it runs, what it does to refs, and to lanes.

The record of a primitive that has a discharge rule stands with the rule, `@register(p, ...)`. Those
of operations on arrays are in `array_facts`. Of any other primitive, what JAX says of it counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

from refs import _jax
from refs._tracing.touch import Touch
from refs._types import ClosedJaxpr, Eqn, Primitive

Inner = Iterator[tuple[Any, Sequence[Any]]]


def all_inner(eqn: Eqn) -> Inner:
    """The jaxprs among an equation's parameters that take all of its operands."""
    for closed in _jax.jaxprs_in(eqn.params):
        inputs = closed.jaxpr.invars
        # Not if it has refs where the operands are arrays.
        if len(inputs) == len(eqn.invars) and all(
            _jax.is_ref_type(v.aval) == _jax.is_ref_type(a.aval)
            for v, a in zip(inputs, eqn.invars, strict=True)
        ):
            yield closed, eqn.invars


class Move(NamedTuple):
    """An operation that only puts elements in other places: what it does, and what undoes that.

    Both are functions of an equation, and what they give can be compared. None if the elements
    stay where they are, and only their type changes.
    """

    does: Callable[[Any], Any]
    undone_by: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The record of a primitive.

    Attributes:
      inner: gives the jaxprs that an equation runs, each with the operands that it is given.
      runs_once: whether it runs its only jaxpr once, on its operands, and returns what that does.
      touch: what it does to its ref operands. None is what its effects say, and that it may read
        and write all if it has none.
      returns_old: whether a result is what the ref held: where it is used, the ref is read.
      updates: what its result is of an operand: that added to, multiplied …
      updates_flags: the same of booleans.
      of_first: whether that is so of the first operand only.
      moves: how it moves elements, or `STAYS`.
      lanes: for collectives over the lanes of a `vmap`: whether what they give them differs.
      in_place: what XLA can do in place, or has to wait for it: an "update" changes a few cells of
        its first operand, an "add" is a sum of whole arrays, a "read" is of a few cells, and
        a "deposit" puts an array into a larger one of zeros.
      carries: which operands its first outputs go on from, in the same memory: the first, and how
        many.
      is_computed_once: whether XLA gives its result memory of its own, and never repeats it.
      can_fail: whether running it may raise. None is what its name says.
    """

    inner: Callable[[Any], Inner] = all_inner
    runs_once: bool = False
    touch: Touch | None = None
    returns_old: bool = False
    updates: Touch | None = None
    updates_flags: Touch | None = None
    of_first: bool = False
    moves: Move | None = None
    lanes: Literal["differ", "agree"] | None = None
    in_place: Literal["update", "add", "read", "deposit"] | None = None
    carries: Callable[[Any], tuple[int, int]] | None = None
    is_computed_once: bool = False
    can_fail: bool | None = None


STAYS = Move(lambda eqn: None, lambda eqn: None)

_UNKNOWN = Facts()
_facts: dict[Any, Facts] = {}


def declare(*primitives: Any, **facts: Any) -> None:
    """Adds to what is known of primitives; the keywords are the attributes of `Facts`."""
    for primitive in primitives:
        _facts[primitive] = dataclasses.replace(facts_of(primitive), **facts)


def facts_of(primitive: Primitive) -> Facts:
    return _facts.get(primitive, _UNKNOWN)


def inner_calls(eqn: Eqn) -> Inner:
    """The jaxprs that an equation runs, each with the operands that it is given."""
    return facts_of(eqn.primitive).inner(eqn)


def can_fail(closed: ClosedJaxpr) -> bool:
    """True where running the jaxpr may raise: it calls back into Python, or out of XLA."""
    jaxpr = closed.jaxpr
    if jaxpr not in _can_fail:
        _can_fail[jaxpr] = _jax.any_equation(closed, lambda eqn: can_fail_itself(eqn.primitive))
    return _can_fail[jaxpr]


_can_fail: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def can_fail_itself(primitive: Primitive) -> bool:
    known = facts_of(primitive).can_fail
    return _jax.is_called_callback(primitive) if known is None else known
