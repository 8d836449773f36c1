"""`refs.freeze` and `refs.free_ref`, which end refs."""

from __future__ import annotations

import jax

from refs import _jax
from refs._buffers import operations
from refs._handles import access
from refs._handles.ref import Ref
from refs._origin import user_site
from refs._types import RefLike
from refs.errors import RefStateError


def freeze(ref: RefLike) -> jax.Array:
    """Ends a ref and returns its value, without a copy.

    Raises:
      RefStateError: if the ref has ended already, or outlives the trace in which it is frozen.

    >>> r = refs.new_ref(jnp.arange(2))
    >>> refs.freeze(r)
    Array([0, 1], dtype=int32)
    >>> r[...]
    Traceback (most recent call last):
    refs.errors.RefStateError: use of a ref (created at ...), which was frozen at ...
    """
    access.check_ref(ref, "freeze")
    if isinstance(ref, _jax.Tracer):
        return jax.freeze(ref)  # type: ignore[arg-type]
    _check_not_tracing(ref, "freeze")
    return _end(ref, "was frozen") if isinstance(ref, Ref) else jax.freeze(ref)


def free_ref(ref: RefLike) -> None:
    """Ends a ref and frees its memory.

    Raises:
      RefStateError: if the ref has ended already, or outlives the trace in which it is freed.
    """
    access.check_ref(ref, "free_ref")
    if isinstance(ref, _jax.Tracer):
        jax.free_ref(ref)  # type: ignore[arg-type]
        return
    _check_not_tracing(ref, "free_ref")
    buffer = _end(ref, "was freed") if isinstance(ref, Ref) else _jax.native_buffer(ref)
    if buffer.is_deleted():
        raise RefStateError(f"free_ref of {access.describe(ref)}, which has ended already")
    buffer.delete()


def _check_not_tracing(ref: RefLike, doing: str) -> None:
    if not _jax.at_top_level():
        raise RefStateError(
            f"{doing} of {access.describe(ref)} inside a traced function, which would end it "
            f"once, when tracing, and not in each call: {doing} it outside, or read `ref[...]`"
        )


def _end(ref: Ref, how: str) -> jax.Array:
    site = user_site()
    return operations.end(ref, f"{how} at {site}" if site else how)
