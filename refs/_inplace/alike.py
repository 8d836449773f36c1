"""Before all stages: what is done alike to the parts of a buffer is done at once.

The state of packed refs is one buffer: a program slices it, works on the parts, and puts the
results together. XLA makes a kernel of each slice, which takes it 5 ms, and of hundreds of results
that are put together one that is as slow to make. But an optimizer does the same to all parts. So

    concatenate([f(x[a:b], g), f(x[b:c], h)])   becomes   f(x[a:c], concatenate([g, h]))

if `f` consists of operations on single elements. Where the parts of several kinds alternate, those
of a kind are gathered, and the results put in their places by one more gather, as the indices are
constants.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from refs import _jax
from refs._indexing.places import place_dtype
from refs._inplace.atoms import can_pass, is_var, literal, shape, size
from refs._inplace.body import Body, spliced
from refs._inplace.flatten import inline
from refs._inplace.model import operation, unmoved
from refs._tracing.facts import facts_of
from refs._types import Atom, Aval, Eqn, Jaxpr, Value

# With more groups of neighbours than that, parts that aren't neighbours are grouped, too.
MOST_GROUPS = 8
# Not in buffers of more elements: a gather takes about a nanosecond for each.
LARGEST = 2**20
# A longer chain of operations is taken for a value that comes from elsewhere.
LONGEST = 100


def do_alike_at_once(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr, with one operation for those on parts of a buffer that are put together again."""
    if not any(map(_joins, jaxpr.eqns)):
        return jaxpr
    body = Body(jaxpr)
    inline(body, _is_elementwise_throughout)
    chains = _Chains(body)
    body.eqns = [new for eqn in body.eqns for new in chains.joined(eqn)]
    return body.close()


def _joins(eqn: Eqn) -> bool:
    """Whether an equation puts arrays of one axis together."""
    return (
        eqn.primitive is lax.concatenate_p
        and len(eqn.invars) > 1
        and len(shape(eqn.outvars[0])) == 1
        and all(map(is_var, eqn.invars))
        and can_pass(eqn.outvars[0])
    )


def _filled(eqn: Eqn) -> Atom | None:
    """The scalar that an equation fills an array with."""
    is_fill = eqn.primitive is lax.broadcast_in_dim_p and shape(eqn.invars[0]) == ()
    return eqn.invars[0] if is_fill else None


def _is_elementwise(eqn: Eqn) -> bool:
    """Whether an element of the result depends only on scalars and on elements in its place."""
    if not facts_of(eqn).elementwise:
        return False
    shapes = (), shape(eqn.outvars[0])
    return all(can_pass(v) and shape(v) in shapes for v in (*eqn.invars, *eqn.outvars))


