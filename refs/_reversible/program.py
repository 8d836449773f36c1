"""A reversible function over state, as a body."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from refs import _jax
from refs._origin import Origin
from refs._reversible import access as access  # imported for their rules
from refs._reversible import flow as flow
from refs._reversible.build import Builder, Cell
from refs._reversible.equations import Decode, Encode
from refs._reversible.fixed import Fixed
from refs._reversible.loops import Loop
from refs._reversible.nodes import Body, Operand, State, Var, is_smooth_type, variables
from refs._reversible.places import Literal, is_index_type
from refs._reversible.scaling import Empty
from refs._types import Aval, ClosedJaxpr, DType, RefLike, Value


class Contents(NamedTuple):
    """What a ref holds when the function is called: a key for the ref, its origin, and the type."""

    key: Any
    origin: Origin
    aval: Aval


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
        args: Sequence[Any],
        written: Sequence[Contents],
        read: Sequence[Contents],
        unused: Sequence[Aval],
        arrays: Sequence[Aval],
        key_of: Callable[[RefLike], Any],
        fixed: Fixed | None,
    ) -> Program:
        """The program of a jaxpr.

        Args:
          closed: the jaxpr.
          args: for each of its inputs the key of a ref, or None for the next one of `arrays`, or
            the constant that this one is.
          written: the state that it writes.
          read: the state that it only reads.
          unused: the types of inputs, after the state, that it makes no use of.
          arrays: the types of the inputs that are arrays.
          key_of: the key of a ref that the jaxpr holds as a constant.
          fixed: how float refs are encoded that it writes; None: they aren't.
        """
        inputs = [Var(c.aval) for c in (*written, *read)]
        cells: dict[Any, Cell] = {}
        builder = Builder(lambda ref: cells[key_of(ref)], lambda aval: _kept(fixed, aval))
        first: list[Operand] = []
        for k, (contents, v) in enumerate(zip((*written, *read), inputs, strict=True)):
            own = _kept(fixed, v.aval) if k < len(written) else None
            v.state = state = State(contents.origin, own)
            version = v
            if own is not None:
                own.check(v.aval.dtype, contents.origin.describe())
                version = Var(v.aval, state)
                builder.add(Encode(own, v, version, "the beginning"))
            cells[contents.key] = Cell(version, state, v.aval.shape)
            first += [version] if k < len(written) else []
        own = [*map(Var, arrays)]
        of_arrays = iter(own)
        arguments: list[Any] = []
        for known in args:
            is_array = known is None or isinstance(known, Literal)
            v = next(of_arrays) if is_array else cells[known]
            arguments.append(known if isinstance(known, Literal) else v)
        out = builder.eval(closed, arguments)
        last = [cells[c.key].version for c in written]
        new: list[Operand] = []
        for version in last:
            state = version.state if isinstance(version, Var) else None
            if state is not None and state.fixed is not None:
                decoded = Var(version.aval)
                builder.add(Decode(state.fixed, version, decoded, "the end"))
                version = decoded
            new.append(version)
        _keep(builder)
        inputs += [*map(Var, unused), *own]
        return Program(builder.body(inputs, [*out, *new]), len(written), first, last)

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
        [s, _] = u.scale.ins
        like = s.aval.shape, _integer(s.aval.dtype)
        builder.nodes.insert(0, Empty(u.scale, like, u.times, u.first))
        builder.saved.append(u.last)
    builder.saved += variables(cell.version for cell in builder.made)
    for node in builder.nodes:
        if isinstance(node, Loop):  # What it has carried at last is no part of the state.
            builder.saved += [v for v in node.outs[: node.n_carry] if v.state is None]


def known_index(x: Value) -> Literal | None:
    """An argument, as a constant, if it may be an index that is known before anything runs."""
    aval = jax.typeof(x)
    is_known = not isinstance(x, _jax.Tracer)
    return Literal(x, aval) if is_known and is_index_type(aval) else None


def _kept(fixed: Fixed | None, aval: Aval) -> Fixed | None:
    return fixed if is_smooth_type(aval) else None


def _integer(dtype: DType) -> DType:
    return jnp.int64 if dtype == jnp.float64 else jnp.int32
