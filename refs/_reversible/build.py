"""From a jaxpr over refs to a body: see `nodes`.

Calls are inlined. A ref that a loop reads only is an operand of the loop, one that it writes a
carry.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from refs import _jax
from refs._origin import origin_of
from refs._reversible.encoding import SUMS, Encoding
from refs._reversible.equations import Decode, Encode, Equation
from refs._reversible.fixed import Fixed
from refs._reversible.groups import grouped
from refs._reversible.inverses import type_of
from refs._reversible.nodes import Body, Node, Operand, State, Var
from refs._reversible.pieces import pieces
from refs._reversible.places import Literal, Place, is_index_type
from refs._reversible.primitive import reversible_p
from refs._reversible.scaling import Buffer
from refs._reversible.versions import Accumulate, Read, Write, link
from refs._tracing import touch_analysis
from refs._types import Atom, ClosedJaxpr, Eqn, Jaxpr, RefLike
from refs.errors import MissingRuleError


class Cell:
    """A ref while its function is turned into a body."""

    __slots__ = ("shape", "state", "version")

    def __init__(self, version: Operand, state: State, shape: tuple[int, ...]):
        self.version, self.state, self.shape = version, state, shape

    def describe(self) -> str:
        return self.state.origin.describe()


class Builder:
    """The nodes of one body, and what its variables and refs are.

    Attributes:
      find: gives the cell of a ref that a jaxpr holds as a constant.
      fixed_of: gives how a ref is encoded that is made here, by its type; None if it isn't.
      is_counted: whether it is known how often the body runs at most.
    """

    def __init__(
        self,
        find: Callable[[RefLike], Cell],
        fixed_of: Callable[[Any], Fixed | None],
        is_counted: bool = True,
    ):
        self.find, self.fixed_of, self.is_counted = find, fixed_of, is_counted
        self.nodes: list[Node] = []
        self.buffers: list[Buffer] = []
        self.saved: list[Var] = []
        self.made: list[Cell] = []
        self._made_by: dict[Var, Node] = {}
        self._read_of: dict[Var, tuple[Cell, Operand, Read]] = {}  # by the read's array
        self._reads: dict[tuple[Operand, Hashable], Var] = {}  # by version and place
        self._encoding = Encoding(self.add, self._made_by, self.buffers, is_counted)
        self._same: dict[Any, list[Var]] = {}
        self._line = "an unknown line"  # that of the call whose jaxpr is being added

    def add(self, node: Node) -> None:
        self.nodes.append(node)
        for v in node.outs:
            self._made_by[v] = node

    def body(self, inputs: Sequence[Var], outputs: Sequence[Operand]) -> Body:
        link(self.nodes)
        nodes = [*self.nodes, *pieces(self.nodes, self._made_by)]
        return Body(inputs, grouped(nodes, (*outputs, *self.saved)), outputs, self.saved)

    # --- Jaxprs

    def eval(self, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        """Adds the nodes of a jaxpr. The arguments and results are operands and cells."""
        consts = [
            self.find(c) if isinstance(c, _jax.NativeRef) else Literal(c, jax.typeof(c))
            for c in closed.consts
        ]
        return self.eval_open(closed.jaxpr, [*consts, *args])

    def eval_open(self, jaxpr: Jaxpr, args: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), args, strict=True))

        def at(atom: Atom) -> Any:
            return Literal(atom.val, atom.aval) if isinstance(atom, _jax.Literal) else env[atom]

        self.used = touch_analysis.used(jaxpr)
        for eqn in jaxpr.eqns:
            out = self._eqn(eqn, [at(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, out, strict=True))
            self.used = touch_analysis.used(jaxpr)  # not that of a jaxpr that is inlined
        return [at(v) for v in jaxpr.outvars]

    def _eqn(self, eqn: Eqn, args: Sequence[Any]) -> Sequence[Any]:
        inner = _jax.jaxprs_in(eqn.params)
        if eqn.primitive in _INLINED:
            [closed] = inner
            around = self._line
            self._line = _jax.user_line(eqn, around)  # JAX's own functions have no lines inside.
            out = self.eval(closed, args)
            self._line = around
            return out
        touches_refs = (
            any(isinstance(a, Cell) for a in args)
            or any(_jax.is_ref_type(v.aval) for v in eqn.outvars)
            or any(map(touch_analysis.uses_refs, inner))
        )
        primitive = _jax.primitive_of(eqn)
        if primitive is _jax.remat_p and touches_refs:
            [closed] = inner
            return self.eval(closed, args)
        rule = RULES.get(primitive)
        if rule is not None and (touches_refs or primitive is _jax.while_p):
            return rule(self, eqn, args)
        if touches_refs:
            described = next((a.describe() for a in args if isinstance(a, Cell)), "refs")
            raise MissingRuleError(
                f"reversible: primitive `{eqn.primitive}` at {_jax.user_line(eqn)} takes "
                f"{described}, and can't be undone: read the ref before (`ref[...]`) and write it "
                "after, or keep this out of the reversible function"
            )
        return self._equation(eqn, args)

    def _equation(self, eqn: Eqn, args: Sequence[Operand]) -> Sequence[Operand]:
        # An index is computed for the read and once more for the write: once is enough.
        key = _key(eqn, args)
        if key is not None and key in self._same:
            return self._same[key]
        outs = [Var(v.aval) for v in eqn.outvars]
        self.add(Equation(eqn, args, outs, _jax.user_line(eqn, self._line)))
        if key is not None:
            self._same[key] = outs
        return outs

    # --- Refs

    def read(self, cell: Cell, place: Place, out: Any, line: str) -> Var:
        """The array that a part of a ref holds."""
        key = cell.version, place.key
        if key in self._reads:
            return self._reads[key]
        fixed = cell.state.fixed
        self._reads[key] = value = Var(out)
        if fixed is None:
            read = Read(cell.version, place, value, line)
            self.add(read)
        else:
            encoded = Var(out)
            read = Read(cell.version, place, encoded, line)
            self.add(read)
            self.add(Decode(fixed, encoded, value, line))
            self._encoding.known[value] = encoded
        self._read_of[value] = cell, cell.version, read
        return value

    def write(self, cell: Cell, place: Place, value: Operand, line: str) -> None:
        """Overwrites a part of a ref; as a sum, if that is what it is."""
        fixed = cell.state.fixed
        after = Var(cell.version.aval, cell.state)
        added = self._sum_in_place(cell, place, value)
        if added is not None:
            self.add(Accumulate(cell.version, place, *added, after, line))
        else:
            if fixed is not None:
                value = self._encoding.of(value, cell.state, line)
            self.add(Write(cell.version, place, value, after, line))
        cell.version = after

    def _sum_in_place(self, cell: Cell, place: Place, value: Operand) -> tuple[Operand, int] | None:
        """`(amount, sign)` if a value is the sum of `amount` and of the part that it overwrites."""
        node = self._made_by.get(value) if isinstance(value, Var) else None
        is_sum = isinstance(node, Equation) and node.eqn.primitive in SUMS
        if not isinstance(node, Equation) or not is_sum or not place.is_distinct:
            return None
        for k, sign in SUMS[node.eqn.primitive]:
            old = node.ins[k]
            read = self._read_of.get(old) if isinstance(old, Var) else None
            if read is None:
                continue
            of, version, found = read
            if of is cell and version is cell.version and found.place.key == place.key:
                return node.ins[1 - k], sign
        return None

    def accumulate(self, cell: Cell, place: Place, amount: Operand, line: str) -> None:
        after = Var(cell.version.aval, cell.state)
        self.add(Accumulate(cell.version, place, amount, 1, after, line))
        cell.version = after

    def make(self, value: Operand, type_: Any, line: str) -> Cell:
        """A ref that the function makes."""
        state = State(origin_of(type_), self.fixed_of(type_.inner_aval))
        if state.fixed is not None:
            encoded = Var(value.aval)
            self.add(Encode(state.fixed, value, encoded, line))
            value = encoded
        self.made.append(Cell(value, state, type_.shape))
        return self.made[-1]

    # --- Loops and branches

    def inner(
        self,
        closed: ClosedJaxpr,
        args: Sequence[Any],
        cells: Sequence[Cell],
        times: int | None,
        same: int,
    ) -> Inner:
        """The parts of the body of a jaxpr that is run with such arguments, `times` times.

        An argument is an operand, one of `cells`, or a `Row` of one. If the number of times isn't
        known, nothing is kept for each of them. The first `same` arguments are so each time.
        """
        versions = [Var(c.version.aval, c.state) for c in cells]
        mine = {id(c): Cell(v, c.state, c.shape) for c, v in zip(cells, versions, strict=True)}
        is_counted = self.is_counted and times is not None
        builder = Builder(lambda ref: mine[id(self.find(ref))], self.fixed_of, is_counted)
        index = Var(_jax.array_type((), jnp.int32))
        arrays: list[Var] = []

        def argument(a: Any, v: Atom, is_same: bool) -> Any:
            if isinstance(a, Row):
                return builder.row(mine[id(a.cell)], index, v.aval.inner_aval)
            if isinstance(a, Cell):
                return mine[id(a)]
            arrays.append(Var(v.aval))
            # A constant index says before anything runs what it names.
            is_known = is_same and isinstance(a, Literal) and is_index_type(a.aval)
            return a if is_known else arrays[-1]

        invars = closed.jaxpr.invars
        given = [
            argument(a, v, k < same) for k, (a, v) in enumerate(zip(args, invars, strict=True))
        ]
        results = builder.eval(closed, given)
        for a, g in zip(args, given, strict=True):
            if isinstance(a, Row):
                builder.put_row(mine[id(a.cell)], index, g)
        last = [mine[id(c)].version for c in cells]
        new = []
        for own in builder.buffers:
            buffer = Buffer(
                own.scale, own.times * (times or 0), own.scale.new_var(), own.scale.new_var()
            )
            self.buffers.append(buffer)
            new.append(buffer)
        return Inner(builder, versions, index, arrays, last, results, builder.buffers, new)

    def row(self, whole: Cell, index: Var, aval: Any) -> Cell:
        """The row of a scanned ref, a ref of its own."""
        version = Var(aval, whole.state)
        self.add(Read(whole.version, Place.row(index), version, "the scanned ref"))
        return Cell(version, whole.state, aval.shape)

    def put_row(self, whole: Cell, index: Var, row: Cell) -> None:
        first = self._made_by.get(row.version) if isinstance(row.version, Var) else None
        if isinstance(first, Read):  # It has not changed.
            return
        after = Var(whole.version.aval, whole.state)
        self.add(Write(whole.version, Place.row(index), row.version, after, "the scanned ref"))
        whole.version = after


class Row(NamedTuple):
    """An argument of a loop's body: the row of a ref that is scanned."""

    cell: Cell


