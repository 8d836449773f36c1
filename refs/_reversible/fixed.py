"""How an exact reversible function keeps a float ref: as integers, whose sums can be undone.

Sums of floats are rounded, and what is rounded away can't be restored. So a float that is written
to a ref is *encoded*: rounded to an integer number of steps, in whose arithmetic sums are exact.
The derivative takes no notice of the rounding. The idea is that of Maclaurin, Duvenaud and Adams,
"Gradient-based hyperparameter optimization through reversible learning" (2015).
"""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

import jax
import jax.numpy as jnp

from refs import _jax
from refs._types import DType, Value
from refs.errors import RefTypeError, RefValueError


@dataclasses.dataclass(frozen=True)
class Fixed:
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

    def __post_init__(self) -> None:
        is_number = isinstance(self.bits, numbers.Integral) and not isinstance(self.bits, bool)
        if not (is_number and 0 <= self.bits <= 63):
            raise RefValueError(
                f"refs.Fixed(bits={self.bits!r}): the number of binary places is an integer from "
                "0 to 31, or to 63 for float64"
            )

    def check(self, dtype: DType, described: str) -> None:
        """Raises if a ref of a dtype can't be kept so."""
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise RefTypeError(
                f"reversible: {described} has dtype {dtype}, and mode {self} keeps real numbers: "
                "use mode 'float', or two refs"
            )
        if self.bits > 31 and dtype.itemsize <= 4:
            raise RefValueError(
                f"reversible: {described} has dtype {dtype}, which is kept as a 32-bit integer, "
                f"and {self} asks for {self.bits} binary places: 31 are the most"
            )

    def encode(self, x: Value) -> Value:
        """`x` as an integer number of steps: rounded, and clipped to what the integer holds."""
        wide, whole = (
            (jnp.float64, jnp.int64) if x.dtype == jnp.float64 else (jnp.float32, jnp.int32)
        )
        x = _jax.as_array(_without_derivative(x))  # JAX gives a number back for a number.
        # The largest float that the integer holds: the conversion of a larger one isn't defined.
        largest = 2.0 ** (jnp.iinfo(whole).bits - 1) * (1 - 2.0 ** -(jnp.finfo(wide).nmant + 1))
        scaled = jnp.round(x.astype(wide) * 2.0**self.bits)
        return jnp.clip(scaled, -largest, largest).astype(whole)

    def decode(self, s: Value, dtype: DType) -> Value:
        """The array that an encoded value stands for."""
        wide = jnp.float64 if s.dtype == jnp.int64 else jnp.float32
        return (s.astype(wide) * 2.0**-self.bits).astype(dtype)

    def plus(self, s: Value, x: Value, sign: int) -> Value:
        """The encoded value with `x`, an array, added or (`sign` -1) subtracted."""
        x = _jax.as_array(x)
        # Rounded first, then negated: it must be the same amount that is added and subtracted.
        amount = self.encode(x.astype(jnp.float64) if s.dtype == jnp.int64 else x)
        return s + amount if sign > 0 else s - amount


@jax.custom_jvp
def _without_derivative(x: Value) -> Value:
    """`x`, before it becomes an integer, which has no derivative."""
    return x


@_without_derivative.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise RefTypeError(
        "reversible: a second derivative of a function in mode refs.Fixed, whose states are "
        "integers: use mode 'float'"
    )


def fixed_of(mode: str | Fixed) -> Fixed | None:
    """How a mode encodes float refs; None if they are kept as they are."""
    if isinstance(mode, Fixed):
        return mode
    if mode != "float":
        raise RefValueError(f"reversible: mode {mode!r}: a mode is 'float' or refs.Fixed(bits)")
    return None