@_jax.once_per_jaxpr
def _is_elementwise_throughout(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr consists of operations on elements, with arrays in other shapes."""
    return all(
        _is_elementwise(eqn)
        or unmoved(eqn) is not None
        or _filled(eqn) is not None
        or any(_is_elementwise_throughout(inner.jaxpr) for inner in _jax.jaxprs_in(eqn.params))
        for eqn in jaxpr.eqns
    )


class _Part(NamedTuple):
    """A slice of an input of the program, along its one axis."""

    of: Atom
    start: int
    stop: int


class _Chains:
    """The chains of operations that make the parts which are put together.

    Attributes:
      parts: variables that are parts of inputs.
      fills: variables that are filled with a scalar, and that.
      unmoved: variables that are others in another shape, and those.
      makers: variables that operations on elements make for nothing but what is put together.
      kinds: numbers of these variables: equal for equal operations on equal kinds of operands.
      scalars: numbers of scalars: equal for equal values.
    """

    def __init__(self, body: Body):
        self.parts: dict[Any, _Part] = {}
        self.fills: dict[Any, Atom] = {}
        self.unmoved: dict[Any, Atom] = {}
        self.makers: dict[Any, Eqn] = {}
        self.kinds: dict[Any, int] = {}
        self.scalars: dict[Any, int] = {}
        self._depths: dict[Any, int] = {}
        self._numbers: dict[Hashable, int] = {}
        self._inputs = {*body.jaxpr.invars, *body.jaxpr.constvars}
        only_joined = _used_only_in_chains(body)
        for eqn in body.eqns:
            self._note(eqn, only_joined)

    def _note(self, eqn: Eqn, only_joined: set[Any]) -> None:
        if len(eqn.outvars) != 1:
            return
        [out], p = eqn.outvars, eqn.params
        if eqn.primitive is lax.slice_p and eqn.invars[0] in self._inputs:
            if len(shape(out)) == 1 and p["strides"] in (None, (1,)):
                [start], [stop] = p["start_indices"], p["limit_indices"]
                self.parts[out] = _Part(eqn.invars[0], start, stop)
        elif (scalar := _filled(eqn)) is not None and shape(out) != ():
            self.fills[out] = scalar
        elif (array := unmoved(eqn)) is not None:
            if is_var(array):
                self.unmoved[out] = self.source(array)
        elif _is_elementwise(eqn):
            if shape(out) == ():
                self.scalars[out] = self._number(operation(eqn), *map(self.scalar, eqn.invars))
            if out in only_joined:
                operands = map(self.source, filter(is_var, eqn.invars))
                depth = 1 + max([self._depths.get(v, 0) for v in operands], default=0)
                if depth <= LONGEST:
                    kinds = [self._kind_of_operand(v, out) for v in eqn.invars]
                    self.makers[out], self._depths[out] = eqn, depth
                    self.kinds[out] = self._number(operation(eqn), *kinds)

    def source(self, atom: Atom) -> Atom:
        """The variable that has the same elements, before it was given another shape."""
        return self.unmoved.get(atom, atom) if is_var(atom) else atom

    def kind(self, v: Any) -> int:
        """A number that is equal for what can be computed alike; that of a plain value is -1."""
        v = self.source(v)
        if v in self.parts:
            return self._number("part", self.parts[v].of)
        return self.kinds.get(v, -1)

    def filling(self, v: Atom, out: Atom) -> Atom | None:
        """The scalar that an operand is, or is filled with, for a result `out`."""
        if shape(v) == () and (shape(out) != () or self._is_alone(v)):
            return v
        return self.fills.get(v) if is_var(v) else None

    def _is_alone(self, v: Atom) -> bool:
        source = self.source(v)
        return not is_var(v) or not (source in self.parts or source in self.makers)

    def _kind_of_operand(self, v: Atom, out: Atom) -> Hashable:
        kind = "scalar" if self.filling(v, out) is not None else self.kind(v)
        return kind, _dtype(v)

    def scalar(self, atom: Atom) -> Hashable:
        """Something that is equal for equal scalars."""
        return self.scalars.get(atom, atom) if is_var(atom) else literal(atom)

    def _number(self, *key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def joined(self, eqn: Eqn) -> list[Eqn]:
        """An equation; if it puts parts together, those that do what is alike at once."""
        if not _joins(eqn):
            return [eqn]
        kinds = [self.kind(v) for v in eqn.invars]
        members = range(len(kinds))
        groups = [[*run] for kind, run in groupby(members, kinds.__getitem__)]
        if len(groups) > MOST_GROUPS and size(eqn.outvars[0]) <= LARGEST:
            of_kind: dict[int, list[int]] = {}
            for k in members:
                of_kind.setdefault(kinds[k], []).append(k)
            groups = [*of_kind.values()]
        if all(len(g) == 1 or kinds[g[0]] == -1 for g in groups):
            return [eqn]
        steps = _Steps(self)
        together = [
            steps.add(tuple([eqn.invars[k] for k in group]), eqn.outvars[0]) for group in groups
        ]
        sizes = [size(v) for v in eqn.invars]
        order = _places([k for group in groups for k in group], sizes)
        return steps.equations(together, order, eqn)


def _used_only_in_chains(body: Body) -> set[Any]:
    """The variables that nothing uses but operations on elements for what is put together."""
    returned, consumers = {*filter(is_var, body.outvars)}, body.users
    found: set[Any] = set()
    in_chains: set[int] = set()
    for k, eqn in reversed([*enumerate(body.eqns)]):
        for v in eqn.outvars:
            if v not in returned and in_chains.issuperset(consumers.get(v, ())):
                found.add(v)
        is_link = _is_elementwise(eqn) or unmoved(eqn) is not None
        if _joins(eqn) or (is_link and eqn.outvars[0] in found):
            in_chains.add(k)
    return found


def _dtype(atom: Atom) -> str:
    aval: Aval = atom.aval
    return str(aval.dtype)


def _places(order: list[int], sizes: list[int]) -> np.ndarray | None:
    """For members one after the other in this order, the indices that put them in their own.

    None if that is their own order.
    """
    if order == sorted(order):
        return None
    starts = np.cumsum([0, *(sizes[k] for k in order)])
    start_of = dict(zip(order, starts, strict=False))
    return np.concatenate([start_of[k] + np.arange(n) for k, n in enumerate(sizes)])


class _Steps:
    """The steps of a computation on groups of parts, each a function of atoms and earlier steps."""

    def __init__(self, chains: _Chains):
        self._chains = chains
        self._steps: list[tuple[Callable[..., Value], Sequence[Atom], Sequence[int]]] = []
        self._known: dict[Hashable, int] = {}

    def add(self, members: tuple[Atom, ...], like: Atom) -> int:
        """Adds what makes these variables, one after the other; the number of its last step."""
        chains = self._chains
        members = tuple(map(chains.source, members))
        key = tuple(map(id, members))
        if key not in self._known:
            if (
                all(v in chains.parts for v in members)
                and len({chains.parts[v].of for v in members}) == 1
            ):
                self._known[key] = self._read([chains.parts[v] for v in members])
            elif (
                all(v in chains.kinds for v in members)
                and len({chains.kinds[v] for v in members}) == 1
            ):
                self._known[key] = self._operate([chains.makers[v] for v in members])
            else:
                self._known[key] = self._step(_join, members)
        return self._known[key]

    def _step(
        self, fun: Callable[..., Value], atoms: Sequence[Atom], steps: Sequence[int] = ()
    ) -> int:
        self._steps.append((fun, atoms, steps))
        return len(self._steps) - 1

    def _read(self, parts: list[_Part]) -> int:
        x, start, stop = parts[0].of, parts[0].start, parts[-1].stop
        if all(a.stop == b.start for a, b in pairwise(parts)):
            is_all = (start, stop) == (0, size(x))
            return self._step(lambda x: x if is_all else lax.slice(x, (start,), (stop,)), [x])
        index = np.concatenate([np.arange(p.start, p.stop) for p in parts])
        return self._step(lambda x: _gathered(x, index), [x])

    def _operate(self, eqns: list[Eqn]) -> int:
        """One operation for those of these equations, which are of one kind."""
        like = eqns[0].outvars[0]
        operands = []
        for of_each in zip(*(e.invars for e in eqns), strict=True):
            fillings = [
                self._chains.filling(v, e.outvars[0]) for v, e in zip(of_each, eqns, strict=True)
            ]
            if fillings[0] is None:
                operands.append(self.add(of_each, like))
            else:
                operands.append(self._fill(fillings, [size(e.outvars[0]) for e in eqns]))
        primitive, params = eqns[0].primitive, eqns[0].params
        return self._step(lambda *xs: primitive.bind(*xs, **params), [], operands)

    def _fill(self, scalars: list[Atom], sizes: list[int]) -> int:
        """An array with the first scalar as often as the first size says, and so on."""
        if len({self._chains.scalar(s) for s in scalars}) == 1:
            n = sum(sizes)
            return self._step(lambda s: lax.broadcast(s, (n,)), [scalars[0]])
        if not any(map(is_var, scalars)):
            values = np.repeat(np.stack([np.asarray(s.val, s.aval.dtype) for s in scalars]), sizes)
            return self._step(lambda: jnp.asarray(values), [])
        return self._step(
            lambda *xs: lax.concatenate(
                [lax.broadcast(x, (n,)) for x, n in zip(xs, sizes, strict=True)], 0
            ),
            scalars,
        )

    def equations(self, last: list[int], order: np.ndarray | None, like: Eqn) -> list[Eqn]:
        """The equations of all steps; the result of `like` is that of the last ones together."""
        atoms = list({id(a): a for _, needed, _ in self._steps for a in needed}.values())

        def run(*values: Value) -> Value:
            known = dict(zip(map(id, atoms), values, strict=True))
            done: list[Value] = []
            for fun, needed, steps in self._steps:
                done.append(fun(*(known[id(a)] for a in needed), *(done[k] for k in steps)))
            found = _join(*(done[k] for k in last))
            found = found if order is None else _gathered(found, order)
            # Nothing may have changed: but an equation must have the result.
            return lax.copy_p.bind(found) if any(found is x for x in values) else found

        return spliced(run, atoms, like)


def _join(*arrays: Value) -> Value:
    flat = [x.reshape(-1) for x in arrays]
    return flat[0] if len(flat) == 1 else lax.concatenate(flat, 0)


def _gathered(x: Value, index: np.ndarray) -> Value:
    index = index.astype(place_dtype(x.size))
    return x.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)
