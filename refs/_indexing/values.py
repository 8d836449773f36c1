"""Values to be written to a ref: converted if the ref can hold them, otherwise refused."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from refs import _jax
from refs._types import Aval, DType, Sharding, Value
from refs.errors import RefTypeError, RefValueError


def convert(value: Value, dtype: DType) -> Value:
    """`value` as an array of `dtype`, as `x.at[...].set(value)` of `jax.numpy` converts it.

    Raises:
      RefTypeError: if `dtype` can't hold every value of `value`'s type (a float in an integer
        ref, a complex in a real one), where `jax.numpy` casts with a warning.
      RefValueError: if a Python integer is out of the range of `dtype`, or one in a list out of
        that of the dtype which `jax.numpy` gives the list.
    """
    if isinstance(value, _jax.NativeRef):
        raise RefTypeError("a Ref can't hold a Ref: write its value, `ref[...] = other[...]`")
    if type(value) in _RANKS:
        # As jax.numpy's weak types: a Python number takes the dtype, if that can hold its kind.
        if _rank(dtype) < _RANKS[type(value)]:
            wanted = "`jax.random.key(seed)`" if _jax.is_key(dtype) else "a number of its kind"
            raise RefTypeError(
                f"a Python {type(value).__name__} can't be held by a ref of dtype {dtype}: give "
                f"{wanted}"
            )
        return _number(value, dtype)
    try:
        # JAX would read NumPy's array when the caller may have changed it.
        value = _jax.as_array(value.copy() if isinstance(value, np.ndarray) else value)
        value = _jax.in_device_memory(value)  # That of a ref in the host's memory is moved later.
    except OverflowError as error:  # an integer in a list, for which JAX chooses a dtype
        raise RefValueError(f"{error}: give an array of a dtype that holds it") from None
    except (TypeError, ValueError):
        dtype_of = f", of dtype {value.dtype}," if isinstance(value, np.ndarray) else ""
        raise RefTypeError(
            f"a value of type {type(value).__name__}{dtype_of} is not an array or a number for JAX"
        ) from None
    if value.dtype == dtype:
        return _jax.strong(value)
    if not _holds(dtype, value):
        way = f"cast it yourself, `value.astype({dtype})`, if the loss is meant"
        if not is_enabled(dtype):
            way = "64-bit types are disabled. Write it in `with jax.enable_x64(True):`"
        if _jax.is_key(dtype) or _jax.is_key(value.dtype):
            way = "`jax.random.wrap_key_data` makes a key of its bits, and `key_data` gives them"
        raise RefTypeError(
            f"a value of dtype {value.dtype} can't be held by a ref of dtype {dtype}: {way}"
        )
    return lax.convert_element_type(value, dtype)


def fit(
    value: Value, shape: Sequence[int], dtype: DType, sharding: Sharding | None = None
) -> Value:
    """`value` converted to `dtype` and broadcast to `shape`, as NumPy does in an assignment.

    `sharding`: where it is to lie. Of numbers and NumPy arrays each device then gets its own part,
    and none gets all of it.

    Raises:
      RefTypeError, RefValueError: as `convert`, and where the shapes don't broadcast.
    """
    shape = tuple(shape)
    if sharding is not None and isinstance(value, np.ndarray) and value.shape == shape:
        value = _divided(value, sharding)
    value = convert(value, dtype)
    if value.shape == shape:
        return value
    extra = value.ndim - len(shape)
    if extra > 0 and math.prod(value.shape[:extra]) == 1:
        value = lax.reshape(value, value.shape[extra:])
    try:
        if sharding is None or getattr(value, "committed", False):
            return jnp.broadcast_to(value, shape)
        return _broadcast(shape, sharding)(value)
    except ValueError:
        raise RefValueError(
            f"a value of shape {value.shape} can't be broadcast to the indexed shape {shape}"
        ) from None


@functools.lru_cache(maxsize=256)
def _broadcast(shape: tuple[int, ...], sharding: Sharding) -> Callable[[Value], Value]:
    return jax.jit(lambda x: jnp.broadcast_to(x, shape), out_shardings=sharding)


def _divided(value: np.ndarray, sharding: Sharding) -> Value:
    try:
        return _jax.place(value, sharding, copy=False)
    except TypeError:  # No array for JAX: `convert` says so.
        return value


def _number(value: Value, dtype: DType) -> np.ndarray:
    if type(value) is int and jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        if not limits.min <= value <= limits.max:
            raise RefValueError(
                f"{value} is out of the range of {dtype}, {limits.min} to {limits.max}"
            )
    elif type(value) is int and jnp.issubdtype(dtype, jnp.inexact):
        try:
            value = float(value)  # not every dtype takes large integers
        except OverflowError:
            bits = value.bit_length()
            raise RefValueError(
                f"an integer of {bits} bits is out of the range of {dtype}"
            ) from None
    with np.errstate(over="ignore"):  # to infinity, as in jax.numpy
        return np.asarray(value, dtype)


def _holds(dtype: DType, value: Value) -> bool:
    """True where JAX's type promotion of the two gives `dtype`."""
    if any(jnp.issubdtype(d, jax.dtypes.extended) for d in (value.dtype, dtype)):
        return False
    try:
        return jax.dtypes.result_type(value, jax.ShapeDtypeStruct((), dtype)) == dtype
    except ValueError:  # no promotion between these two
        return False


