"""What is written to a ref that is kept as integers, as arithmetic on encoded values.

The value that is written is followed back, through sums, moves and products with constants, to what
was read from a ref: these are done on encoded values instead, and so can be undone exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
from jax import lax

from refs import _jax
from refs._reversible.encoded import Meaning, Moved, encode, negative, plus
from refs._reversible.equations import Equation
from refs._reversible.fixed import Fixed
from refs._reversible.inverses import NAME, SAME
from refs._reversible.nodes import Node, Operand, State, Var, variables
from refs._reversible.pieces import part_of
from refs._reversible.places import Literal
from refs._reversible.scaling import Buffer, Scale, fraction_of
from refs._reversible.versions import Read

# The operands of a sum that may be the old value, and the sign of the other one.
SUMS: dict[Any, tuple[tuple[int, int], ...]] = {
    lax.add_p: ((0, 1), (1, 1)),
    _jax.add_any_p: ((0, 1), (1, 1)),
    lax.sub_p: ((0, -1),),
}
_MOVES = {
    lax.broadcast_in_dim_p, lax.concatenate_p, lax.gather_p, lax.reshape_p, lax.rev_p, lax.slice_p,
    lax.split_p, lax.squeeze_p, lax.stack_p, lax.transpose_p, lax.unstack_p, *SAME,
}  # fmt: skip
# What they say doesn't concern the encoded value.
_PASSING = {NAME, lax.optimization_barrier_p}

_ARITHMETIC = {*SUMS, *_MOVES, lax.neg_p, lax.mul_p, lax.div_p}


class Encoding:
    """The encoded values of one body.

    Attributes:
      add: adds a node to the body.
      made_by: the node that each variable comes from.
      buffers: those of the body's products: more are added to it.
      is_counted: whether it is known how often the body runs at most.
      known: the encoded values that arrays stand for.
    """

    def __init__(
        self,
        add: Callable[[Node], None],
        made_by: dict[Var, Node],
        buffers: list[Buffer],
        is_counted: bool,
    ):
        self.add, self.made_by, self.buffers = add, made_by, buffers
        self.is_counted = is_counted
        self.known: dict[Operand, Var] = {}

    def of(self, value: Operand, state: State, line: str) -> Var:
        """What is written to a ref, encoded: rounded, if not made of sums of encoded values."""
        assert state.fixed is not None
        found = self._found(state, value, line)
        if found is None:
            found = Var(value.aval)
            self.add(encode(state.fixed, value, found, line))
        return found

    def _found(self, state: State, value: Operand, line: str) -> Var | None:
        """The encoded value that an array stands for: made of sums and moves of what was read."""
        if not isinstance(value, Var):
            return None
        if value in self.known:
            return self.known[value]
        node = self.made_by.get(value)
        if type(node) is not Equation:
            return None
        if node.eqn.primitive in _PASSING:
            return self._found(state, node.ins[node.outs.index(value)], line)
        if node.eqn.primitive in _MOVES:
            return self._moved(state, node, value, line)
        # What the ref itself held is to be undone: that first, and then another ref's contents.
        fixed = state.fixed
        assert fixed is not None
        places = sorted(range(len(node.ins)), key=lambda k: not self._holds(state, node.ins[k]))
        for k in places:
            operand = node.ins[k]
            if operand.aval.shape == value.aval.shape:
                make = self._on_encoded(fixed, node, k, line)
                part = None if make is None else self._found(state, operand, line)
                if make is not None and part is not None:
                    return make(part)
        return None

    def _moved(self, state: State, node: Equation, value: Var, line: str) -> Var | None:
        """The encoded value that an equation has moved; what is joined to it is rounded."""
        assert state.fixed is not None
        outs = [Var(v.aval) for v in node.outs]
        eqn = node.eqn
        if eqn.primitive is lax.gather_p:
            if part_of(node, self.made_by) is None:
                return None
            eqn = eqn.replace(params={**eqn.params, "fill_value": 0})  # NaN is no integer.
        moved = Moved(eqn, node.ins, outs)
        parts = [self._found(state, x, line) for x in node.ins[: moved.encoded]]
        if all(part is None for part in parts):
            return None
        rounded = [
            self.of(x, state, line) if part is None else part
            for x, part in zip(node.ins, parts, strict=False)
        ]
        moved.ins = (*rounded, *node.ins[moved.encoded :])
        self.add(moved)
        self.known.update(zip(node.outs, outs, strict=True))
        for plain, encoded in zip(node.outs, outs, strict=True):
            self.add(Meaning(state.fixed, encoded, plain))
        return self.known[value]

    def _holds(self, state: State, value: Operand) -> bool:
        """Whether an array is made, by sums and the like, of what a ref held."""
        encoded = self.known.get(value)
        if encoded is not None:
            maker = self.made_by.get(encoded)
            read = maker.ins[:1] if isinstance(maker, Read) else ()
            return any(v.state is state for v in variables((encoded, *read)))
        node = self.made_by.get(value) if isinstance(value, Var) else None
        return (
            type(node) is Equation
            and node.eqn.primitive in _ARITHMETIC
            and any(self._holds(state, v) for v in node.ins)
        )

    def _on_encoded(
        self, fixed: Fixed, node: Equation, k: int, line: str
    ) -> Callable[[Operand], Var] | None:
        """How the encoded result of an equation is made of its encoded `k`-th operand, or None."""
        primitive, out = node.eqn.primitive, Var(node.outs[0].aval)
        if primitive is lax.neg_p:
            return lambda part: self._negative(part, line)

        def added(node: Node) -> Var:
            self.add(node)
            return out

        if primitive in SUMS:
            other = node.ins[1 - k]
            if primitive is lax.sub_p and k == 1:  # What is known, less the state.
                return lambda part: added(
                    plus(fixed, self._negative(part, line), other, 1, out, line)
                )
            sign = -1 if primitive is lax.sub_p else 1
            return lambda part: added(plus(fixed, part, other, sign, out, line))
        factor = self._factor(node, 1 - k) if primitive in (lax.mul_p, lax.div_p) else None
        if factor is not None and (k == 0 or primitive is lax.mul_p):
            factor = factor if primitive is lax.mul_p else 1 / factor
            if factor == -1:
                return lambda part: self._negative(part, line)
            if self.is_counted:
                return lambda part: self._scaled(factor, part, out, line)
        return None

    def _negative(self, part: Operand, line: str) -> Var:
        out = Var(part.aval)
        self.add(negative(part, out, line))
        return out

    def _scaled(self, factor: Fraction, part: Operand, out: Var, line: str) -> Var:
        scale = Scale(factor, part, out, line)
        self.add(scale)
        self.buffers.append(scale.buffer)
        return out

    def _factor(self, node: Equation, k: int) -> Fraction | None:
        """The fraction that an operand of a product is, if it is one."""
        c = node.ins[k]
        while isinstance(c, Var) and _only_spreads(self.made_by.get(c)):
            c = self.made_by[c].ins[0]
        if not isinstance(c, Literal) or isinstance(c.value, _jax.Tracer):
            return None
        values = np.asarray(c.value).ravel()
        if not values.size or (values != values[0]).any():
            return None
        return fraction_of(values[0], node.outs[0].aval.dtype)


def _only_spreads(node: Node | None) -> bool:
    """Whether a node gives its operand, a number, another type or more axes."""
    spreading = (lax.broadcast_in_dim_p, lax.convert_element_type_p)
    return type(node) is Equation and node.eqn.primitive in spreading
