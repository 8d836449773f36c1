"""Where arrays lie."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.core import AbstractValue

from refs._jax.names import is_key, is_on_explicit_mesh
from refs._types import Buffer, DType, Placement, Sharding, Value

__all__ = [
    "commit", "copy_of", "copy_of_part", "in_device_memory", "in_memory_of", "is_in_host_memory",
    "is_of_host", "memory_space", "place", "place_in_trace", "zeros",
]  # fmt: skip


def commit(x: Value) -> Buffer:
    """The same buffer, committed to its device if those of JAX's own refs are.

    The cache keys of `jax.jit` contain whether an argument is committed.
    """
    if x.committed or not _refs_are_committed():
        return x
    return jax.device_put(x, x.sharding)


def place(x: Value, sharding: Placement, copy: bool) -> Buffer:
    """The array under another sharding; the very same memory where it can be, unless `copy`."""
    is_of_others = not getattr(sharding, "is_fully_addressable", True)
    if is_of_others and isinstance(x, jax.Array) and x.is_fully_addressable:
        # Each process has all of it, and the same. JAX would send it from device to device, which
        # some backends can't.
        return _from_host(x, sharding)
    if isinstance(x, np.ndarray | np.generic):
        return _from_numpy(x, sharding)
    # A part may be the very memory of what is put there, whatever `may_alias` is.
    placed = _moved(copy_of(x) if copy else x, sharding)
    device = placed.sharding
    if is_on_explicit_mesh(placed) and isinstance(device, jax.sharding.SingleDeviceSharding):
        # JAX leaves the explicit mesh from which the array came in its type.
        part = placed.addressable_data(0)
        return jax.make_array_from_single_device_arrays(placed.shape, device, [part])
    return placed


def _moved(x: jax.Array, sharding: Placement) -> jax.Array:
    if isinstance(sharding, jax.Device):
        sharding = jax.sharding.SingleDeviceSharding(sharding)
    if is_of_host(x.sharding) or is_of_host(sharding):
        # JAX moves an array to other devices, or to another memory, but not always at once.
        x = jax.device_put(x, x.sharding.with_memory_kind("device"))
        x = jax.device_put(x, sharding.with_memory_kind("device"))
    return jax.device_put(x, sharding)


def is_of_host(sharding: Placement | None) -> bool:
    """Whether a sharding is one of the host's memory."""
    return getattr(sharding, "memory_kind", None) not in (None, "device")


def _from_host(x: jax.Array, sharding: Sharding) -> jax.Array:
    if not is_key(x.dtype):
        return _from_numpy(np.asarray(x), sharding)
    bits = _from_numpy(np.asarray(jax.random.key_data(x)), sharding)
    return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(x))


def _from_numpy(x: np.ndarray | np.generic, sharding: Placement) -> jax.Array:
    # Whatever `may_alias` is, JAX goes on reading the caller's memory after the call, and the CPU's
    # arrays may be that memory for good. XLA never updates such an array in place: hence the copy.
    placed = jax.device_put(np.array(x), sharding)
    is_cpu = all(device.platform == "cpu" for device in placed.sharding.device_set)
    return copy_of(placed) if is_cpu else placed


def copy_of(x: jax.Array) -> jax.Array:
    """A copy on the same devices, whatever mesh is in force: with one, these must be its own."""
    with jax.set_mesh(None):
        return jax.numpy.copy(x)


def copy_of_part(shard: jax.Shard) -> jax.Array:
    """A copy of the part of an array on one of this process's devices."""
    x: Any = shard.data
    if not is_of_host(x.sharding):
        return copy_of(x)
    return jax.device_put(np.array(x), x.sharding)  # JAX takes its type for one on the device.


def place_in_trace(x: Value, sharding: Placement) -> Value:
    """A traced array under another sharding."""
    if isinstance(sharding, jax.P):
        sharding = jax.NamedSharding(jax.sharding.get_abstract_mesh(), sharding)
    # Over axes that XLA shards, `device_put` says nothing.
    is_automatic = isinstance(sharding, jax.NamedSharding) and not sharding.mesh.explicit_axes
    return (jax.lax.with_sharding_constraint if is_automatic else jax.device_put)(x, sharding)


def zeros(shape: tuple[int, ...], dtype: DType, sharding: Placement | None) -> jax.Array:
    """Zeros under a sharding: each device makes its own part."""
    if not is_of_host(sharding):
        return jax.numpy.zeros(shape, dtype, device=sharding)
    # JAX can't make them in the host's memory; on the device there may be no room.
    return copy_of(jax.device_put(np.zeros(shape, dtype), sharding))


def is_in_host_memory(x: Value) -> bool:
    """Whether an array lies in the host's memory, as JAX's offloading has it."""
    aval = x if isinstance(x, AbstractValue) else jax.typeof(x)
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def memory_space(x: Value) -> Any:
    """The memory space of a ref of this array: None is the device's."""
    return jax.memory.Space.Host if is_in_host_memory(x) else None


def in_device_memory(x: Value) -> Value:
    """The array, in its device's memory."""
    return jax.device_put(x, jax.memory.Space.Device) if is_in_host_memory(x) else x


def in_memory_of(x: Value, value: Value) -> Value:
    """The array `value`, which is in the device's memory, in the host's if `x` is."""
    return jax.device_put(value, jax.memory.Space.Host) if is_in_host_memory(x) else value


@functools.cache
def _refs_are_committed() -> bool:
    return jax.new_ref(jax.numpy.zeros(()))._refs._buf.committed  # in the newest JAX
