"""The short way of eager operations with the commonest indices and values.

The indices are integers and slices, or one int32 array, into a ref of ours, on one device, of an
ordinary dtype. They aren't parsed to an `Index`: what they have in common is the key of a kernel,
and the rest its operands. Whatever doesn't fit takes the general way (`kernels.py`), which converts
it, or says what is wrong with it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from refs import _jax
from refs._buffers.kernels import run_reader, run_updater, skeleton_of
from refs._buffers.parts import Shape, reading_part, updating_part
from refs._buffers.signals import without_interrupts
from refs._indexing.sharded import mesh_sharding
from refs._indexing.values import convert, fit, is_enabled
from refs._types import Buffer, DType, Indexer, RefLike, Value
from refs.errors import RefError


def try_read(ref: RefLike, idx: Indexer) -> jax.Array | None:
    """`ref[idx]`, or None where the general way must be taken."""
    if not ref._is_plain or _jax.trace_state.value is not _jax.eval_trace:
        return None
    found = _locate(ref._shape, idx)
    if found is None:
        return None
    kinds, operands = found
    kernel = _quick_reader(ref._shape, kinds, ref._part is not None)
    try:
        return run_reader(ref, kernel, operands)
    except FloatingPointError:  # JAX looks for NaNs: the general way says where one is.
        return None


def try_update(ref: RefLike, idx: Indexer, method: str, value: Value) -> bool:
    """Writes ("set") or accumulates ("add") `value`; False where only the general way can."""
    if not ref._is_plain or not _jax.runs_compiled():
        return False
    found = _locate(ref._shape, idx)
    if found is None:
        return False
    kinds, operands = found
    dtype = ref._dtype
    if dtype.itemsize > 4 and not is_enabled(dtype):
        return False
    kernel, shape = _quick_updater(method, ref._shape, kinds, ref._part is not None)
    kind = type(value)
    if kind is _jax.ArrayImpl or kind is np.ndarray:
        given = value.shape
        if value.dtype != dtype or (given != shape and given != ()):
            return False
        if kind is np.ndarray:
            value = value.copy()  # JAX reads it when the caller may have changed it.
    else:
        value = _number(value, dtype)
        if value is None:
            return False
    run_updater(ref, kernel, operands, value)
    return True


def _locate(
    shape: Shape, index: Indexer
) -> tuple[tuple[Any, ...], tuple[Value, ...] | np.ndarray] | None:
    """The kinds of an index's entries, and its operands; None where the general way must be taken.

    A kind is None for an integer, 0 for a whole axis, `(size, step)` for a slice and
    `("at", shape)` for an int32 array; no kinds at all stand for the whole ref. Operands are a
    tuple of at most one number or array, or an int32 array of several numbers, of shape `[n]`.
    """
    idx: Any = index[0] if type(index) is tuple and len(index) == 1 else index
    if idx is ...:
        return (), ()
    kind = type(idx)
    if kind is int and shape and -shape[0] <= idx < shape[0]:
        return (None,), (_small(idx if idx >= 0 else idx + shape[0]),)
    if kind is _jax.ArrayImpl and idx.dtype == _INT32 and shape and shape[0]:
        return (("at", idx.shape),), (idx,)
    if kind is slice and shape:
        if (span := _span(idx, shape[0])) is None:
            return None
        start, size = span
        return (size,), (_small(start),) if size else ()
    entries = idx if kind is tuple else (idx,)
    if len(entries) > len(shape):
        return None
    numbers: list[int] = []
    kinds: list[Any] = []
    for entry, n in zip(entries, shape, strict=False):
        if type(entry) in _INTEGERS:
            number = int(entry)
            if not -n <= number < n:
                return None
            numbers.append(number if number >= 0 else number + n)
            kinds.append(None)
        elif type(entry) is slice:
            if (span := _span(entry, n)) is None:
                return None
            start, size = span
            if size:
                numbers.append(start)
            kinds.append(size)
        else:
            return None
    if len(numbers) == 1:
        return tuple(kinds), (_small(numbers[0]),)
    # Several numbers go to a kernel faster in one array.
    return tuple(kinds), np.array(numbers, np.int32) if numbers else ()


def _span(entry: slice, n: int) -> tuple[int, tuple[int, int] | int] | None:
    """Where a slice of an axis of size `n` starts, and its kind."""
    try:
        start, stop, step = entry.indices(n)
    except (TypeError, ValueError):
        return None
    if step <= 0 or stop <= start:
        return None
    size = (stop - start + step - 1) // step
    return start, 0 if size == n else (size, step)


_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)
_INTEGERS = frozenset([int, *(np.dtype(code).type for code in "bhilqBHILQ")])

# Small numbers on the device: transferring one takes longer than a kernel that uses it. The keys
# are the numbers of indices, and for values `(kind of number, number, dtype)`.
_ON_DEVICE: dict[Any, jax.Array] = {}


def _put_on_device(number: np.int32 | np.ndarray, key: Any) -> Value:
    found = jnp.asarray(number)
    if mesh_sharding(found.sharding) is not None:
        return number  # JAX has spread it over the mesh in force: other operations can't use it.
    _ON_DEVICE[key] = found
    return found


def _small(number: int) -> Value:
    """A number of an index as a kernel takes it fastest."""
    found = _ON_DEVICE.get(number)
    if found is not None:
        return found
    value = np.int32(number)  # A Python integer has a type of its own, weak: a retrace.
    return _put_on_device(value, number) if number < 4096 else value


def _number(number: Value, dtype: DType) -> Value | None:
    """A Python number as a kernel takes it fastest; None where the general way refuses it."""
    kind = type(number)
    if kind not in _KINDS_OF_NUMBERS:
        return None
    key = None
    # -0.0 would be the same key as 0.0.
    if -256 <= number <= 256 and number % 1 == 0 and (number or math.copysign(1, number) > 0):
        key = kind, number, dtype
        if (found := _ON_DEVICE.get(key)) is not None:
            return found
    elif kind is float and dtype == _FLOAT32:
        return number
    try:
        converted = convert(number, dtype)
    except RefError:
        return None
    return converted if key is None else _put_on_device(converted, key)


_KINDS_OF_NUMBERS = frozenset([bool, int, float])


def _is_inside(kinds: tuple[Any, ...]) -> bool:
    """Whether an index is known to be inside of the array: `_locate` looks at its numbers."""
    return not any(type(kind) is tuple and kind[0] == "at" for kind in kinds)


@functools.lru_cache(maxsize=4096)
def _quick_reader(shape: Shape, kinds: tuple[Any, ...], is_part: bool) -> Callable[..., jax.Array]:
    skeleton = skeleton_of(shape, kinds)

    def read_kernel(x: jax.Array, numbers: list[Value] | jax.Array) -> jax.Array:
        part = skeleton.join(list(numbers)).read(x)
        return jnp.copy(part) if skeleton.is_whole else part

    return jax.jit(reading_part(read_kernel, shape, _is_inside(kinds)) if is_part else read_kernel)


@functools.lru_cache(maxsize=4096)
def _quick_updater(
    method: str, shape: Shape, kinds: tuple[Any, ...], is_part: bool
) -> tuple[Callable[..., Any], tuple[int, ...]]:
    skeleton = skeleton_of(shape, kinds)

    def update_kernel(
        held: list[Buffer], numbers: list[Value] | jax.Array, value: Value
    ) -> tuple[list[Buffer], None]:
        [x] = held
        value = fit(value, skeleton.result_shape, x.dtype)
        return [skeleton.join(list(numbers)).update(x, method, value)], None

    kernel = updating_part(update_kernel, shape, _is_inside(kinds)) if is_part else update_kernel
    run = jax.jit(kernel, donate_argnums=0, keep_unused=True)
    return without_interrupts(run), skeleton.result_shape
