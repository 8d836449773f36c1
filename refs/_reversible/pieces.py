"""Values that can be put together from parts of them, which slices and constant indices name.

`jnp.roll(x, 1)` joins two slices of `x`. Each slice follows from what they were joined to, and `x`
from the slices: not from one of them, so this is no inverse of an operation, but a node of its own.
`y = x.at[2:].add(f(x[0]))` leaves `x[0]` as it was, so it follows from `y`; `r[[0, 1]] = r[[1, 0]]`
keeps each element of `r`, in what it has read or in what it leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from refs import _jax
from refs._indexing.sharded import sharded_as
from refs._reversible.equations import Equation
from refs._reversible.nodes import Lookup, Node, Operand, Relation, Solution, Step, Var
from refs._reversible.places import LARGEST, Literal
from refs._reversible.versions import Read, Version, Write
from refs._types import Value

# No more parts of one value are looked at.
MOST = 64


class Part(NamedTuple):
    """Elements of a value that another one holds.

    Attributes:
      value: what holds them.
      index: where they are in the whole: slices, a mask, or the positions along each axis.
      shape: the shape of what the index names.
      taken: where they are in `value`; None if that holds nothing else.
    """

    value: Var
    index: Any
    shape: tuple[int, ...]
    taken: Any = None

    @property
    def is_rest(self) -> bool:
        """Whether it is a value of the same shape that is right in these places."""
        return self.taken is self.index


class Overwriting(NamedTuple):
    """An operation that leaves the elements of a value in a mask as they are."""

    before: Var
    after: Var
    untouched: Value


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
        # Any element will do to begin with: each one is overwritten.
        rest = next((at(part.value) for part in parts if part.is_rest), None)
        if rest is None:
            [first, *_] = parts
            rest = jnp.broadcast_to(at(first.value).reshape(-1)[0], self.whole.aval.shape)
        for part in parts:
            if not part.is_rest:
                value = at(part.value)
                value = value if part.taken is None else value[part.taken]
                rest = rest.at[part.index].set(value.reshape(part.shape))
        return sharded_as(rest, self.whole.aval)


def pieces(nodes: Sequence[Node], made_by: Mapping[Var, Node]) -> list[Pieces]:
    """A node for each value of which others hold parts, or a permutation."""
    parts: dict[Var, dict[Var, Part]] = {}
    for node in nodes:
        part = part_of(node, made_by)
        whole = node.ins[0] if node.ins else None
        if part is not None and isinstance(whole, Var) and 0 not in part.shape:
            parts.setdefault(whole, {})[part.value] = part
    found = [piece for node in nodes for piece in _written(node, made_by)]
    steps = [step for node in nodes for step in _overwriting(node, parts, made_by)]
    for before, after, untouched in steps:
        # What has been read of the one is a part of the other, too, if it stays as it is.
        for part in [*parts.get(before, {}).values()][:MOST]:
            if part.taken is None and untouched[part.index].all():
                parts.setdefault(after, {}).setdefault(part.value, part)
                same = Part(after, ..., part.value.aval.shape, part.index)
                found.append(Pieces(part.value, [same]))
    for before, after, untouched in steps:
        if before in parts:
            rest = Part(after, untouched, (int(untouched.sum()),), untouched)
            parts[before][after] = rest
    return [*found, *(Pieces(whole, [*some.values()]) for whole, some in parts.items())]


def part_of(node: Node, made_by: Mapping[Var, Node]) -> Part | None:
    """The elements of a node's first operand that its result holds, if that is known."""
    if isinstance(node, Read):
        found = None if node.place.is_whole else _named(node, made_by)
        return None if found is None else Part(node.outs[0], *found)
    if not isinstance(node, Equation):
        return None
    p = node.eqn.params
    if node.eqn.primitive is lax.slice_p:
        strides = p["strides"] or (1,) * len(p["start_indices"])
        box = [*map(slice, p["start_indices"], p["limit_indices"], strides)]
        return Part(node.outs[0], tuple(box), node.outs[0].aval.shape)
    if node.eqn.primitive is lax.gather_p and node.ins[0].aval.size <= LARGEST:
        indices = constant(node.ins[1], made_by)
        if indices is not None:
            return _gathered(node, indices)
    return None


