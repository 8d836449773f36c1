"""Lenses: how the value of a ref is seen in a buffer.

A buffer is an array as XLA has it. What a ref holds is the buffer itself, or what the bits in it
stand for, or lies in the host's memory, or is a part of it. A lens reads the value of a buffer and
gives the buffer with another value. It is hashable, and a part of the keys under which kernels and
programs are kept. (Lenses are from bidirectional programming: Foster et al., 2007.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from jax import lax

from refs import _jax
from refs._types import Buffer, DType, Value


class Lens:
    """The lens of a ref whose value is the buffer itself."""

    def get(self, buffer: Value, at: Value = None, is_inside: bool = True) -> Value:
        """The value in a buffer.

        Args:
          buffer: the buffer, traced or not.
          at: where the value begins in it, for a `Part`: a number, static, traced or an array.
          is_inside: whether what is read of the value is known to lie in it.
        """
        return buffer

    def put(self, buffer: Value, value: Value, at: Value = None) -> Value:
        """The buffer with another value."""
        return value

    def bits(self, buffer: Buffer, at: Value = None) -> Buffer:
        """What a ref has of a buffer: the buffer itself, or a copy of a part."""
        return buffer

    def in_numpy(self, buffer: np.ndarray, at: int) -> np.ndarray:
        """`bits`, of a buffer of NumPy's."""
        return buffer


@dataclass(frozen=True)
class Keys(Lens):
    """The lens of PRNG keys of a dtype: in a buffer are their bits, `[*shape, *key_shape]`.

    Compiled calls take and give bits, because JAX's Python code makes an array of keys of them.
    """

    dtype: DType

    def get(self, buffer: Value, at: Value = None, is_inside: bool = True) -> Value:
        return _jax.wrap_keys(buffer, self.dtype)

    def put(self, buffer: Value, value: Value, at: Value = None) -> Value:
        return _jax.unwrap_keys(value)


class _InHostMemory(Lens):
    """The lens of what lies in the host's memory: it is read and written on the device."""

    def get(self, buffer: Value, at: Value = None, is_inside: bool = True) -> Value:
        return _jax.in_device_memory(buffer)

    def put(self, buffer: Value, value: Value, at: Value = None) -> Value:
        return _jax.in_memory_of(buffer, _jax.in_device_memory(value))


@dataclass(frozen=True)
class Part(Lens):
    """The lens of a packed ref, whose value is a stretch of a flat buffer, in this shape.

    XLA takes two slices, one of the other, for one, and before jaxlib 0.11.2 forgets that places
    outside of the first one mean its edge: hence `is_inside`.
    """

    shape: tuple[int, ...]

    def get(self, buffer: Value, at: Value = None, is_inside: bool = True) -> Value:
        size = math.prod(self.shape)
        if isinstance(at, int):
            return lax.slice(buffer, (at,), (at + size,)).reshape(self.shape)
        part = lax.dynamic_slice(buffer, (at,), (size,)).reshape(self.shape)
        return part if is_inside else lax.optimization_barrier(part)

    def put(self, buffer: Value, value: Value, at: Value = None) -> Value:
        return lax.dynamic_update_slice(buffer, value.reshape(-1), (at,))

    def bits(self, buffer: Buffer, at: Value = None) -> Buffer:
        with _jax.not_looking_for_nans():  # A NaN that it has is found by what reads it.
            return _taker(self.shape)(buffer, at)

    def in_numpy(self, buffer: np.ndarray, at: int) -> np.ndarray:
        return buffer[at : at + math.prod(self.shape)].reshape(self.shape)


WHOLE, IN_HOST_MEMORY = Lens(), _InHostMemory()


def lens_of(value: Value) -> Lens:
    """The lens for an array that has a buffer of its own."""
    if _jax.is_key(value.dtype):
        return Keys(value.dtype)
    return IN_HOST_MEMORY if _jax.is_in_host_memory(value) else WHOLE


@functools.lru_cache(maxsize=4096)
def _taker(shape: tuple[int, ...]) -> Callable[..., Buffer]:
    return jax.jit(Part(shape).get)
