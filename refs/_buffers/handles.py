"""The buffers and shardings of concrete handles, ours and JAX's own."""

from __future__ import annotations

import jax

from refs import _jax
from refs._indexing.sharded import mesh_sharding
from refs._types import Buffer, RefLike, Sharding
from refs.errors import RefStateError


def is_ours(ref: RefLike) -> bool:
    """True for a handle of ours, False for one of JAX's."""
    return hasattr(ref, "_cell")


def buffer_of(ref: RefLike) -> jax.Array:
    """The array that a concrete handle, ours or JAX's, holds now; for PRNG keys, that of bits."""
    return ref._buffer() if is_ours(ref) else _jax.unwrap_keys(_jax.native_buffer(ref))


def check_native(ref: RefLike) -> None:
    """Refuses a handle of JAX's that has no value.

    Raises:
      ValueError: JAX's own, if the handle has ended.
      RefStateError: if its array was deleted.
    """
    if _jax.native_buffer(ref).is_deleted():
        raise RefStateError(
            "use of a jax.Ref whose value was lost: its array was donated or deleted"
        )


def update_native(ref: RefLike, buffer: Buffer) -> None:
    """Stores `buffer`, which nothing else may hold, in one of JAX's own handles."""
    _jax.set_native_buffer(ref, _jax.wrap_keys(_jax.commit(buffer), ref.dtype))


def sharding_of(ref: RefLike) -> Sharding | None:
    """The sharding of a handle's array over a mesh; None on a single device."""
    return ref._sharding if is_ours(ref) else mesh_sharding(buffer_of(ref).sharding)
