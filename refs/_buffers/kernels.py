"""Operations on concrete refs outside any trace: each runs a kernel to which the buffer is donated.

A kernel, a small jitted function, is compiled for the static part of an index (the skeleton) and
called with the rest, its operands, so that a new index of the same kind doesn't recompile. JAX's
own jit caches by shapes and dtypes. Integers, slices and an int32 array, the indices that most
programs use, take a fast path, which doesn't parse them to an `Index`; the general path takes every
index.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from refs import _jax
from refs._buffers.devices import check_devices
from refs._buffers.exchange import Busy, call_reading, exchange_one, patiently
from refs._buffers.handles import buffer_of, is_ours, sharding_of, update_native
from refs._buffers.parts import Shape, part_of, reading_part, updating_part, with_start
from refs._buffers.signals import deliver, without_interrupts
from refs._indexing.index import Index
from refs._indexing.values import fit, is_enabled
from refs._types import Buffer, DType, Indexer, RefLike, Sharding, Value

# ---------------------------------------------------------------------------------------------
# The general path: any index


def read(
    ref: RefLike, index: Index, out_sharding: Sharding | jax.sharding.PartitionSpec | None = None
) -> jax.Array:
    """A copy of the indexed part: the handle's own buffer is never given away."""
    skeleton, operands = _split(ref, index)
    return _read(ref, reader(skeleton, ref.dtype, out_sharding, _shape_of_part(ref)), operands)


def update(ref: RefLike, index: Index, method: str, operand: Value) -> None:
    """`ref.at[index].<method>(operand)`."""
    skeleton, operands = _split(ref, index)
    _update(ref, updater(ref, method, skeleton, _shape_of_part(ref)), operands, operand)


def swap(ref: RefLike, index: Index, value: Value) -> jax.Array:
    """Overwrites the indexed part and returns its old value, as one atomic operation."""
    skeleton, operands = _split(ref, index)
    old = _update(ref, updater(ref, "swap", skeleton, _shape_of_part(ref)), operands, value)
    return _jax.wrap_keys(old, ref.dtype)


def _shape_of_part(ref: RefLike) -> Shape | None:
    """The shape of a packed ref: its kernels take a part of a buffer. None for any other ref."""
    return None if part_of(ref) is None else ref._shape


def _split(ref: RefLike, index: Index) -> tuple[Index, list[Value]]:
    is_sharded = sharding_of(ref) is not None
    return (index._replace(in_rows=True) if is_sharded else index).split()


def _update(
    ref: RefLike, kernel: Callable[..., Any], operands: Sequence[Value] | np.ndarray, value: Value
) -> Any:
    """Replaces a ref's buffer, which is donated, by the kernel's result; returns the rest of it.

    Raises:
      RefStateError: if the ref's value has been lost.
      RefValueError: if an operand lies on other devices than the ref.
    """
    try:
        if not is_ours(ref):
            return _update_native(ref, kernel, operands, value)
        given = operands if ref._part is None else with_start(ref, operands)
        try:
            return exchange_one(ref._cell, kernel, given, value)
        except Busy:
            return patiently(lambda: exchange_one(ref._cell, kernel, given, value), [ref])
    except (RuntimeError, ValueError):
        # It also says so if the value was lost.
        check_devices(ref, buffer_of(ref), (operands, value))
        raise


def _update_native(ref: RefLike, kernel: Callable[..., Any], *operands: Any) -> Any:
    try:
        [[buffer], rest] = kernel([buffer_of(ref)], *operands)
        update_native(ref, buffer)
        return rest
    finally:
        deliver(before_the_end=True)


def _read(
    ref: RefLike, kernel: Callable[..., jax.Array], operands: Sequence[Value] | np.ndarray
) -> jax.Array:
    if not is_ours(ref):
        return kernel(buffer_of(ref), operands)
    given = operands if ref._part is None else with_start(ref, operands)
    try:
        return call_reading(ref._cell, kernel, given)
    except Busy:
        return patiently(lambda: call_reading(ref._cell, kernel, given), read=[ref])
    except (RuntimeError, ValueError):
        check_devices(ref, ref._buffer(), operands)  # It also says so if the value was lost.
        raise


@functools.lru_cache(maxsize=4096)
def reader(
    skeleton: Index,
    dtype: DType,
    out_sharding: Sharding | jax.sharding.PartitionSpec | None = None,
    part: Shape | None = None,
) -> Callable[..., jax.Array]:
    """The kernel that copies the indexed part of a buffer: `kernel(buffer, index operands)`.

    That of a packed ref, whose shape is `part`, is called `kernel(buffer, (start, operands))`.
    """

    def read_kernel(x: jax.Array, operands: list[Value]) -> jax.Array:
        x = _jax.wrap_keys(x, dtype)
        found = skeleton.join(operands).read(x, out_sharding)
        return jnp.copy(found) if skeleton.is_whole else found

    return jax.jit(read_kernel if part is None else reading_part(read_kernel, part))


def updater(
    ref: RefLike, method: str, skeleton: Index, part: Shape | None = None
) -> Callable[..., Any]:
    """The kernel that updates a ref's buffer: `kernel([buffer], index operands, operand)`.

    It returns `([new buffer], old part)`, for PRNG keys as bits; only a `swap` has an old part, and
    other methods have None. The buffer is donated, except while JAX looks for NaNs: then JAX may
    run the kernel again. `part`: as for `reader`.
    """
    is_jitted, is_donated = not _jax.is_jit_disabled(), not _jax.looks_for_nans()
    return _updater(method, skeleton, sharding_of(ref), ref.dtype, is_jitted, is_donated, part)


