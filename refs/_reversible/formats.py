"""How a reversible function keeps the contents of a float ref, so that sums can be undone exactly.

Sums of floats are rounded, and what is rounded away can't be restored. Each format here keeps a
ref as something else, *encoded*, in whose arithmetic sums are exact, or nearly. An encoded value is
one array, or a tuple of arrays, of the ref's shape. What is written by `+=` is rounded to the
format first; the derivative takes no notice of that.

The formats are those of the literature: integers ("fixed point") are Maclaurin, Duvenaud and Adams,
"Gradient-based hyperparameter optimization through reversible learning" (2015); a pair is Dekker's
unevaluated sum of two floats (1971), made by Knuth's two-sum.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from abc import ABC, abstractmethod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from refs._types import DType, Value
from refs.errors import RefTypeError, RefValueError


class Format(ABC):
    """A way to keep the contents of a float ref between writes.

    Attributes:
      is_exact: whether sums are undone to the bit.
    """

    is_exact: bool

    @abstractmethod
    def check(self, dtype: DType, described: str) -> None:
        """Raises if a ref of a dtype can't be kept so."""

    @abstractmethod
    def encode(self, x: Value) -> Value:
        """`x`, rounded to the format."""

    @abstractmethod
    def decode(self, s: Value, dtype: DType) -> Value:
        """The array that an encoded value stands for."""

    @abstractmethod
    def amount(self, x: Value) -> Value:
        """`x`, as it is added to an encoded value."""

    @abstractmethod
    def plus(self, s: Value, x: Value, sign: int) -> Value:
        """The encoded value with `x`, an array, added or (`sign` -1) subtracted."""

    def in_range(self, s: Value) -> Value | None:
        """Whether sums that lead to this value were exact, a bool scalar; None if always."""
        return None


def _real_only(mode: Format, dtype: DType, described: str) -> RefTypeError:
    return RefTypeError(
        f"reversible: {described} has dtype {dtype}, and mode {mode} keeps real numbers: use mode "
        "'float', or two refs"
    )


@dataclasses.dataclass(frozen=True)
class Fixed(Format):
    """A mode of `refs.reversible`: integers, multiples of `2**-bits`. Exact.

    Every update is restored to the bit, whatever the values are: integers wrap around. A float of
    up to 32 bits is kept as an int32, which holds values between `-2**(31 - bits)` and
    `2**(31 - bits)`, and a float64 as an int64. Larger initial values and increments are clipped; a
    sum that gets larger wraps around. A NaN becomes zero.

    Args:
      bits: the number of binary places, at most 31, or 63 for float64.

    Raises:
      RefValueError: if `bits` is not such a number.

    >>> refs.Fixed(bits=24)
    Fixed(bits=24)
    """

    bits: int = 24

    is_exact = True

    def __post_init__(self) -> None:
        is_number = isinstance(self.bits, numbers.Integral) and not isinstance(self.bits, bool)
        if not (is_number and 0 <= self.bits <= 63):
            raise RefValueError(
                f"refs.Fixed(bits={self.bits!r}): the number of binary places is an integer from "
                "0 to 31, or to 63 for float64"
            )

    def check(self, dtype: DType, described: str) -> None:
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise _real_only(self, dtype, described)
        if self.bits > 31 and dtype.itemsize <= 4:
            raise RefValueError(
                f"reversible: {described} has dtype {dtype}, which is kept as a 32-bit integer, "
                f"and {self} asks for {self.bits} binary places: 31 are the most"
            )

    def encode(self, x: Value) -> Value:
        return self.amount(x)

    def decode(self, s: Value, dtype: DType) -> Value:
        wide = jnp.float64 if s.dtype == jnp.int64 else jnp.float32
        return (s.astype(wide) * 2.0**-self.bits).astype(dtype)

    def amount(self, x: Value) -> Value:
        wide, whole = (
            (jnp.float64, jnp.int64) if x.dtype == jnp.float64 else (jnp.float32, jnp.int32)
        )
        x = _without_derivative(x)
        # The largest float that the integer holds: the conversion of a larger one isn't defined.
        largest = 2.0 ** (jnp.iinfo(whole).bits - 1) * (1 - 2.0 ** -(jnp.finfo(wide).nmant + 1))
        scaled = jnp.round(x.astype(wide) * 2.0**self.bits)
        return jnp.clip(scaled, -largest, largest).astype(whole)

    def plus(self, s: Value, x: Value, sign: int) -> Value:
        # Rounded first, then negated: it must be the same amount that is added and subtracted.
        amount = self.amount(x.astype(jnp.float64) if s.dtype == jnp.int64 else x)
        return s + amount if sign > 0 else s - amount