class Inner(NamedTuple):
    """The parts of an inner body, to be put in order.

    Attributes:
      builder: what has made it.
      versions: the cells' first versions in it.
      index: the number of the step, if there are rows.
      arrays: its inputs that are arrays.
      last: the cells' last versions.
      results: its other outputs.
      buffers: those of its products.
      outside: the same buffers, as they are outside.
    """

    builder: Builder
    versions: list[Var]
    index: Var
    arrays: list[Var]
    last: list[Operand]
    results: list[Operand]
    buffers: list[Buffer]
    outside: list[Buffer]

    def body(self, inputs: Sequence[Var], outputs: Sequence[Operand]) -> Body:
        return self.builder.body(inputs, outputs)


_INLINED = {
    _jax.jit_p,
    reversible_p,
    *_jax.inlined_call_primitives,
    *_jax.metadata_call_primitives,
}


def _key(eqn: Eqn, args: Sequence[Operand]) -> Any:
    """What an equation depends on, if it computes integers."""
    if eqn.effects or not all(
        not _jax.is_key(aval.dtype)
        and (aval.dtype == bool or jnp.issubdtype(aval.dtype, jnp.integer))
        for aval in map(type_of, eqn.outvars)
    ):
        return None
    operands = [
        ("literal", str(a.aval), np.asarray(a.value).tobytes())
        if isinstance(a, Literal) and not isinstance(a.value, jax.Array)
        else a
        for a in args
    ]
    return (eqn.primitive, tuple(eqn.params.items()), *operands)


Rule = Callable[[Builder, Eqn, Sequence[Any]], Sequence[Any]]
# What the primitives that involve refs, loops and branches become: see `access` and `flow`.
RULES: dict[Any, Rule] = {}
