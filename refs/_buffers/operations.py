"""Operations on concrete refs outside of any trace: each runs one kernel on the buffer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import jax
import numpy as np

from refs import _jax
from refs._buffers.devices import check_devices
from refs._buffers.exchange import Busy, call_reading, exchange, exchange_one
from refs._buffers.stores import Store, check_usable, store_of
from refs._buffers.waiting import current_buffer, patiently
from refs._indexing.locate import locate
from refs._indexing.values import check_enabled
from refs._origin import blamed
from refs._types import Buffer, Indexer, RefLike, Value
from refs.errors import RefError


def read(ref: RefLike, store: Store, idx: Indexer, out_sharding: Any = None) -> jax.Array:
    """A copy of the indexed part: the ref's own buffer is never given away.

    Raises:
      RefError: if the ref has no such index, or no value.
    """
    kernels = store.kernels
    try:
        key, operands = locate(kernels.shape, idx, True, kernels.is_simple)
    except RefError as error:
        raise _blamed(error, "get", ref) from None
    kernel = kernels.reader(key, out_sharding)
    given = operands if store.at is None else (_place(ref, store), operands)
    try:
        try:
            return call_reading(store.cell, kernel, given)
        except Busy:
            return patiently(partial(call_reading, store.cell, kernel, given), read=[ref])
    except (RuntimeError, ValueError) as error:
        check_devices("read", ref, buffer_of(ref), operands)  # or the ref's value was lost
        if not _is_of_a_mesh(error):
            raise
        with jax.set_mesh(None):
            return read(ref, store, idx, out_sharding)


def update(ref: RefLike, store: Store, idx: Indexer, method: str, value: Value) -> Any:
    """`ref.at[idx].<method>(value)`; of a "swap", the result is the old part.

    Raises:
      RefError: if the value or the index doesn't fit, or the ref has no value. It keeps its value.
    """
    kernels = store.kernels
    try:
        if kernels.is_wide:
            check_enabled(kernels.dtype)
        key, operands = locate(kernels.shape, idx, method == "swap", kernels.is_simple)
        found = kernels.updaters[method].get(key) if _jax.runs_compiled() else None
        run, shape = found or kernels.updater(key, method)
        is_array = type(value) is _jax.ArrayImpl
        if not (is_array and value.shape == shape and value.dtype == kernels.dtype):
            value = kernels.prepared(value, shape) if method != "apply" else value
    except RefError as error:
        raise _blamed(error, "addupdate" if method == "add" else method, ref) from None
    given = operands if store.at is None else (_place(ref, store), operands)
    try:
        try:
            old = exchange_one(store.cell, run, given, value)
        except Busy:
            # No lambda: what it closes over would take longer in each call.
            old = patiently(partial(exchange_one, store.cell, run, given, value), [ref])
    except (RuntimeError, ValueError) as error:
        check_devices("write", ref, buffer_of(ref), (operands, value))  # as in `read`
        if not _is_of_a_mesh(error):
            raise
        with jax.set_mesh(None):
            return update(ref, store, idx, method, value)
    if not store.may_donate:
        store.settle()
    return None if old is None else _jax.wrap_keys(old, kernels.dtype)


def _blamed(error: RefError, doing: str, ref: RefLike) -> RefError:
    check_usable(ref)  # It comes first that the ref has ended.
    return blamed(error, doing, jax.typeof(ref))


def _is_of_a_mesh(error: Exception) -> bool:
    """Whether JAX has refused a kernel because a mesh is set, of which the ref lies outside."""
    is_about_devices = _jax.what_is_said(error) == "incompatible devices"
    return is_about_devices and not jax.sharding.get_mesh().empty


def with_buffer(ref: RefLike, call: Callable[..., Any], operand: Any = None) -> Any:
    """`call(buffer, operand)` on the array in a ref's cell, which stays there.

    Raises:
      RefStateError: if the ref has ended, or its value was lost.
    """
    check_usable(ref)
    return patiently(partial(call_reading, store_of(ref).cell, call, operand), read=[ref])


def buffer_of(ref: RefLike) -> Buffer:
    """The array in a ref's cell, for PRNG keys that of bits; the next write may delete it."""
    while True:
        buffer = current_buffer(ref)
        if not isinstance(buffer, jax.Array) or not buffer.is_deleted():
            return buffer
        check_usable(ref)  # If it isn't lost, another thread has written meanwhile.


def bits_of(ref: RefLike) -> np.ndarray:
    """The value of a ref of ours as an array of NumPy's, of the bits of keys.

    JAX takes no part in it: when a signal handler reads, JAX itself may have been interrupted.
    """
    # A copy: on some versions a view cached in the array blocks the next donation.
    buffer = with_buffer(ref, lambda buffer, _: np.array(buffer))
    return ref._store.lens.in_numpy(buffer, ref._store.start)


def array_for_jax(ref: RefLike, is_read: bool = False) -> jax.Array:
    """The array of a ref of ours that JAX looks up: the current one; of a packed ref a copy.

    `is_read`: whether its value is needed. JAX also looks up the array that it has donated, to give
    the ref another one.
    """
    buffer = buffer_of(ref) if is_read else current_buffer(ref)
    store: Store = ref._store
    if not isinstance(buffer, jax.Array):
        return jax.ShapeDtypeStruct(ref.shape, ref.dtype, sharding=buffer.sharding)  # type: ignore[return-value]
    if not store.is_shared:
        with _jax.set_current_trace(_jax.eval_trace):  # It is no operation of a trace.
            return _jax.wrap_keys(buffer, ref.dtype)
    copy: Any = with_buffer(ref, lambda buffer, _: store.bits(buffer))
    # JAX calls it when it has run a program that wrote the ref.
    copy._replace_with = lambda new: update(ref, store, ..., "set", new)
    return copy


def end(ref: RefLike, how: str) -> jax.Array:
    """Takes a ref's value away for good and returns it. Later uses raise errors that say `how`."""
    store: Store = ref._store

    def take_away(held: list[Buffer]) -> tuple[list[Buffer], Buffer]:
        if store.packed is not None:  # The others of its pack keep the buffer.
            bits = store.bits(held[0])
            object.__setattr__(ref, "_end", how)
            store.packed.pack.n_ended += 1
            return held, bits
        buffer = held[0]
        # One step in C: no interrupt sees a ref that has ended and still has its buffer.
        changes = (
            map(object.__setattr__, (ref,), ("_end",), (how,)),
            map(list.clear, (held,)),
        )
        _ = [*chain.from_iterable(changes)]
        return held, buffer

    found = patiently(lambda: exchange([store.cell], take_away), [ref])
    return _jax.wrap_keys(found, ref._dtype)


def _place(ref: RefLike, store: Store) -> jax.Array:
    """Where the value of a packed ref begins. Raises a RefStateError if the ref has ended."""
    if ref._end is not None:  # Its cell isn't empty: the others of the pack go on using it.
        ref._check()
    return store.at