@dataclasses.dataclass(frozen=True)
class Grid(Format):
    """A mode of `refs.reversible`: floats that are multiples of `step`. Exact in range.

    It takes no memory. A sum is exact as long as the ref's values are smaller than `step` times
    `2**24` (in float32; `2**53` in float64). Where one is larger, the gradient is NaN.

    Args:
      step: a power of two, such as `2**-16`.

    Raises:
      RefValueError: if `step` is not a power of two.

    >>> refs.Grid(2**-16)
    Grid(step=1.52587890625e-05)
    """

    step: float

    is_exact = True

    def __post_init__(self) -> None:
        is_number = isinstance(self.step, numbers.Real) and not isinstance(self.step, bool)
        if not (is_number and 0 < self.step < math.inf and math.frexp(self.step)[0] == 0.5):
            raise RefValueError(
                f"refs.Grid({self.step!r}): the step is a power of two, such as 2**-16"
            )

    def check(self, dtype: DType, described: str) -> None:
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise _real_only(self, dtype, described)
        least, most = float(jnp.finfo(dtype).smallest_normal), float(jnp.finfo(dtype).max)
        if not max(least, 1 / most) <= self.step <= most * 2.0 ** -(jnp.finfo(dtype).nmant + 1):
            raise RefValueError(
                f"reversible: {described} has dtype {dtype}, and {self} has a step that is too "
                "small or too large for its numbers"
            )

    def encode(self, x: Value) -> Value:
        return self.amount(x)

    def decode(self, s: Value, dtype: DType) -> Value:
        return s

    def amount(self, x: Value) -> Value:
        return _snapped(x, self.step)

    def plus(self, s: Value, x: Value, sign: int) -> Value:
        amount = self.amount(x.astype(s.dtype))
        return s + amount if sign > 0 else s - amount

    def in_range(self, s: Value) -> Value:
        limit = self.step * 2.0 ** (jnp.finfo(s.dtype).nmant + 1)
        return jnp.all(jnp.abs(s) <= limit)


def _snapped(x: Value, step: float) -> Value:
    """`x`, rounded to a multiple of `step`; its derivative takes no notice of that.

    JAX 0.10 gets the second derivative wrong of a `custom_jvp` function in a loop.
    """
    rounded = jnp.round(x * (1 / step)) * step
    return lax.stop_gradient(rounded) + (x - lax.stop_gradient(x))


@jax.custom_jvp
def _without_derivative(x: Value) -> Value:
    """`x`, before it becomes an integer, which has no derivative."""
    return x


@_without_derivative.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise RefTypeError(
        "reversible: a second derivative of a function in mode refs.Fixed, whose states are "
        "integers: use mode 'float', 'pair' or refs.Grid"
    )


@dataclasses.dataclass(frozen=True)
class Pair(Format):
    """Mode "pair": an unevaluated sum of two floats, the second one what the first rounds away."""

    is_exact = False

    def check(self, dtype: DType, described: str) -> None:
        """Any float will do."""

    def encode(self, x: Value) -> Value:
        return x, jnp.zeros_like(x)

    def decode(self, s: Value, dtype: DType) -> Value:
        return s[0]

    def amount(self, x: Value) -> Value:
        return x

    def plus(self, s: Value, x: Value, sign: int) -> Value:
        high, low = s
        x = x.astype(high.dtype)
        total, error = _two_sum(high, x if sign > 0 else -x)
        return _two_sum(total, error + low)


def _two_sum(a: Value, b: Value) -> tuple[Value, Value]:
    """`a + b` as a float and the error of that, also a float."""
    total = a + b
    rounded = total - a
    return total, (a - (total - rounded)) + (b - rounded)


def format_of(mode: str | Format) -> Format | None:
    """The format of a mode, None if contents are kept as they are."""
    if isinstance(mode, Format):
        return mode
    if mode not in ("float", "pair"):
        raise RefValueError(
            f"reversible: mode {mode!r}: a mode is 'float', 'pair', refs.Fixed(bits) or "
            "refs.Grid(step)"
        )
    return None if mode == "float" else Pair()
