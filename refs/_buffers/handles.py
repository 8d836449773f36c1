"""What concrete handles hold, ours and JAX's own."""

from __future__ import annotations

from typing import Any

import jax

from refs import _jax
from refs._indexing.sharded import mesh_sharding
from refs._types import Buffer, RefLike


def is_ours(ref: RefLike) -> bool:
    """True for a handle of ours, False for one of JAX's."""
    return hasattr(ref, "_cell")


def buffer_of(ref: RefLike) -> jax.Array:
    """The array that a concrete handle, ours or JAX's, holds now: bits, for PRNG keys."""
    return ref._buffer() if is_ours(ref) else _jax.unwrap_keys(_jax.native_buffer(ref))


def update_native(ref: RefLike, buffer: Buffer) -> None:
    """Makes `buffer`, which nobody else may hold, the array of one of JAX's own handles."""
    _jax.set_native_buffer(ref, _jax.wrap_keys(_jax.commit(buffer), ref.dtype))


def sharding_of(ref: RefLike) -> Any:
    """How what the handle holds is laid out over a mesh, None without one."""
    return ref._sharding if is_ours(ref) else mesh_sharding(buffer_of(ref).sharding)
