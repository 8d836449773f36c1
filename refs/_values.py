"""Values on their way into a ref: converted where they can be held, refused where they can't."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from refs import _jax
from refs.errors import RefTypeError, RefValueError


def convert(value: Any, dtype: Any) -> Any:
    """`value` as an array of `dtype`, as `x.at[...].set(value)` of `jax.numpy` converts it.

    Raises:
      RefTypeError: if `dtype` can't hold every value of `value`'s type (a float in an integer
        ref, a complex in a real one), where `jax.numpy` casts with a warning.
      RefValueError: if a Python integer is out of the range of `dtype`.
    """
    if isinstance(value, _jax.NativeRef):
        raise RefTypeError("a Ref can't hold a Ref: write its value, `ref[...] = other[...]`")
    if isinstance(value, int) and not isinstance(value, bool) and _is_integer(dtype):
        try:
            return jnp.asarray(np.asarray(value, dtype))
        except OverflowError:
            raise RefValueError(f"{value} is out of the range of {dtype}") from None
    try:
        value = value if isinstance(value, jax.Array) else jnp.asarray(value)
    except (TypeError, ValueError):
        raise RefTypeError(
            f"a value of type {type(value).__name__} is not an array or a number"
        ) from None
    if value.dtype == dtype:
        return lax.convert_element_type(value, dtype) if value.weak_type else value
    if (
        jnp.issubdtype(value.dtype, jax.dtypes.extended)
        or jnp.issubdtype(dtype, jax.dtypes.extended)
        or jax.dtypes.result_type(value, jax.ShapeDtypeStruct((), dtype)) != dtype
    ):
        raise RefTypeError(
            f"a value of dtype {value.dtype} can't be held by a ref of dtype {dtype}: cast it "
            f"yourself, `value.astype({dtype})`, if the loss is meant"
        )
    return lax.convert_element_type(value, dtype)


def fit(value: Any, shape: Sequence[int], dtype: Any) -> Any:
    """`value` converted to `dtype` and broadcast to `shape`, as NumPy does in an assignment.

    Raises:
      RefTypeError, RefValueError: as `convert`, and where the shapes don't broadcast.
    """
    shape = tuple(shape)
    value = convert(value, dtype)
    if value.shape == shape:
        return value
    extra = value.ndim - len(shape)
    if extra > 0 and math.prod(value.shape[:extra]) == 1:
        value = lax.reshape(value, value.shape[extra:])
    try:
        return jnp.broadcast_to(value, shape)
    except ValueError:
        raise RefValueError(
            f"a value of shape {value.shape} can't be broadcast to the indexed shape {shape}"
        ) from None


def _is_integer(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.integer)
