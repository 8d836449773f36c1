"""The error for refs on a single device that are used with arrays on several devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from refs import _jax
from refs._buffers.handles import is_ours
from refs._handles.access import describe
from refs._types import RefLike
from refs.errors import RefValueError


@contextmanager
def devices_told(doing: str, refs: Sequence[RefLike]) -> Iterator[None]:
    """If JAX refuses a program for its devices, the error names the refs on a single device."""
    try:
        yield
    except ValueError as error:
        single = [describe(r) for r in refs if is_ours(r) and r._sharding is None]
        if not single or _jax.what_is_said(error) != "incompatible devices":
            raise
        raise RefValueError(
            f"{doing}: {', '.join(single)}: on a single device, and used with what lies on "
            "several. Make it under `jax.set_mesh(mesh)`, or of an array that is there already, "
            "`refs.new_ref(jax.device_put(value, jax.NamedSharding(mesh, jax.P())))`"
        ) from error
