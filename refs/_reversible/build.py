"""From a pure jaxpr, with the accesses of `parts`, to a body: see `nodes`.

Calls are inlined. Loops and branches become nodes of their own, whether they are over refs or not:
one over arrays alone may be left to JAX, which stores its steps, if they can't be undone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from refs import _jax
from refs._origin import UNKNOWN
from refs._reversible.encoded import decode, encode
from refs._reversible.encoding import SUMS, Encoding
from refs._reversible.equations import Equation
from refs._reversible.fixed import Fixed
from refs._reversible.flow import FlowNode
from refs._reversible.groups import grouped
from refs._reversible.inverses import type_of
from refs._reversible.nodes import Body, Node, Operand, State, Var, is_smooth, state_of
from refs._reversible.parts import new_version_p, read_part_p, update_part_p
from refs._reversible.pieces import pieces
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
      last: the last version of each ref, by its state.
      made: the states of refs that are made here.
    """

    def __init__(self, fixed: Fixed | None, is_counted: bool = True, is_careful: bool = False):
        self.fixed, self.is_counted, self.is_careful = fixed, is_counted, is_careful
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

    def eval(self, closed: ClosedJaxpr, args: Sequence[Operand]) -> list[Operand]:
        """Adds the nodes of a jaxpr."""
        jaxpr = closed.jaxpr
        consts = [Literal(c, jax.typeof(c)) for c in closed.consts]
        variables = (*jaxpr.constvars, *jaxpr.invars)
        env: dict[Any, Operand] = dict(zip(variables, (*consts, *args), strict=True))

        def at(atom: Atom) -> Operand:
            return Literal(atom.val, atom.aval) if isinstance(atom, _jax.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            out = self._eqn(eqn, [at(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, out, strict=True))
        return [at(v) for v in jaxpr.outvars]

    def _eqn(self, eqn: Eqn, args: Sequence[Operand]) -> Sequence[Operand]:
        touches_refs = any(map(state_of, args)) or any(
            _has_parts(inner.jaxpr) for inner in _jax.jaxprs_in(eqn.params)
        )
        primitive = _jax.primitive_of(eqn)
        if primitive in _INLINED and (touches_refs or not _says_more(eqn)):
            [closed] = _jax.jaxprs_in(eqn.params)
            around = self._line
            self._line = _jax.user_line(eqn, around)  # JAX's own functions have no lines inside.
            out = self.eval(closed, args)
            self._line = around
            return out
        if primitive in _ACCESSES:
            return [_ACCESSES[primitive](self, eqn, args)]
        if primitive in RULES and (touches_refs or not _jax.has_side_effects(eqn)):
            return self._flow(RULES[primitive], eqn, args, not touches_refs)
        return self._equation(eqn, args)

    def _equation(self, eqn: Eqn, args: Sequence[Operand]) -> Sequence[Operand]:
        # An index is computed for the read and once more for the write: once is enough.
        args = [*map(self.array, args)]
        key = _key(eqn, args)
        if key is not None and key in self._same:
            return self._same[key]
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

    def version(self, x: Operand, state: State, line: str) -> Operand:
        """An operand as what a ref holds."""
        if fixed_of(x) == state.fixed:
            return x
        return self._encoding.of(self.array(x), state, line)

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
            self.add(Accumulate(version, place, *added, after, line))
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
        results = builder.eval(closed, given)
        new = [
            Buffer(u.scale, u.times * (times or 0), u.scale.new_var(), u.scale.new_var())
            for u in builder.buffers
        ]
        self.buffers += new
        return Inner(builder, inputs, results, builder.buffers, new)


class Inner(NamedTuple):
    """The parts of an inner body, to be put in order.

    Attributes:
      builder: what has made it.
      inputs: its parameters.
      results: its results.
      buffers: those of its products.
      outside: the same buffers, as they are outside.
    """

    builder: Builder
    inputs: list[Var]
    results: list[Operand]
    buffers: list[Buffer]
    outside: list[Buffer]

    def alike(self, states: Sequence[State | None]) -> list[Operand]:
        """The results, encoded where others that stand in the same place are."""
        b = self.builder
        return [
            b.array(x) if s is None or s.fixed is None else b.version(x, s, "the end of a step")
            for x, s in zip(self.results, states, strict=True)
        ]


_INLINED = {
    _jax.jit_p,
    _jax.remat_p,
    *_jax.inlined_call_primitives,
    *_jax.metadata_call_primitives,
}


def _says_more(eqn: Eqn) -> bool:
    """Whether a call says more than what is computed: where, for instance, or what is stored."""
    if eqn.primitive is _jax.jit_p:
        p = _jax.jit_params(eqn.params)
        return not all(map(_jax.is_unspecified, (*p.in_shardings, *p.out_shardings)))
    return eqn.primitive not in _jax.inlined_call_primitives


def fixed_of(x: Operand) -> Fixed | None:
    """How an operand is encoded."""
    state = state_of(x)
    return None if state is None else state.fixed


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
    return Place.of(eqn.params["tree"], [*map(b.array, leaves)], version.aval.shape)


def _new_version(b: Builder, eqn: Eqn, args: Sequence[Operand]) -> Operand:
    value, line = b.array(args[0]), b.line_of(eqn)
    state = State(eqn.params["origin"], b.fixed if is_smooth(value) else None)
    b.made.append(state)
    made = Var(value.aval, state)
    if state.fixed is None:
        b.add(Equation(eqn, [value], [made], line))
    else:
        state.fixed.check(value.aval.dtype, state.origin.describe())
        b.add(encode(state.fixed, value, made, line))
    return made


_ACCESSES = {
    read_part_p: _read_part,
    update_part_p: _update_part,
    new_version_p: _new_version,
}
_has_parts = _jax.anywhere(lambda eqn: eqn.primitive in _ACCESSES)
