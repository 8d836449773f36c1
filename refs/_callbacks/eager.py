"""A callback at top level: Python calls it directly, on the memory of the refs' buffers."""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Sequence
from itertools import count, repeat, starmap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from refs import _jax
from refs._buffers.several import exchange_refs
from refs._buffers.signals import deliver, without_interrupts
from refs._buffers.stores import store_of
from refs._callbacks.failure import Failure, raise_failure
from refs._callbacks.plan import Plan
from refs._callbacks.spec import CallbackSpec, keeps_old
from refs._types import Buffer, RefLike, Value


def call_now(spec: CallbackSpec, refs: Sequence[RefLike], operands: Sequence[Value]) -> list[Value]:
    """Calls the callback at top level; returns its results."""
    plan = Plan.of(spec, len(refs))

    def call(held: list[Buffer], _: list[Any]) -> tuple[list[Buffer], list[Value]]:
        old = [*held]
        _renew(held, refs)
        roots = [*map(_memory, held)]
        try:
            results = _run(plan, refs, roots, operands)
        except BaseException:
            for k, ref in enumerate(refs):
                if not store_of(ref).may_donate:
                    held[k] = old[k]
            raise
        for k, root in enumerate(roots):
            if not _is_on_host(held[k]):
                held[k] = jax.device_put(root, held[k].sharding)
        return held, results

    return exchange_refs(refs, [], call, calls_back=True)


def _run(
    plan: Plan, refs: Sequence[RefLike], roots: list[np.ndarray], operands: Sequence[Value]
) -> list[Value]:
    spec = plan.spec
    arrays = [np.asarray(x) for x in operands]
    results = [np.empty(t.shape, t.dtype) for t in spec.results]
    n_bytes = sum(x.nbytes for x in roots)
    copies = [x.copy() for x in roots] if keeps_old(spec.keeps_old, n_bytes) else None
    given = [*roots, *arrays]
    try:
        plan.runner()(given, results)
    except BaseException as error:
        if copies is not None:
            _ = [*map(np.copyto, roots, copies)]
        changed = [] if copies else [ref for ref in refs if store_of(ref).may_donate]
        raise_failure(Failure(error, spec, {}), changed)
    return [jnp.asarray(x) for x in results]


def _renew(held: list[Buffer], refs: Sequence[RefLike]) -> None:
    """Puts arrays into `held` that no running program reads: those of the same memory, if possible.

    Running programs may still read the buffers. A program that they are donated to runs after
    those. With jit disabled there is none, and the buffers of JAX's own handles aren't ours to
    donate: these are copied.
    """
    jit = not _jax.is_jit_disabled()
    renew = [_alone if jit and store_of(ref).may_donate else jnp.copy for ref in refs]
    new = starmap(operator.call, zip(renew, [*held], strict=True))
    _ = [*map(list.__setitem__, repeat(held), count(), new)]
    deliver()  # Signals don't wait for the callback.


_alone = without_interrupts(jax.jit(lambda x: x, donate_argnums=0, keep_unused=True))


def _memory(buffer: Buffer) -> np.ndarray:
    """The memory of a buffer on a CPU, as a writable array; the buffer must stay alive meanwhile.

    A copy, if the buffer is on another device.
    """
    shape, dtype = buffer.shape, buffer.dtype
    if not _is_on_host(buffer):
        return np.array(buffer)
    buffer.block_until_ready()
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * size).from_address(buffer.unsafe_buffer_pointer())
    return np.ndarray(shape, dtype, memory)


def _is_on_host(buffer: Buffer) -> bool:
    [device] = buffer.devices()
    return device.platform == "cpu"