def is_enabled(dtype: DType) -> bool:
    """Whether JAX now makes arrays of this dtype, and not of 32 bits instead."""
    return dtype not in WIDE or bool(jax.config.read("jax_enable_x64"))


def check_enabled(dtype: DType) -> None:
    """Refuses a write to a ref whose dtype JAX doesn't make arrays of now.

    Raises:
      RefTypeError: if it is one of 64 bits, and these are disabled.
    """
    if not is_enabled(dtype):
        raise RefTypeError(
            f"it is of dtype {dtype}, where 64-bit types are disabled: the new value would have "
            "32 bits. Write it as it was made, in `with jax.enable_x64(True):`"
        )


WIDE = {np.dtype(name) for name in ("float64", "complex128", "int64", "uint64")}
_RANKS = {bool: 0, int: 1, float: 2, complex: 3}


@functools.lru_cache
def _rank(dtype: DType) -> int:
    """The rank of the kinds of numbers that `dtype` holds; -1 for none, as in PRNG keys."""
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return next((k for k, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)), -1)


def neutral_of(aval: Aval, method: str) -> Value:
    """`neutral` as an array of type `aval` that the current trace can use."""
    zeros = zeros_of(aval)
    return zeros if method == "add" else lax.full_like(zeros, neutral(aval.dtype, method))


def neutral(dtype: DType, method: str) -> complex:
    """The operand with which an update by `ref.at[...]` changes nothing."""
    if method in ("add", "multiply"):
        return int(method == "multiply")
    if jnp.issubdtype(dtype, jnp.bool_):
        return method == "min"
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return limits.max if method == "min" else limits.min
    end = np.inf if method == "min" else -np.inf
    return complex(end, end) if jnp.issubdtype(dtype, jnp.complexfloating) else end


def filling(dtype: DType) -> np.ndarray | int:
    """The value that `mode="fill"` reads out of bounds, as in `jax.numpy`."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.asarray(np.nan, dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return int(limits.max if jnp.issubdtype(dtype, jnp.unsignedinteger) else limits.min)
    if jnp.issubdtype(dtype, jnp.bool_):
        return True
    raise RefTypeError(f'mode="fill" needs a `fill_value` for a ref of dtype {dtype}')


def zeros_of(aval: Aval) -> Value:
    """Zeros of type `aval` that the current trace can use."""
    if _jax.has_explicit_sharding(aval):
        return _jax.zeros_like_aval(aval)
    # The type may name another mesh than that of the `shard_map` around this call.
    zeros, axes = jnp.zeros(aval.shape, aval.dtype), _jax.varying_axes(aval)
    return lax.pcast(zeros, tuple(axes), to="varying") if axes else zeros
