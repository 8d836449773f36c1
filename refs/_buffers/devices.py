"""The error for refs and arrays that lie on different devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from refs import _jax
from refs._buffers.stores import store_of
from refs._origin import origin_of
from refs._types import Buffer, RefLike
from refs.errors import RefValueError


def check_devices(doing: str, ref: RefLike, buffer: Buffer, operands: Any) -> None:
    """Refuses arrays that somebody has put on other devices than those of a ref's buffer.

    Raises:
      RefValueError: if there is one in the pytree `operands`.
    """
    found = _by_devices([(ref, buffer)], operands) if buffer.committed else {}
    if len(found) > 1:
        raise _error(doing, found)


@contextmanager
def devices_told(doing: str, refs: Sequence[RefLike], leaves: Sequence[Any] = ()) -> Iterator[None]:
    """If JAX refuses a program for its devices, the error says where refs and arrays lie."""
    try:
        yield
    except ValueError as error:
        if _jax.what_is_said(error) != "incompatible devices":
            raise
        concrete = [ref for ref in refs if not isinstance(ref, _jax.Tracer)]
        buffers = [(ref, store_of(ref).cell[0]) for ref in concrete]
        if not buffers:
            raise
        arrays = [x for x in leaves if isinstance(x, _jax.ArrayImpl)]
        raise _error(doing, _by_devices(buffers, arrays)) from error


def _by_devices(
    refs: Sequence[tuple[RefLike, Buffer]], operands: Any
) -> dict[frozenset[Any], tuple[str, Buffer]]:
    """For each set of devices: what lies on it, for messages, of refs and placed arrays."""
    found: dict[frozenset[Any], tuple[str, Buffer]] = {}
    for ref, buffer in refs:
        described = origin_of(jax.typeof(ref)).describe()
        found.setdefault(frozenset(buffer.sharding.device_set), (described, buffer))
    known = refs[0][1].sharding
    for x in jax.tree.leaves(operands):
        # Equal shardings are common, and sets of a thousand devices take long to compare.
        if getattr(x, "committed", False) and x.sharding != known:
            devices = frozenset(x.sharding.device_set)
            found.setdefault(devices, (f"an array of shape {x.shape}", x))
    return found


def _error(doing: str, found: dict[frozenset[Any], tuple[str, Buffer]]) -> RefValueError:
    lie = [f"{what} lies on {_devices(x)}" for what, x in found.values()]
    return RefValueError(
        f"{doing} takes refs and arrays that lie on different devices: {'; '.join(lie)}. Move what "
        "is to go with the rest: a ref by `refs.reshard(ref, sharding)`, an array by "
        "`jax.device_put(x, sharding)`. On all devices of a mesh it has the sharding "
        "`jax.NamedSharding(mesh, jax.P())`. Refs of a pack, and of JAX's own, are made there"
    )


def _devices(x: Buffer) -> str:
    """The device of an array, or, if there are several, their number and its sharding."""
    devices = x.sharding.device_set
    return str(*devices) if len(devices) == 1 else f"{len(devices)} devices ({x.sharding})"
