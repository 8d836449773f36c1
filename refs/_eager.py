"""Operations on concrete refs outside any trace: one donated, compiled kernel each.

A kernel is compiled for the static part of an index (the skeleton) and called with the rest, so
that a new index of the same kind doesn't recompile. JAX's own jit is the cache of shapes and
dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from refs import _jax
from refs._indexing import Index


def buffer_of(ref: Any) -> jax.Array:
    """The array that a concrete handle, ours or JAX's, holds now."""
    return ref._buffer() if hasattr(ref, "_buffer") else ref._refs._buf


def store(ref: Any, buffer: jax.Array) -> None:
    """Makes `buffer`, which nobody else may hold, the array of a concrete handle."""
    ref._refs._buf = buffer


def read(ref: Any, index: Index) -> jax.Array:
    """A copy of the indexed part: the handle's own buffer is never given away."""
    skeleton, operands = index.split()
    return _reader(skeleton)(buffer_of(ref), operands)


def write(ref: Any, index: Index, value: Any) -> None:
    _store(ref, _kernel("write", index, ref), index, value)


def add(ref: Any, index: Index, value: Any) -> None:
    _store(ref, _kernel("add", index, ref), index, value)


def update(ref: Any, index: Index, method: str, operand: Any) -> None:
    _store(ref, _kernel(method, index, ref), index, operand)


def _store(ref: Any, kernel: Callable[..., jax.Array], index: Index, value: Any) -> None:
    new = kernel(buffer_of(ref), index.split()[1], value)
    if _jax.is_jit_disabled():
        # Run op by op, a kernel may give back the very array that it was given.
        new = jnp.copy(new)
    store(ref, _jax.commit(new))


def _kernel(method: str, index: Index, ref: Any) -> Callable[..., jax.Array]:
    sharding = buffer_of(ref).sharding
    several = len(sharding.device_set) > 1
    return _updater(method, index.split()[0], sharding if several else None)


@functools.lru_cache(maxsize=4096)
def _reader(skeleton: Index) -> Callable[..., jax.Array]:
    def read_kernel(x: jax.Array, operands: list[Any]) -> jax.Array:
        return skeleton.join(operands).read(x)

    return jax.jit(_copying(read_kernel) if skeleton.is_whole else read_kernel)


def _copying(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda x, operands: jnp.copy(kernel(x, operands))


@functools.lru_cache(maxsize=4096)
def _updater(method: str, skeleton: Index, sharding: Any) -> Callable[..., jax.Array]:
    def update_kernel(x: jax.Array, operands: list[Any], value: Any) -> jax.Array:
        index = skeleton.join(operands)
        if method in ("write", "add"):
            return getattr(index, method)(x, value)
        return index.update(x, method, value)

    return jax.jit(update_kernel, donate_argnums=0, keep_unused=True, out_shardings=sharding)
