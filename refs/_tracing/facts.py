"""One record of facts for each primitive: the jaxprs that it runs, its use of refs and lanes.

The facts of a primitive that has a discharge rule stand with the rule, `@register(p, ...)`. Those
of operations on arrays are in `array_facts`. For any other primitive, JAX's own information counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from refs import _jax
from refs._tracing.touch import Touch
from refs._types import Atom, ClosedJaxpr, Eqn, Primitive

Inner = Iterator[tuple[ClosedJaxpr, Sequence[Atom]]]  # jaxprs, each with its operands


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

    Both are functions of an equation, with results that can be compared: a move undoes another one
    of the same primitive if it `does` what that is `undone_by`.
    """

    does: Callable[[Eqn], Any]
    undone_by: Callable[[Eqn], Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The record of a primitive.

    Attributes:
      inner: gives the jaxprs that an equation runs, each with the operands that it is given.
      runs_once: whether it runs its only jaxpr once, on its operands, and returns its outputs.
      touch: what it does to its ref operands. None: what its effects say; without effects it may
        read and write all of them.
      returns_old: whether its result is the ref's old value: if that is used, the ref is read.
      updates: how it updates an operand, which becomes the result: it accumulates, multiplies …
      updates_flags: the same for booleans.
      of_first: whether it updates the first operand only.
      moves: how it moves elements, or `STAYS`.
      lanes: for collectives over the lanes of a `vmap`: whether their results differ between lanes.
      in_place: its part in updates in place: an "update" changes a few elements of its first
        operand, an "add" is a sum of whole arrays, a "read" is of a few elements, and a "deposit"
        puts an array into a larger one of zeros.
      carries: the operands that its first outputs continue, in the same memory: the position of the
        first, and how many.
      elementwise: whether each element of its result is made of those in its place of operands.
      reduces: whether its result is made of all elements along some axes: XLA on CPU computes it
        together with what takes it, at times.
      is_computed_once: whether XLA gives its result memory of its own, and never repeats it.
      can_fail: whether running it may raise. None: its name decides.
    """

    inner: Callable[[Eqn], Inner] = all_inner
    runs_once: bool = False
    touch: Touch | None = None
    returns_old: bool = False
    updates: Touch | None = None
    updates_flags: Touch | None = None
    of_first: bool = False
    moves: Move | None = None
    lanes: Literal["differ", "agree"] | None = None
    in_place: Literal["update", "add", "read", "deposit"] | None = None
    carries: Callable[[Eqn], tuple[int, int]] | None = None
    elementwise: bool = False
    reduces: bool = False
    is_computed_once: bool = False
    can_fail: bool | None = None


# The elements stay where they are, and only their type changes.
STAYS = Move(lambda eqn: None, lambda eqn: None)

_UNKNOWN = Facts()
_facts: dict[Primitive, Facts] = {}


def declare(*primitives: Primitive, **facts: Any) -> None:
    """Adds facts to the records of primitives; the keywords are the attributes of `Facts`."""
    for primitive in primitives:
        _facts[primitive] = dataclasses.replace(_record(primitive), **facts)


def facts_of(eqn: Eqn) -> Facts:
    return _facts.get(eqn.primitive) or _record(_jax.primitive_of(eqn))


def _record(primitive: Primitive) -> Facts:
    return _facts.get(primitive, _UNKNOWN)


def inner_calls(eqn: Eqn) -> Inner:
    """The jaxprs that an equation runs, each with the operands that it is given."""
    return facts_of(eqn).inner(eqn)


def can_fail(closed: ClosedJaxpr) -> bool:
    """True where running the jaxpr may raise: it calls Python, or functions outside of XLA."""
    return _can_fail(closed.jaxpr)


_can_fail = _jax.anywhere(lambda eqn: can_fail_itself(eqn.primitive))


def can_fail_itself(primitive: Primitive) -> bool:
    known = _record(primitive).can_fail
    return _jax.is_called_callback(primitive) if known is None else known
