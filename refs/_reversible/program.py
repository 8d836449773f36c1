"""A reversible function over state, as a body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from refs import _jax
from refs._origin import Origin
from refs._reversible import branches as branches  # imported for their rules
from refs._reversible import scans as scans
from refs._reversible import whiles as whiles
from refs._reversible.build import Builder
from refs._reversible.encoded import encode
from refs._reversible.fixed import Fixed
from refs._reversible.kinds import has_parts
from refs._reversible.loops import Loop
from refs._reversible.nodes import Body, Operand, State, Var, is_smooth, state_of, variables
from refs._reversible.places import Literal, is_index_type
from refs._reversible.scaling import Empty
from refs._types import ClosedJaxpr, Value


class Program(NamedTuple):
    """A reversible function over state.

    Attributes:
      body: its inputs are the state that it writes, the state that it only reads, and arrays; its
        outputs the results, then the new state.
      n_written: how many inputs are state that it writes.
      first: for each of these: the first version of it.
      last: for each of these: the last version of it.
    """

    body: Body
    n_written: int
    first: Sequence[Operand]
    last: Sequence[Operand]

    @staticmethod
    def of(
        closed: ClosedJaxpr,
        n_written: int,
        origins: Sequence[Origin],
        known: Mapping[int, Literal],
        fixed: Fixed | None,
    ) -> Program:
        """The program of a pure jaxpr, with the accesses of `parts`.

        Args:
          closed: the jaxpr. Its inputs and outputs are those of the body.
          n_written: how many of its first inputs, and of its last outputs, are state.
          origins: those of its inputs that are state, the first ones.
          known: inputs that are constants, by position.
          fixed: how float refs are encoded that it writes; None: they aren't.
        """
        inputs = [Var(v.aval) for v in closed.jaxpr.invars]
        is_of_arrays = not (n_written or has_parts(closed.jaxpr))
        builder = Builder(fixed, encodes_carry=fixed is not None and is_of_arrays)
        given: list[Operand] = [*inputs]
        for k, (v, origin) in enumerate(zip(inputs, origins, strict=False)):
            own = fixed if k < n_written and is_smooth(v) else None
            state = State(origin, own)
            if own is None:
                v.state = state
                continue
            own.check(v.aval.dtype, origin.describe())
            given[k] = version = Var(v.aval, state)
            builder.add(encode(own, v, version, "the beginning"))
        first = given[:n_written]
        for k, literal in known.items():
            given[k] = literal
        results = builder.eval(closed, given)
        n_out = len(results) - n_written
        last, new = list[Operand](), list[Operand]()
        for v, x in zip(first, results[n_out:], strict=True):
            state = state_of(v)
            assert state is not None
            last.append(x if state.fixed is None else builder.version(x, state, "the end"))
            new.append(builder.array(last[-1]))
        out = [*map(builder.array, results[:n_out])]
        _keep(builder)
        return Program(builder.body(inputs, [*out, *new]), n_written, first, last)

    @property
    def checked(self) -> list[Var]:
        """The states to keep, to compare: at the beginning, and before each outer loop."""
        buffers = {v for node in self.body.nodes if isinstance(node, Empty) for v in node.outs}
        loops = (node.initial(c) for node in self.loops for c in node.carry)
        states = variables((*self.first, *loops))
        return [*dict.fromkeys(v for v in states if v not in buffers)]

    @property
    def loops(self) -> list[Loop]:
        """The outermost loops."""
        return [node for node in self.body.nodes if isinstance(node, Loop)]

    @property
    def given(self) -> list[Var]:
        """What is known at the end."""
        last = variables(self.last)
        return [*self.body.inputs[self.n_written :], *last, *self.body.saved]


def _keep(builder: Builder) -> None:
    """Makes the forward pass keep what the backward pass starts from, besides the state."""
    for u in builder.buffers:
        builder.nodes.insert(0, Empty(u.scale, u.times, u.first))
        builder.saved.append(u.last)
    builder.saved += [builder.last[id(state)] for state in builder.made]
    for node in builder.nodes:
        if isinstance(node, Loop):  # What it has carried at last is no part of the state.
            builder.saved += [v for v in node.outs[: node.n_carry] if v.state is None]


def known_index(x: Value) -> Literal | None:
    """An argument, as a constant, if it may be an index that is known before anything runs."""
    aval = jax.typeof(x)
    is_known = not isinstance(x, _jax.Tracer)
    return Literal(x, aval) if is_known and is_index_type(aval) else None
