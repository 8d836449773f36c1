"""The exact product of integers and a constant: what division would lose goes to a buffer.

`x * n / d` of an integer loses the remainder of the division by `d`, and could hold one of `n`
values more. So there is a buffer of digits beside each element: the remainder is pushed to it in
base `d`, and a digit in base `n` is popped from it and added to the product. Both steps can be
undone. The buffer grows by `log2(d / n)` bits a step. Maclaurin, Duvenaud and Adams,
"Gradient-based hyperparameter optimization through reversible learning" (2015), section 3.

A buffer is a 32-bit integer here, and a stack to which its 16 lowest bits go each `period` steps:
so often that it never overflows, whatever the values are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from refs import _jax
from refs._reversible.nodes import Lookup, Node, Operand, Solution, Step, Var, variables
from refs._types import DType, Value

if TYPE_CHECKING:
    from refs._reversible.backward import Backward

_LARGEST_DENOMINATOR = 2**15
_NO_PERIOD = 2**30  # the buffer doesn't grow


def fraction_of(c: Value, dtype: DType) -> Fraction | None:
    """The fraction that a constant stands for: 9/10 for 0.9. None if there is no simple one."""
    value = float(c)
    if not np.isfinite(value) or value == 0:
        return None
    found = Fraction(value).limit_denominator(_LARGEST_DENOMINATOR)
    fits = found and abs(found.numerator) <= _LARGEST_DENOMINATOR
    same = np.asarray(float(found), dtype) == np.asarray(value, dtype)
    return found if fits and same else None


def period_of(factor: Fraction) -> int:
    """After how many steps 16 bits of the buffer are put away, so that 32 suffice."""
    n, d = abs(factor.numerator), factor.denominator
    if n >= d:
        return _NO_PERIOD
    limit = 2**32 // d - 1  # `buffer * d + d - 1` must fit

    def is_enough(period: int) -> bool:
        largest, before = 0, -1
        while largest > before:  # From one time to the next it grows, until it settles.
            before = largest
            for _ in range(period):
                if largest > limit:
                    return False
                largest = (largest * d + d - 1) // n
            largest >>= 16
        return True

    period = 1
    while period < 4096 and is_enough(2 * period):
        period *= 2
    step = period // 2
    while step:
        if is_enough(period + step):
            period += step
        step //= 2
    return period


class Buffer(NamedTuple):
    """The buffer of one product in a body: of its `scale`, before and after.

    Attributes:
      scale: the node whose buffer it is.
      times: how often at most the node runs in one run of this body.
      first: the buffer at the beginning of the body.
      last: the same at its end.
    """

    scale: Scale
    times: int
    first: Var
    last: Var


class Scale(Node):
    """The product of an encoded value and a fraction, which takes a buffer and gives it back."""

    def __init__(self, factor: Fraction, s: Operand, out: Var, line: str):
        self.factor, self.line = factor, line
        self.period = period_of(factor)
        first, last = self.new_var(), self.new_var()
        self.buffer = Buffer(self, 1, first, last)
        self.ins, self.outs = (s, first), (out, last)

    @staticmethod
    def new_var() -> Var:
        return Var(_jax.array_type((), jnp.int32))

    def empty(self, times: int) -> Value:
        """A buffer for so many steps of this node."""
        rows = -(-times // self.period) if self.period < _NO_PERIOD else 0
        like = _jax.zeros_like_aval(self.ins[0].aval)
        stack = jnp.broadcast_to(like.astype(jnp.uint16), (rows, *like.shape))
        return like.astype(jnp.uint32), stack, jnp.int32(0)

    def run(self, values: Sequence[Value]) -> list[Value]:
        x, (digits, stack, count) = values
        n, d = abs(self.factor.numerator), self.factor.denominator
        digits = digits * jnp.uint32(d) + jnp.remainder(x, x.dtype.type(d)).astype(jnp.uint32)
        x = jnp.floor_divide(x, x.dtype.type(d)) * x.dtype.type(n)
        x = x + lax.rem(digits, jnp.full_like(digits, n)).astype(x.dtype)
        digits = lax.div(digits, jnp.full_like(digits, n))
        count = count + 1
        if self.period < _NO_PERIOD:
            is_full = count % self.period == 0
            row = (count - 1) // self.period
            low = digits.astype(jnp.uint16)
            old = lax.dynamic_index_in_dim(stack, row, keepdims=False)
            stack = lax.dynamic_update_index_in_dim(stack, jnp.where(is_full, low, old), row, 0)
            digits = jnp.where(is_full, digits >> 16, digits)
        return [-x if self.factor < 0 else x, (digits, stack, count)]

    def _undone(self, x: Value, buffer: Value) -> list[Value]:
        digits, stack, count = buffer
        n, d = abs(self.factor.numerator), self.factor.denominator
        x = -x if self.factor < 0 else x
        if self.period < _NO_PERIOD:
            is_full = count % self.period == 0
            row = lax.dynamic_index_in_dim(stack, (count - 1) // self.period, keepdims=False)
            digits = jnp.where(is_full, (digits << 16) | row.astype(jnp.uint32), digits)
        count = count - 1
        digits = digits * jnp.uint32(n) + jnp.remainder(x, x.dtype.type(n)).astype(jnp.uint32)
        x = jnp.floor_divide(x, x.dtype.type(n)) * x.dtype.type(d)
        x = x + lax.rem(digits, jnp.full_like(digits, d)).astype(x.dtype)
        digits = lax.div(digits, jnp.full_like(digits, d))
        return [x, (digits, stack, count)]

    def ways(self, known: Solution) -> Iterator[Step]:
        yield from self.own_way(known)
        unknown = tuple(v for v in variables(self.ins) if v not in known)
        if unknown and all(v in known for v in self.outs):
            yield Step(self, self.outs, unknown, lambda at: self._found(at, unknown))

    def _found(self, at: Lookup, wanted: Sequence[Var]) -> list[Value]:
        found = dict(zip(self.ins, self._undone(*map(at, self.outs)), strict=True))
        return [found[v] for v in wanted]

    def pull(self, run: Backward) -> None:
        ct = run.take(self.outs[0])
        if ct is not None:
            run.give(self.ins[0], ct * jnp.asarray(float(self.factor), ct.dtype))


class Empty(Node):
    """A new buffer."""

    ins = ()
    line = "the beginning"

    def __init__(self, scale: Scale, times: int, out: Var):
        self.scale, self.times = scale, times
        self.outs = (out,)

    def run(self, values: Sequence[Value]) -> list[Value]:
        return [self.scale.empty(self.times)]

    def ways(self, known: Solution) -> Iterator[Step]:
        yield from self.own_way(known)

    def pull(self, run: Backward) -> None:
        """There is nothing to pull: it is made of integers."""
