"""Operations on concrete refs outside any trace: each runs a kernel to which the buffer is donated.

A kernel, a small jitted function, is compiled for the static part of an index (the skeleton) and
called with the rest, its operands, so that a new index of the same kind doesn't recompile. JAX's
own jit caches by shapes and dtypes. Operations with the commonest indices come from `quick.py`, and
have kernels of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from refs import _jax
from refs._buffers.devices import check_devices
from refs._buffers.exchange import Busy, call_reading, exchange_one, patiently
from refs._buffers.handles import buffer_of, is_ours, sharding_of, update_native
from refs._buffers.parts import (
    Shape,
    part_of,
    reading_part,
    updating_apart,
    updating_part,
    with_start,
)
from refs._buffers.signals import deliver, without_interrupts
from refs._indexing.index import Index
from refs._types import Buffer, DType, Indexer, RefLike, Sharding, Value


def read(
    ref: RefLike, index: Index, out_sharding: Sharding | jax.sharding.PartitionSpec | None = None
) -> jax.Array:
    """A copy of the indexed part: the handle's own buffer is never given away."""
    skeleton, operands = index.split()
    kernel = reader(skeleton, ref.dtype, out_sharding, _shape_of_part(ref))
    return run_reader(ref, kernel, operands) if is_ours(ref) else kernel(buffer_of(ref), operands)


def update(ref: RefLike, index: Index, method: str, operand: Value) -> None:
    """`ref.at[index].<method>(operand)`."""
    skeleton, operands = index.split()
    run = run_updater if is_ours(ref) else _update_native
    run(ref, updater(ref, method, skeleton, _shape_of_part(ref)), operands, operand)


def swap(ref: RefLike, index: Index, value: Value) -> jax.Array:
    """Overwrites the indexed part and returns its old value, as one atomic operation."""
    skeleton, operands = index.split()
    run = run_updater if is_ours(ref) else _update_native
    old = run(ref, updater(ref, "swap", skeleton, _shape_of_part(ref)), operands, value)
    return _jax.wrap_keys(old, ref.dtype)


def _shape_of_part(ref: RefLike) -> Shape | None:
    """The shape of a packed ref: its kernels take a part of a buffer. None for any other ref."""
    return None if part_of(ref) is None else ref._shape


def run_updater(
    ref: RefLike, kernel: Callable[..., Any], operands: Sequence[Value] | np.ndarray, value: Value
) -> Any:
    """Replaces the buffer of a ref of ours by the kernel's result; returns the rest of that.

    Raises:
      RefStateError: if the ref's value has been lost.
      RefValueError: if an operand lies on other devices than the ref.
    """
    try:
        given = operands if ref._part is None else with_start(ref, operands)
        try:
            return exchange_one(ref._cell, kernel, given, value)
        except Busy:
            # No lambda: what it closes over would take longer in each call.
            return patiently(partial(exchange_one, ref._cell, kernel, given, value), [ref])
    except (RuntimeError, ValueError):
        # It also says so if the value was lost.
        check_devices(ref, ref._buffer(), (operands, value))
        raise


def _update_native(ref: RefLike, kernel: Callable[..., Any], *operands: Any) -> Any:
    try:
        [[buffer], rest] = kernel([buffer_of(ref)], *operands)
        update_native(ref, buffer)
        return rest
    except (RuntimeError, ValueError):
        check_devices(ref, buffer_of(ref), operands)
        raise
    finally:
        deliver(before_the_end=True)


def run_reader(
    ref: RefLike, kernel: Callable[..., jax.Array], operands: Sequence[Value] | np.ndarray
) -> jax.Array:
    """What the kernel reads from the buffer of a ref of ours.

    Raises:
      RefStateError, RefValueError: as `run_updater`.
    """
    given = operands if ref._part is None else with_start(ref, operands)
    try:
        return call_reading(ref._cell, kernel, given)
    except Busy:
        return patiently(partial(call_reading, ref._cell, kernel, given), read=[ref])
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
        x = _jax.in_device_memory(_jax.wrap_keys(x, dtype))
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
    if part is not None and not is_donated:
        return updating_apart(ref, updater(ref, method, skeleton))
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
        index, given = skeleton.join(operands), _jax.wrap_keys(held[0], dtype)
        x = _jax.in_device_memory(given)
        old = _jax.unwrap_keys(index.read(x)) if method == "swap" else None
        new = index.update(x, "set" if method == "swap" else method, value)
        new = _jax.in_memory_of(given, new)
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


@functools.lru_cache(maxsize=4096)
def skeleton_of(shape: tuple[int, ...], kinds: tuple[Any, ...]) -> Index:
    """The static part of an index of these kinds, see `quick.py`; without any, of the whole."""

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
