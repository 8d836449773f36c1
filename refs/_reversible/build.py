"""From a pure jaxpr, with the accesses of `parts`, to a body: see `nodes`.

Calls are inlined. Loops and branches become nodes of their own, whether they are over refs or not:
one over arrays alone may be left to JAX, which stores its steps, if they can't be undone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax

from refs import _jax
from refs._origin import UNKNOWN, Origin
from refs._reversible.encoded import decode, encode
from refs._reversible.encoding import SUMS, Encoding
from refs._reversible.equations import Equation
from refs._reversible.fixed import Fixed
from refs._reversible.flow import FlowNode
from refs._reversible.groups import grouped
from refs._reversible.kinds import can_be_undone, has_parts, is_inlined, key_of, stored_values
from refs._reversible.nodes import (
    Body,
    Node,
    Operand,
    State,
    Var,
    is_smooth,
    state_of,
)
from refs._reversible.parts import new_version_p, read_part_p, update_part_p
from refs._reversible.pieces import constant, pieces
from refs._reversible.places import Literal, Place, is_index_type
from refs._reversible.scaling import Buffer
from refs._reversible.versions import Accumulate, Read, Write, link
from refs._types import Atom, ClosedJaxpr, Eqn


class Builder:
    """The nodes of one body, and what its variables are.

    Attributes:
      fixed: how the float refs that are written are encoded; None: they aren't.
      is_counted: whether it is known how often the body runs at most.
      is_careful: whether products are not to be undone: the body is of a loop over arrays alone.
      encodes_carry: whether what its loops carry is encoded, as there are no refs.
      last: the last version of each ref, by its state.
      made: the states of refs that are made here.
    """

    def __init__(
        self,
        fixed: Fixed | None,
        is_counted: bool = True,
        is_careful: bool = False,
        encodes_carry: bool = False,
    ):
        self.fixed, self.is_counted, self.is_careful = fixed, is_counted, is_careful
        self.encodes_carry = encodes_carry
        self.nodes: list[Node] = []
        self.buffers: list[Buffer] = []
        self.saved: list[Var] = []
        self.last: dict[int, Var] = {}
        self.made: list[State] = []
        self._made_by: dict[Var, Node] = {}
        self._read_of: dict[Var, Read] = {}  # by the read's array
        self._known: dict[Hashable, Var] = {}  # what reads and decodings give
        self._encoding = Encoding(self.add, self._made_by, self.buffers, is_counted)
        self._same: dict[Any, list[Var]] = {}
        self._rounded: dict[Operand, Var] = {}  # what is written to a ref, as that will hold it
        self._line = "an unknown line"  # that of the call whose jaxpr is being added

    def add(self, node: Node) -> None:
        self.nodes.append(node)
        for v in node.outs:
            self._made_by[v] = node
            if v.state is not None:
                self.last[id(v.state)] = v

    def body(self, inputs: Sequence[Var], outputs: Sequence[Operand]) -> Body:
        link(self.nodes)
        nodes = [*self.nodes, *pieces(self.nodes, self._made_by)]
        nodes = grouped(nodes, (*outputs, *self.saved))
        return Body(inputs, nodes, outputs, self.saved, self.is_careful)

    # --- Jaxprs

    def eval(
        self, closed: ClosedJaxpr, args: Sequence[Operand], kept: Sequence[State | None] = ()
    ) -> list[Operand]:
        """Adds the nodes of a jaxpr. `kept`: what the results are to be stored in."""
        jaxpr = closed.jaxpr
        consts = [Literal(c, jax.typeof(c)) for c in closed.consts]
        variables = (*jaxpr.constvars, *jaxpr.invars)
        env: dict[Any, Operand] = dict(zip(variables, (*consts, *args), strict=True))

        def at(atom: Atom) -> Operand:
            return Literal(atom.val, atom.aval) if isinstance(atom, _jax.Literal) else env[atom]

        versions = {} if self.fixed is None else stored_values(jaxpr)
        ends: dict[Any, State | None] = {}
        for v, state in zip(jaxpr.outvars, kept, strict=False):
            if not isinstance(v, _jax.Literal):
                ends.setdefault(v, state)

        def stored_in(v: Atom) -> State | None:
            state = state_of(env[versions[v]]) if versions.get(v) in env else ends.get(v)
            return state if state is not None and state.fixed and is_smooth(v) else None

        for eqn in jaxpr.eqns:
            states = [*map(stored_in, eqn.outvars)]
            out = self._eqn(eqn, [at(v) for v in eqn.invars], states)
            for v, x, state in zip(eqn.outvars, out, states, strict=True):
                if state is not None and state_of(x) is None:
                    x = self._as_stored(x, state, self.line_of(eqn))
                env[v] = x
        return [at(v) for v in jaxpr.outvars]

    def _as_stored(self, value: Operand, state: State, line: str) -> Operand:
        """A value that is written to a ref, as the ref will hold it: rounded."""
        assert state.fixed is not None
        encoded, out = self._encoding.of(self.array(value), state, line), Var(value.aval)
        self.add(decode(state.fixed, encoded, out, line))
        self._encoding.known[out] = encoded
        self._rounded[value] = out
        return out

    def _eqn(
        self, eqn: Eqn, args: Sequence[Operand], kept: Sequence[State | None]
    ) -> Sequence[Operand]:
        if eqn.primitive in _jax.loop_primitives:  # What a loop inside carries isn't encoded.
            args = [self.array(x) if _is_carried(x) else x for x in args]
        touches_refs = any(map(state_of, args)) or any(
            has_parts(inner.jaxpr) for inner in _jax.jaxprs_in(eqn.params)
        )
        if is_inlined(eqn, touches_refs):
            [closed] = _jax.jaxprs_in(eqn.params)
            around = self._line
            self._line = _jax.user_line(eqn, around)  # JAX's own functions have no lines inside.
            out = self.eval(closed, args, kept)
            self._line = around
            return out
        primitive = _jax.primitive_of(eqn)
        if primitive in _ACCESSES:
            return [_ACCESSES[primitive](self, eqn, args)]
        if primitive in RULES and can_be_undone(eqn, touches_refs):
            return self._flow(RULES[primitive], eqn, args, not touches_refs)
        return self._equation(eqn, args)

    def _equation(self, eqn: Eqn, args: Sequence[Operand]) -> Sequence[Operand]:
        # An index is computed for the read and for the write, an amount perhaps for two writes: if
        # one is known, all are.
        args = [*map(self.array, args)]
        key = key_of(eqn, args)
        if key is not None and key in self._same:
            return [self._rounded.get(v, v) for v in self._same[key]]
        outs = [Var(v.aval) for v in eqn.outvars]
        self.add(Equation(eqn, args, outs, self.line_of(eqn)))
        if key is not None:
            self._same[key] = outs
        return outs

    def line_of(self, eqn: Eqn) -> str:
        return _jax.user_line(eqn, self._line)

    # --- Refs

    def array(self, x: Operand) -> Operand:
        """The array that a version stands for."""
        fixed = fixed_of(x)
        if fixed is None or not isinstance(x, Var):
            return x
        if x not in self._known:
            self._known[x] = out = Var(x.aval)
            self.add(decode(fixed, x, out, self._line))
            self._encoding.known[out] = x
        return self._known[x]

    def index(self, x: Operand) -> Operand:
        """A part of an index: a constant, if it is made of constants."""
        x = self.array(x)
        found = constant(x, self._made_by) if is_index_type(x.aval) else None
        return x if found is None else Literal(found, x.aval)

    def version(self, x: Operand, state: State, line: str) -> Operand:
        """An operand as what a ref holds."""
        if fixed_of(x) == state.fixed:
            return x
        return self._encoding.of(self.array(x), state, line)

    def first(self, value: Operand, state: State, line: str, described: str) -> Var:
        """The first version of what is made here, encoded."""
        assert state.fixed is not None
        state.fixed.check(value.aval.dtype, described)
        made = Var(value.aval, state)
        self.made.append(state)
        self.add(encode(state.fixed, value, made, line))
        return made

    def carry(self, xs: Sequence[Operand], line: str) -> Sequence[Operand]:
        """What a loop carries at first: encoded, if that is how it is kept."""
        if not self.encodes_carry:
            return xs
        described = f"what the loop at {line} carries"
        return [
            self.first(x, State(_CARRIED, self.fixed), line, described) if is_smooth(x) else x
            for x in map(self.array, xs)
        ]

    def read(self, version: Operand, place: Place, out: Any, line: str) -> Var:
        """The array that a part of a version holds; of a scanned ref, its row, a version."""
        key = version, place.key
        if key in self._known:
            return self._known[key]
        state, fixed = state_of(version), fixed_of(version)
        value = Var(out, state if place.tree is None else None)
        if fixed is None or place.tree is None:
            read = Read(version, place, value, line)
            self.add(read)
        else:
            encoded = Var(out)
            read = Read(version, place, encoded, line)
            self.add(read)
            self.add(decode(fixed, encoded, value, line))
            self._encoding.known[value] = encoded
        self._known[key] = value
        self._read_of[value] = read
        return value

    def write(self, version: Operand, place: Place, value: Operand, method: str, line: str) -> Var:
        """The version after a part of another one was written; by a sum, if that is what it is."""
        state = state_of(version)
        if state is None:
            state = State(UNKNOWN, self.fixed if is_smooth(version) else None)
            version = self.version(version, state, line)
        after = Var(version.aval, state)
        added = (value, 1) if method == "add" else self._sum_in_place(version, place, value)
        if added is not None:
            # The exact mode rounds what is stored: that isn't the same value.
            stored = None if method == "add" or state.fixed is not None else value
            self.add(Accumulate(version, place, *added, stored, after, line))
            return after
        if state.fixed is not None:
            value = self.version(value, state, line)
        self.add(Write(version, place, value, after, line))
        if place.tree is None and isinstance(value, Var):
            self._known[after, place.key] = value  # The row goes on as it was written.
        return after

    def _sum_in_place(
        self, version: Operand, place: Place, value: Operand
    ) -> tuple[Operand, int] | None:
        """`(amount, sign)` if a value is the sum of `amount` and of the part that it overwrites."""
        node = self._made_by.get(value) if isinstance(value, Var) else None
        is_sum = isinstance(node, Equation) and node.eqn.primitive in SUMS
        if not isinstance(node, Equation) or not is_sum or not place.is_distinct:
            return None
        for k, sign in SUMS[node.eqn.primitive]:
            old = node.ins[k]
            read = self._read_of.get(old) if isinstance(old, Var) else None
            if read is not None and read.ins[0] is version and read.place.key == place.key:
                return node.ins[1 - k], sign
        return None

    # --- Loops and branches

    def _flow(
        self, make: FlowRule, eqn: Eqn, args: Sequence[Operand], is_alone: bool
    ) -> Sequence[Operand]:
        node = make(self, eqn, args, is_alone)
        if is_alone and eqn.primitive is not _jax.while_p:  # of which JAX has no gradient
            node.equation = Equation(eqn, args, node.results, node.line)
        self.add(node)
        self.saved += node.saved
        return node.results

    def inner(
        self,
        closed: ClosedJaxpr,
        args: Sequence[Operand],
        times: int | None,
        same: int,
        is_careful: bool,
    ) -> Inner:
        """The parts of the body of a jaxpr that is run with such arguments, `times` times.

        If the number of times isn't known, nothing is kept for each of them. The first `same`
        arguments are so each time.
        """
        builder = Builder(
            self.fixed, self.is_counted and times is not None, self.is_careful or is_careful
        )
        states = [*map(state_of, args)]
        inputs = [Var(v.aval, s) for v, s in zip(closed.jaxpr.invars, states, strict=True)]
        # A constant index says before anything runs what it names.
        given = [
            a if k < same and isinstance(a, Literal) and is_index_type(a.aval) else v
            for k, (a, v) in enumerate(zip(args, inputs, strict=True))
        ]
        # What a step carries on is stored in what it was given.
        kept = [*states[same:], *[None] * len(closed.jaxpr.outvars)][: len(closed.jaxpr.outvars)]
        return Inner(self, builder, times or 0, inputs, builder.eval(closed, given, kept))


class Inner(NamedTuple):
    """The parts of an inner body, to be put in order.

    Attributes:
      around: the builder of the body around it.
      builder: what has made it.
      times: how often at most it runs in one run of that.
      inputs: its parameters.
      results: its results.
    """

    around: Builder
    builder: Builder
    times: int
    inputs: list[Var]
    results: list[Operand]

    def alike(self, states: Sequence[State | None]) -> list[Operand]:
        """The results, encoded where others that stand in the same place are."""
        b = self.builder
        return [
            b.array(x) if s is None or s.fixed is None else b.version(x, s, "the end of a step")
            for x, s in zip(self.results, states, strict=True)
        ]

    def outside(self) -> list[Buffer]:
        """The buffers of its products, as they are in the body around it, when all are known."""
        new = [
            Buffer(u.scale, u.times * self.times, u.scale.new_var(), u.scale.new_var())
            for u in self.builder.buffers
        ]
        self.around.buffers += new
        return new


def fixed_of(x: Operand) -> Fixed | None:
    """How an operand is encoded."""
    state = state_of(x)
    return None if state is None else state.fixed


# The origin of what a loop carries, in the place of a ref.
_CARRIED = Origin(None, None)


def _is_carried(x: Operand) -> bool:
    state = state_of(x)
    return state is not None and state.origin is _CARRIED


def results_of(eqn: Eqn, states: Sequence[State | None]) -> list[Var]:
    """Variables for the results of an equation, versions of these refs."""
    return [Var(v.aval, s) for v, s in zip(eqn.outvars, states, strict=True)]


# What makes the node of a loop or branch of its equation, the operands, and whether it is one over
# arrays alone; by the primitive. Each class of such nodes adds itself.
FlowRule = Callable[[Builder, Eqn, Sequence[Operand], bool], FlowNode]
RULES: dict[Any, FlowRule] = {}


def _read_part(b: Builder, eqn: Eqn, args: Sequence[Operand]) -> Operand:
    version, *leaves = args
    [out] = eqn.outvars
    return b.read(version, _place(b, eqn, version, leaves), out.aval, b.line_of(eqn))


def _update_part(b: Builder, eqn: Eqn, args: Sequence[Operand]) -> Operand:
    version, value, *leaves = args
    place = _place(b, eqn, version, leaves)
    value = value if place.tree is None else b.array(value)
    return b.write(version, place, value, eqn.params["method"], b.line_of(eqn))


def _place(b: Builder, eqn: Eqn, version: Operand, leaves: Sequence[Operand]) -> Place:
    return Place.of(eqn.params["tree"], [*map(b.index, leaves)], version.aval.shape)


def _new_version(b: Builder, eqn: Eqn, args: Sequence[Operand]) -> Operand:
    value, line, origin = b.array(args[0]), b.line_of(eqn), eqn.params["origin"]
    state = State(origin, b.fixed if is_smooth(value) else None)
    if state.fixed is not None:
        return b.first(value, state, line, origin.describe())
    made = Var(value.aval, state)
    b.made.append(state)
    b.add(Equation(eqn, [value], [made], line))
    return made


_ACCESSES = {
    read_part_p: _read_part,
    update_part_p: _update_part,
    new_version_p: _new_version,
}