@functools.lru_cache(maxsize=4096)
def _updater(
    method: str,
    skeleton: Index,
    sharding: Sharding | None,
    dtype: DType,
    is_jitted: bool,
    is_donated: bool,
    part: Shape | None,
) -> Callable[..., Any]:
    def update_kernel(
        held: list[Buffer], operands: list[Value], value: Value
    ) -> tuple[list[Buffer], Value | None]:
        index, x = skeleton.join(operands), _jax.wrap_keys(held[0], dtype)
        old = _jax.unwrap_keys(index.read(x)) if method == "swap" else None
        new = index.update(x, "set" if method == "swap" else method, value)
        return [_jax.unwrap_keys(new)], old

    def op_by_op(
        held: list[Buffer], operands: list[Value], value: Value
    ) -> tuple[list[Buffer], Value | None]:
        # Without jit the update may return `value` itself, or lie where it does: so it is copied,
        # and moved to the ref's device.
        [x], old = kernel(held, operands, value)
        new = jnp.copy(x)
        return [jax.device_put(new, held[0].sharding) if held[0].committed else new], old

    kernel = update_kernel if part is None else updating_part(update_kernel, part)
    if not is_jitted:
        return op_by_op
    donated = 0 if is_donated else ()
    shardings = None if sharding is None else (sharding, None)
    return without_interrupts(
        jax.jit(kernel, donate_argnums=donated, keep_unused=True, out_shardings=shardings)
    )


# ---------------------------------------------------------------------------------------------
# The fast path: integers and slices, or an int32 array, into a ref of ours, on one device, of an
# ordinary dtype


def try_read(ref: RefLike, idx: Indexer) -> jax.Array | None:
    """`ref[idx]`, or None where the general path must be taken."""
    found = _locate(ref, idx)
    if found is None:
        return None
    kinds, operands = found
    return _read(ref, _quick_reader(ref._shape, kinds, ref._part is not None), operands)


def try_update(ref: RefLike, idx: Indexer, method: str, value: Value) -> bool:
    """Writes ("set") or accumulates ("add") `value`; False where only the general path can."""
    found = _locate(ref, idx)
    if found is None:
        return False
    kinds, operands = found
    kind, is_scalar = type(value), True
    if kind is _jax.ArrayImpl or kind is np.ndarray:
        if value.dtype != ref._dtype:
            return False
        if value.dtype.itemsize > 4 and not is_enabled(value.dtype):
            return False
        is_scalar = value.shape == ()
    elif kind is not float or ref._dtype != np.float32:
        return False
    kernel, shape = _quick_updater(method, ref._shape, kinds, ref._part is not None)
    if not is_scalar and value.shape != shape:
        return False
    _update(ref, kernel, operands, value)
    return True


def _locate(
    ref: RefLike, idx: Indexer
) -> tuple[tuple[Any, ...], list[Value] | tuple[()] | np.ndarray] | None:
    """The kinds of an index's entries, and its operands; None where the general path must be taken.

    A kind is None for an integer, 0 for a whole axis, `(size, step)` for a slice and
    `("at", shape)` for an int32 array; no kinds at all stand for the whole ref. Operands are a list
    of at most one number or array, or an int32 array of several numbers, of shape `[n]`.
    """
    if not ref._is_plain or _jax.is_jit_disabled() or _jax.looks_for_nans():
        return None
    shape = ref._shape
    entries = idx if type(idx) is tuple else (idx,)
    if len(entries) == 1 and entries[0] is ...:
        return (), ()
    numbers: list[Value] = []
    kinds: list[Any] = []
    if len(entries) > len(shape):
        return None
    for entry, n in zip(entries, shape, strict=False):
        if type(entry) in _INTEGERS:
            number = int(entry)
            if not -n <= number < n:
                return None
            numbers.append(number if number >= 0 else number + n)
            kinds.append(None)
        elif type(entry) is slice:
            try:
                start, stop, step = entry.indices(n)
            except (TypeError, ValueError):
                return None
            if step <= 0 or stop <= start:
                return None
            size = (stop - start + step - 1) // step
            if size == n:
                kinds.append(0)
            else:
                numbers.append(start)
                kinds.append((size, step))
        elif type(entry) is _jax.ArrayImpl and entry.dtype == np.int32 and n and len(entries) == 1:
            numbers.append(entry)
            kinds.append(("at", entry.shape))
        else:
            return None
    if len(numbers) == 1 and type(numbers[0]) is int:
        numbers = [_small(numbers[0])]
    # Several numbers go to a kernel faster in one array.
    return tuple(kinds), numbers if len(numbers) < 2 else np.array(numbers, np.int32)


_INTEGERS = frozenset([int, *(np.dtype(code).type for code in "bhilqBHILQ")])

# Small integers on the device: transferring one takes longer than a kernel that uses it.
_SMALL: dict[int, jax.Array] = {}


def _small(number: int) -> np.int32 | jax.Array:
    found = _SMALL.get(number)
    if found is None:
        if number >= 4096:
            return np.int32(number)  # A Python integer has a type of its own, weak: a retrace.
        found = _SMALL[number] = jnp.asarray(np.int32(number))
    return found


@functools.lru_cache(maxsize=4096)
def skeleton_of(shape: tuple[int, ...], kinds: tuple[Any, ...]) -> Index:
    """The static part of an index of these kinds, see `_locate`; without any, of the whole."""

    def like(kind: Any) -> Indexer:
        match kind:
            case None:
                return 0
            case 0:
                return slice(None)
            case ("at", shape):
                return np.zeros(shape, np.int32)
            case _:
                size, step = kind
                return slice(0, size * step, step)

    return Index.parse(tuple(map(like, kinds)), shape).split()[0]


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