def _named(
    node: Read | Version, made_by: Mapping[Var, Node]
) -> tuple[tuple[Any, ...], tuple[int, ...]] | None:
    """The elements that an access names, and the shape of what it names, if that is known."""
    place, whole = node.place, node.ins[0].aval
    if place.spans is not None:
        box = [slice(s.start, s.start + (s.size - 1) * s.step + 1, s.step) for s in place.spans]
        return tuple(box), tuple(s.size for s in place.spans)
    if not place.is_safe or place.tree is None or whole.size > LARGEST:
        return None
    with jax.ensure_compile_time_eval():
        leaves = [constant(v, made_by) for v in place.leaves]
        places = np.asarray(place.read(_numbers(whole.shape), leaves))
    return np.unravel_index(places, whole.shape), places.shape


def _gathered(node: Equation, indices: Value) -> Part | None:
    """The elements that a `gather` gives, if all of them are in bounds."""
    whole, shape = node.ins[0].aval, node.outs[0].aval.shape
    params = {**node.eqn.params, "fill_value": -1}
    with jax.ensure_compile_time_eval():
        [found] = _jax.bind_eqn(node.eqn.replace(params=params), [_numbers(whole.shape), indices])
    places = np.asarray(found)
    if (places < 0).any():
        return None
    return Part(node.outs[0], np.unravel_index(places, whole.shape), shape)


def _written(node: Node, made_by: Mapping[Var, Node]) -> Iterator[Pieces]:
    """What a `scatter` has written follows from its result."""
    places = _scattered(node, made_by) if _is_scatter(node, lax.scatter_p) else None
    if places is None or not isinstance(node.ins[2], Var):
        return
    shape, order = node.ins[2].aval.shape, np.argsort(places, axis=None, kind="stable")
    order = order[np.count_nonzero(places < 0) :]
    if len(order) == np.prod(shape, dtype=int):  # none is dropped, or overwritten by another
        part = Part(node.outs[0], ..., shape, np.unravel_index(order, places.shape))
        yield Pieces(node.ins[2], [part])


def _overwriting(
    node: Node, parts: Mapping[Var, Any], made_by: Mapping[Var, Node]
) -> Iterator[Overwriting]:
    """A write or `scatter` by constant indices to a value of which parts have been read."""
    before = node.ins[0] if node.ins else None
    if not isinstance(before, Var) or before.aval.size > LARGEST:
        return
    untouched = None
    if isinstance(node, Version):
        # Otherwise `link` knows it.
        is_new = node.place.spans is None or (isinstance(node, Write) and not node.olds)
        named = _named(node, made_by) if is_new and before in parts else None
        if named is None:
            return
        untouched = np.ones(before.aval.shape, bool)
        untouched[named[0]] = False
    elif _is_scatter(node, lax.scatter_p, lax.scatter_add_p, lax.scatter_sub_p):
        places = _scattered(node, made_by)
        untouched = None if places is None else places < 0
    if untouched is not None and untouched.any():
        yield Overwriting(before, node.outs[0], untouched)


def _is_scatter(node: Node, *primitives: Any) -> bool:
    return type(node) is Equation and node.eqn.primitive in primitives


def _scattered(node: Node, made_by: Mapping[Var, Node]) -> Value | None:
    """For each element of a `scatter`'s result: the number of what was written there, or -1."""
    assert isinstance(node, Equation)
    indices = constant(node.ins[1], made_by)
    whole, updates = node.ins[0].aval, node.ins[2].aval
    if indices is None or max(whole.size, updates.size) > LARGEST:
        return None
    with jax.ensure_compile_time_eval():
        found = lax.scatter(
            jnp.full(whole.shape, -1, jnp.int32),
            indices,
            _numbers(updates.shape),
            node.eqn.params["dimension_numbers"],
            mode=node.eqn.params["mode"],
        )
    return np.asarray(found)


def _numbers(shape: Sequence[int]) -> Value:
    return jnp.arange(np.prod(shape, dtype=int), dtype=jnp.int32).reshape(shape)


def constant(
    x: Operand, made_by: Mapping[Var, Node], found: dict[Operand, Value | None] | None = None
) -> Value | None:
    """The value of an operand that is made of constants alone. `found`: of others already."""
    found = {} if found is None else found
    if isinstance(x, Literal):
        return None if isinstance(x.value, _jax.Tracer) else x.value
    if x not in found:
        node = made_by.get(x)
        found[x] = None
        if type(node) is Equation and not node.eqn.effects:
            operands = [constant(operand, made_by, found) for operand in node.ins]
            if all(operand is not None for operand in operands):
                with jax.ensure_compile_time_eval():
                    found.update(zip(node.outs, node.run(operands), strict=True))
    return found[x]
