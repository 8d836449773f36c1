"""The errors for refs that are used with arrays on other devices."""

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


def check_devices(ref: RefLike, buffer: Buffer, operands: Any) -> None:
    """Refuses arrays that somebody has put on other devices than those of a ref's buffer.

    Raises:
      RefValueError: if there is one among the leaves of `operands`.
    """
    for x in jax.tree.leaves(operands) if buffer.committed else ():
        # Equal shardings are common, and sets of a thousand devices take long to compare.
        if not getattr(x, "committed", False) or x.sharding == buffer.sharding:
            continue
        if x.sharding.device_set != buffer.sharding.device_set:
            raise RefValueError(
                f"use of {_described(ref)}, which lies on {_devices(buffer)}, with an array that "
                f"lies on {_devices(x)}. Move the array there, `jax.device_put(x, ref.sharding)`, "
                "or the ref to where the array is, `refs.reshard(ref, sharding)`"
            )


@contextmanager
def devices_told(doing: str, refs: Sequence[RefLike], leaves: Sequence[Any] = ()) -> Iterator[None]:
    """If JAX refuses a program for its devices, the error says where refs and arrays lie."""
    try:
        yield
    except ValueError as error:
        if _jax.what_is_said(error) != "incompatible devices":
            raise
        ours = [r for r in refs if store_of(r).may_donate and not store_of(r).is_shared]
        if not ours:
            raise
        places: dict[frozenset[Any], RefLike] = {}
        for ref in ours:
            places.setdefault(frozenset(ref.sharding.device_set), ref)
        said = [f"{_described(ref)} lies on {_devices(ref)}" for ref in places.values()]
        arrays = [x for x in leaves if isinstance(x, _jax.ArrayImpl) and x.committed]
        others = [x for x in arrays if frozenset(x.sharding.device_set) not in places]
        if others:
            said.append(f"an array of shape {others[0].shape} lies on {_devices(others[0])}")
        raise RefValueError(
            f"{doing} takes refs and arrays that lie on different devices: {'; '.join(said)}. "
            "Move what is to go with the rest: a ref by `refs.reshard(ref, sharding)`, an array by "
            "`jax.device_put(x, sharding)`. On all devices of a mesh it has the sharding "
            "`jax.NamedSharding(mesh, jax.P())`"
        ) from error


def _described(ref: RefLike) -> str:
    return origin_of(jax.typeof(ref)).describe()


def _devices(x: jax.Array | RefLike) -> str:
    """The device of an array or ref, or, if there are several, their number and its sharding."""
    devices = x.sharding.device_set
    return str(*devices) if len(devices) == 1 else f"{len(devices)} devices ({x.sharding})"
