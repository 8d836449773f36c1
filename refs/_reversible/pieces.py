"""Values that can be put together from parts of them, which slices and permutations have moved.

`jnp.roll(x, 1)` joins two slices of `x`. Each slice follows from what they were joined to, and `x`
from the slices: not from one of them, so this is no inverse of an operation, but a node of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from refs import _jax
from refs._reversible.equations import Equation
from refs._reversible.nodes import Lookup, Node, Operand, Relation, Solution, Step, Var
from refs._reversible.places import Literal
from refs._reversible.versions import Read
from refs._types import Value


class Part(NamedTuple):
    """Elements of a value that another one holds.

    Attributes:
      value: what holds them.
      index: where they are: slices, or the positions along each axis.
      shape: the shape of what the index names.
    """

    value: Var
    index: tuple[Any, ...]
    shape: tuple[int, ...]


class Pieces(Relation):
    """A value of which parts are known: where they cover it, it is, too."""

    def __init__(self, whole: Var, parts: Sequence[Part]):
        self.whole, self.parts = whole, parts

    @property
    def watched(self) -> Iterable[Var]:
        return (part.value for part in self.parts)

    def ways(self, known: Solution) -> Iterator[Step]:
        if self.whole in known:
            return
        found = [part for part in self.parts if part.value in known]
        if self._is_covered(found):
            deps = tuple(part.value for part in found)
            yield Step(self, deps, (self.whole,), lambda at: [self._joined(found, at)])

    def _is_covered(self, parts: Sequence[Part]) -> bool:
        shape = self.whole.aval.shape
        if sum(np.prod(part.shape, dtype=int) for part in parts) < np.prod(shape, dtype=int):
            return False
        seen = np.zeros(shape, bool)
        for part in parts:
            seen[part.index] = True
        return bool(seen.all())

    def _joined(self, parts: Sequence[Part], at: Lookup) -> Value:
        def join(*values: Value) -> Value:
            # Any element will do to begin with: each one is overwritten.
            whole = jnp.broadcast_to(values[0].reshape(-1)[0], self.whole.aval.shape)
            for part, value in zip(parts, values, strict=True):
                whole = whole.at[part.index].set(value.reshape(part.shape))
            return whole

        return join(*(at(part.value) for part in parts))


def pieces(nodes: Sequence[Node], made_by: Mapping[Var, Node]) -> list[Pieces]:
    """A node for each value of which several nodes have taken parts, or one a permutation."""
    parts: dict[Var, list[Part]] = {}
    for node in nodes:
        part = part_of(node, made_by)
        whole = node.ins[0] if node.ins else None
        if part is not None and isinstance(whole, Var) and 0 not in part.shape:
            parts.setdefault(whole, []).append(part)
    return [Pieces(whole, some) for whole, some in parts.items()]


def part_of(node: Node, made_by: Mapping[Var, Node]) -> Part | None:
    """The elements of a node's first operand that its result holds, if that is known."""
    if isinstance(node, Read):
        spans = node.place.spans
        if spans is None or node.place.is_whole:
            return None
        box = [slice(s.start, s.start + (s.size - 1) * s.step + 1, s.step) for s in spans]
        return Part(node.outs[0], tuple(box), tuple(s.size for s in spans))
    if not isinstance(node, Equation):
        return None
    p = node.eqn.params
    if node.eqn.primitive is lax.slice_p:
        strides = p["strides"] or (1,) * len(p["start_indices"])
        box = [*map(slice, p["start_indices"], p["limit_indices"], strides)]
        return Part(node.outs[0], tuple(box), node.outs[0].aval.shape)
    if node.eqn.primitive is lax.gather_p and node.outs[0].aval.size == node.ins[0].aval.size:
        indices = _constant(node.ins[1], made_by)
        if indices is not None:
            return _permutation(node, indices)
    return None


def _permutation(node: Equation, indices: Value) -> Part | None:
    """The elements that a `gather` gives, if all of them are in bounds."""
    whole, shape = node.ins[0].aval, node.outs[0].aval.shape
    params = {**node.eqn.params, "fill_value": -1}
    with jax.ensure_compile_time_eval():
        numbers = jnp.arange(whole.size, dtype=jnp.int32).reshape(whole.shape)
        [found] = _jax.bind_eqn(node.eqn.replace(params=params), [numbers, indices])
    places = np.asarray(found)
    if (places < 0).any():
        return None
    return Part(node.outs[0], np.unravel_index(places, whole.shape), shape)


def _constant(x: Operand, made_by: Mapping[Var, Node]) -> Value | None:
    """The value of an operand that is made of constants alone."""
    if isinstance(x, Literal):
        return None if isinstance(x.value, _jax.Tracer) else x.value
    node = made_by.get(x)
    if type(node) is not Equation or node.eqn.effects:
        return None
    operands = [_constant(operand, made_by) for operand in node.ins]
    if any(operand is None for operand in operands):
        return None
    with jax.ensure_compile_time_eval():
        return node.run(operands)[node.outs.index(x)]
