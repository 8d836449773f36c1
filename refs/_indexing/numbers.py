"""Python numbers as kernels take them fastest: small ones stay on the device once they were used.

To transfer a number takes longer than a kernel that uses it.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from refs._indexing.sharded import mesh_sharding
from refs._indexing.values import convert
from refs._types import DType, Value

# The keys are the numbers of indices, and for values `(kind of number, number, dtype)`.
_ON_DEVICE: dict[Any, jax.Array] = {}
_FLOAT32 = np.dtype(np.float32)


def on_device(number: int) -> Value:
    """A number of an index."""
    found = _ON_DEVICE.get(number)
    if found is not None:
        return found
    value = np.int32(number)  # A Python integer has a type of its own, weak: a retrace.
    return _put(value, number) if number < 4096 else value


def converted(number: bool | int | float, dtype: DType) -> Value:
    """A Python number as a value of a dtype.

    Raises:
      RefTypeError, RefValueError: if the dtype can't hold it.
    """
    key = None
    # -0.0 would be the same key as 0.0.
    if -256 <= number <= 256 and number % 1 == 0 and (number or math.copysign(1, number) > 0):
        key = type(number), number, dtype
        if (found := _ON_DEVICE.get(key)) is not None:
            return found
    elif type(number) is float and dtype == _FLOAT32:
        return number
    value = convert(number, dtype)
    return value if key is None else _put(value, key)


def _put(number: np.int32 | np.ndarray, key: Any) -> Value:
    found = jnp.asarray(number)
    if mesh_sharding(found.sharding) is not None:
        return number  # JAX has spread it over the mesh in force: other operations can't use it.
    _ON_DEVICE[key] = found
    return found
