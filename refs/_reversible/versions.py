"""Nodes of accesses to refs: reads, and writes, which make a new version of an old one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from refs._indexing.sharded import sharded_as
from refs._reversible.nodes import (
    Lookup,
    Node,
    Operand,
    Solution,
    Step,
    Var,
    unbroadcast,
    variables,
)
from refs._reversible.places import Place
from refs._types import Value

if TYPE_CHECKING:
    from refs._reversible.backward import Backward
    from refs._reversible.plan import Plan


# So many versions that agree with a part are asked for it, in each direction.
NEAREST = 8


class Version(Node):
    """A node that makes a version of a ref of another: the part of it outside `place` is the same.

    Attributes:
      place: the part that it changes.
      value: what the part holds after, if that is an operand or a variable of its own.
      same: the versions in which the part is as it is after.
    """

    rank = 1
    place: Place
    value: Operand | None
    same: list[Operand]

    @property
    def before(self) -> Operand:
        return self.ins[0]

    @property
    def after(self) -> Var:
        return self.outs[0]

    @property
    def watched(self) -> Iterable[Var]:
        of_value = () if self.value is None else (self.value,)
        return variables((*self.ins, *self.outs, *self.same, *of_value))

    def needs(self, plan: Plan) -> Iterable[Var]:
        return variables(self.place.leaves)

    def ways_to_value(self, known: Solution) -> Iterator[Step]:
        """What was written is read back."""
        place, value = self.place, self.value
        if not isinstance(value, Var) or value in known or not place.is_safe:
            return
        version = next((v for v in self.same if v in known), None)
        if version is not None and all(v in known for v in place.leaves):
            deps = tuple(variables((version, *place.leaves)))
            yield Step(
                self, deps, (value,), lambda at: [place.read(at(version), [*map(at, place.leaves)])]
            )


class Read(Node):
    """The value of a part of a version."""

    rank = 0

    def __init__(self, version: Operand, place: Place, out: Var, line: str):
        self.ins, self.outs, self.line = (version, *place.leaves), (out,), line
        self.place = place
        # The versions in which the part is the same, the next ones first: see `link`.
        self.same: list[Operand] = [version]

    @property
    def watched(self) -> Iterable[Var]:
        return (*variables(self.same), *variables(self.place.leaves), *self.outs)

    def run(self, values: Sequence[Value]) -> list[Value]:
        return [self.place.read(values[0], values[1:])]

    def ways(self, known: Solution) -> Iterator[Step]:
        [out], version = self.outs, self.ins[0]
        if not all(v in known for v in self.place.leaves):
            return
        if out in known:
            if self.place.is_all and isinstance(version, Var) and version not in known:
                deps = (out, *variables(self.place.leaves))
                yield Step(self, deps, (version,), self._put_back)
            return
        for version in self.same:
            if version in known:
                deps = tuple(variables((version, *self.place.leaves)))
                yield Step(self, deps, (out,), lambda at, v=version: [self._read(at, v)])
                return

    def _put_back(self, at: Lookup) -> list[Value]:
        """The version, all of whose elements have been read, each once."""
        part = at(self.outs[0])
        leaves = [at(v) for v in self.place.leaves]
        aval = self.ins[0].aval
        like = sharded_as(jnp.zeros(aval.shape, part.dtype), aval)
        return [self.place.write(like, leaves, part)]

    def _read(self, at: Lookup, version: Operand) -> Value:
        return self.place.read(at(version), [at(v) for v in self.place.leaves])

    def needs(self, plan: Plan) -> Iterable[Var]:
        return variables(self.place.leaves)

    def pull(self, run: Backward) -> None:
        ct = run.take(self.outs[0])
        version = self.ins[0]
        if ct is None or not run.is_active(version):
            return
        leaves = [run.value(v) for v in self.place.leaves]
        if self.place.is_whole:
            run.give(version, ct)
        elif self.place.is_safe:
            run.put(version, self.place.add(run.cotangent(version), leaves, ct))
        else:
            run.give(version, _transposed(lambda x: self.place.read(x, leaves), run, version, ct))


def _transposed(fun: Callable[..., Value], run: Backward, operand: Operand, ct: Value) -> Value:
    """The cotangent of the operand of a linear function."""
    [out] = jax.linear_transpose(fun, run.zeros(operand))(ct)
    return out


class Write(Version):
    """Overwrites a part of a version."""

    value: Operand

    def __init__(self, version: Operand, place: Place, value: Operand, after: Var, line: str):
        self.ins, self.outs, self.line = (version, value, *place.leaves), (after,), line
        self.place, self.value = place, value
        self.same: list[Operand] = [after]
        # Variables that hold the part as it was before: see `link`.
        self.olds: list[Operand] = []

    @property
    def watched(self) -> Iterable[Var]:
        return (*super().watched, *variables(self.olds))

    def run(self, values: Sequence[Value]) -> list[Value]:
        return [self.place.write(values[0], values[2:], values[1])]

    def ways(self, known: Solution) -> Iterator[Step]:
        yield from self.own_way(known)
        yield from self.ways_to_value(known)
        place = self.place
        if place.is_whole and self.value in known and self.after not in known:
            # What was there before doesn't matter.
            deps = tuple(variables((self.value,)))
            yield Step(self, deps, (self.after,), lambda at: [at(self.value)])
        if not place.is_safe or not all(v in known for v in (*place.leaves, self.after)):
            return
        old = next((v for v in self.olds if v in known), None)
        if old is not None and self.before not in known and isinstance(self.before, Var):
            deps = (self.after, *variables((old, *place.leaves)))
            yield Step(
                self,
                deps,
                (self.before,),
                lambda at: [place.write(at(self.after), [*map(at, place.leaves)], at(old))],
            )

    def pull(self, run: Backward) -> None:
        ct = run.take(self.after)
        if ct is None:
            return
        leaves = [run.value(v) for v in self.place.leaves]
        if self.place.is_safe:
            if run.is_active(self.value):
                run.give(self.value, self.place.read(ct, leaves))
            if run.is_active(self.before) and not self.place.is_whole:
                nothing = jnp.zeros_like(self.place.read(ct, leaves))
                run.give(self.before, self.place.write(ct, leaves, nothing))
            return

        def written(x: Value, value: Value) -> Value:
            return self.place.write(x, leaves, value)

        like = [run.zeros(self.before), run.zeros(self.value)]
        # Not `linear_transpose`: JAX has none for an index that may name an element twice.
        _, pull = jax.vjp(written, *like)
        of_before, of_value = pull(ct)
        run.give(self.before, of_before)
        run.give(self.value, of_value)


class Accumulate(Version):
    """Adds to a part of a version, or subtracts from it (`sign` -1)."""

    def __init__(
        self,
        version: Operand,
        place: Place,
        amount: Operand,
        sign: int,
        value: Operand | None,
        after: Var,
        line: str,
    ):
        self.ins, self.outs, self.line = (version, amount, *place.leaves), (after,), line
        self.place, self.sign, self.value = place, sign, value
        self.same: list[Operand] = [after]
        assert after.state is not None
        self.fixed = after.state.fixed
        self.rounds = self.fixed is not None

    @property
    def amount(self) -> Operand:
        return self.ins[1]

    def run(self, values: Sequence[Value]) -> list[Value]:
        version, amount, *leaves = values
        return [self._added(version, amount, leaves, self.sign)]

    def _added(self, x: Value, amount: Value, leaves: Sequence[Value], sign: int) -> Value:
        # Rounded first, then negated: what is subtracted must be what was added.
        amount = amount if self.fixed is None else self.fixed.encode(amount)
        return self._plus(x, amount, leaves, sign)

    def _plus(self, x: Value, amount: Value, leaves: Sequence[Value], sign: int) -> Value:
        part = jax.eval_shape(lambda x: self.place.read(x, leaves), x)
        if jnp.shape(amount) != part.shape:
            amount = jnp.broadcast_to(amount, part.shape)
        return self.place.add(x, leaves, amount if sign > 0 else -amount)

    def ways(self, known: Solution) -> Iterator[Step]:
        yield from self.own_way(known)
        yield from self.ways_to_value(known)
        deps = (self.after, *variables(self.ins[1:]))
        if (
            isinstance(self.before, Var)
            and self.before not in known
            and all(v in known for v in deps)
        ):
            yield Step(self, deps, (self.before,), self._undone)

    def _undone(self, at: Lookup) -> list[Value]:
        amount, *leaves = (at(v) for v in self.ins[1:])
        return [self._added(at(self.after), amount, leaves, -self.sign)]

    def pull(self, run: Backward) -> None:
        ct = run.take(self.after)
        if ct is None:
            return
        leaves = [run.value(v) for v in self.place.leaves]
        run.give(self.before, ct)
        if not run.is_active(self.amount):
            return
        if self.place.is_safe:
            part = self.place.read(ct, leaves)
        else:
            zeros = run.zeros(self.before)
            part = _transposed(
                lambda amount: self._plus(zeros, amount, leaves, 1), run, self.amount, ct
            )
        run.give(self.amount, unbroadcast(part if self.sign > 0 else -part, self.amount))


def link(nodes: Sequence[Node]) -> None:
    """Fills in which versions agree in the part that a node reads or writes.

    A write leaves all parts as they are that it certainly doesn't touch.
    """
    made_by: dict[Var, Version] = {}
    next_of: dict[Operand, Version] = {}
    for node in nodes:
        if isinstance(node, Version):
            made_by[node.after] = node
            next_of[node.before] = node

    def later(version: Operand, place: Place) -> Iterator[Var]:
        while (node := next_of.get(version)) is not None and node.place.is_disjoint(place):
            version = node.after
            yield version

    def earlier(version: Operand, place: Place) -> Iterator[Operand]:
        while isinstance(version, Var) and (node := made_by.get(version)) is not None:
            if not node.place.is_disjoint(place):
                return
            version = node.before
            yield version

    # The values of the known parts of each version, by the part's key.
    held: dict[tuple[Operand, Hashable], list[Operand]] = {}
    for node in nodes:
        if isinstance(node, Read):
            node.same += _few(later(node.ins[0], node.place))
            node.same += _few(earlier(node.ins[0], node.place))
            held.setdefault((node.ins[0], node.place.key), []).append(node.outs[0])
        elif isinstance(node, Version) and node.value is not None:
            node.same += _few(later(node.after, node.place))
            held.setdefault((node.after, node.place.key), []).append(node.value)
    for node in nodes:
        if isinstance(node, Write):
            versions, key = (node.before, *earlier(node.before, node.place)), node.place.key
            node.olds = [value for version in versions for value in held.get((version, key), ())]


def _few(versions: Iterable[Operand]) -> list[Operand]:
    """The nearest of versions that agree, and the farthest: many reads would each ask for all."""
    found = [*versions]
    return found if len(found) <= NEAREST else [*found[:NEAREST], found[-1]]
