"""Operations on concrete refs outside any trace: one donated, compiled kernel each.

A kernel is compiled for the static part of an index (the skeleton) and called with the rest, so
that a new index of the same kind doesn't recompile. JAX's own jit is the cache of shapes and
dtypes. The indices that most programs use, integers and slices, come here by a short way, which
needs no `Index`; the long one takes all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from refs import _jax, _store
from refs._indexing import Index
from refs._sharded import layout
from refs._values import fit, is_enabled

# ---------------------------------------------------------------------------------------------
# What a handle holds


def is_ours(ref: Any) -> bool:
    """True for a handle of ours, False for one of JAX's."""
    return hasattr(ref, "_store")


def buffer_of(ref: Any) -> jax.Array:
    """The array that a concrete handle, ours or JAX's, holds now: bits, for PRNG keys."""
    return ref._buffer() if is_ours(ref) else _jax.unwrap_keys(ref._refs._buf)


def update_native(ref: Any, buffer: Any) -> None:
    """Makes `buffer`, which nobody else may hold, the array of one of JAX's own handles."""
    ref._refs._buf = _jax.wrap_keys(_jax.commit(buffer), ref.dtype)


def sharding_of(ref: Any) -> Any:
    """How what the handle holds is laid out over a mesh, None without one."""
    return ref._sharding if is_ours(ref) else layout(buffer_of(ref).sharding)


# ---------------------------------------------------------------------------------------------
# The long way: any index


def read(ref: Any, index: Index, out_sharding: Any = None) -> jax.Array:
    """A copy of the indexed part: the handle's own buffer is never given away."""
    skeleton, operands = index.split()
    return _read(ref, reader(skeleton, ref.dtype, out_sharding), operands)


def update(ref: Any, index: Index, method: str, operand: Any) -> None:
    """`ref.at[index].<method>(operand)`; a `set` may be wanted for what it overwrites."""
    skeleton, operands = index.split()
    kernel = updater(ref, method, skeleton)
    if is_ours(ref):
        _store.update(ref, kernel, operands, operand)
    else:
        update_native(ref, kernel(buffer_of(ref), operands, operand))


def swap(ref: Any, index: Index, value: Any) -> jax.Array:
    """Overwrites the indexed part and returns what stood there; nothing comes between."""
    skeleton, operands = index.split()
    kernel, read_kernel = updater(ref, "set", skeleton), reader(skeleton, ref.dtype)
    if is_ours(ref):
        return _store.update(ref, kernel, operands, value, reader=read_kernel)
    old = read_kernel(buffer_of(ref), operands)
    update_native(ref, kernel(buffer_of(ref), operands, value))
    return old


def _read(ref: Any, kernel: Callable[..., jax.Array], operands: Any) -> jax.Array:
    if not is_ours(ref):
        return kernel(buffer_of(ref), operands)
    attempt = 0
    buffer: Any = None
    while True:
        store, index = ref._store, ref._index
        box, looking = store.box, (store.readers,)
        store.readers += (None,)
        try:
            buffer = box[0][index] if box else None
            found = kernel(buffer, operands) if buffer is not None else None
            if found is not None:
                return found
        except (RuntimeError, ValueError) as error:
            if buffer is None or not (_jax.is_about_deleted(error) and buffer.is_deleted()):
                raise
            ref._check()  # If it isn't lost, JAX's own call of another thread has come between.
        finally:
            del store.readers[-1]
            looking = None  # noqa: F841
        attempt = _store.wait(attempt, [ref])


@functools.lru_cache(maxsize=4096)
def reader(skeleton: Index, dtype: Any, out_sharding: Any = None) -> Callable[..., jax.Array]:
    """The kernel that takes a buffer and the rest of an index, and copies the part."""

    def read_kernel(x: jax.Array, operands: list[Any]) -> jax.Array:
        x = _jax.wrap_keys(x, dtype)
        return skeleton.join(operands).read(x, out_sharding)

    if skeleton.is_whole:
        return jax.jit(lambda x, operands: jnp.copy(read_kernel(x, operands)))
    return jax.jit(read_kernel)


def updater(ref: Any, method: str, skeleton: Index) -> Callable[..., jax.Array]:
    """The kernel that takes a ref's buffer, donated, the rest of an index, and an operand.

    Where JAX looks for NaNs it would run it again: then nothing is donated.
    """
    jit, is_donated = not _jax.is_jit_disabled(), not _jax.looks_for_nans()
    return _updater(method, skeleton, sharding_of(ref), ref.dtype, jit, is_donated)


@functools.lru_cache(maxsize=4096)
def _updater(
    method: str, skeleton: Index, sharding: Any, dtype: Any, jit: bool, is_donated: bool
) -> Callable[..., jax.Array]:
    def update_kernel(x: jax.Array, operands: list[Any], value: Any) -> jax.Array:
        old = _jax.wrap_keys(x, dtype)
        return _jax.unwrap_keys(skeleton.join(operands).update(old, method, value))

    def op_by_op(x: jax.Array, operands: list[Any], value: Any) -> jax.Array:
        # It may be the very array that it was given, and lie where the value did.
        new = jnp.copy(update_kernel(x, operands, value))
        return jax.device_put(new, x.sharding) if x.committed else new

    if not jit:
        return op_by_op
    donated = 0 if is_donated else ()
    return jax.jit(update_kernel, donate_argnums=donated, keep_unused=True, out_shardings=sharding)


# ---------------------------------------------------------------------------------------------
# The short way: integers and slices of a ref of ours, on one device, of an ordinary dtype


def try_read(ref: Any, idx: Any) -> jax.Array | None:
    """`ref[idx]`, or None where the long way must be taken."""
    found = _locate(ref, idx)
    if found is None:
        return None
    kinds, operands = found
    return _read(ref, _quick_reader(ref._shape, kinds), operands)


def try_update(ref: Any, idx: Any, method: str, value: Any) -> bool:
    """Writes ("set") or accumulates ("add") `value`; False where the long way must be taken."""
    found = _locate(ref, idx)
    if found is None:
        return False
    kinds, operands = found
    kernel, shape = _quick_updater(method, ref._shape, kinds)
    kind = type(value)
    if kind is _jax.ArrayImpl or kind is np.ndarray:
        if value.dtype != ref._dtype or (value.shape != shape and value.shape != ()):
            return False
        if value.dtype.itemsize > 4 and not is_enabled(value.dtype):
            return False
    elif kind is not float or ref._dtype != np.float32:
        return False
    try:
        _store.update(ref, kernel, operands, value)
    except (RuntimeError, ValueError):
        ref._check()  # says so if the value was lost
        raise
    return True


def _locate(ref: Any, idx: Any) -> tuple[tuple[Any, ...], Any] | None:
    """The kind of the index, an entry for each axis, and its numbers."""
    if not ref._is_plain or _jax.is_jit_disabled() or _jax.looks_for_nans():
        return None
    shape = ref._shape
    entries = idx if type(idx) is tuple else (idx,)
    if len(entries) == 1 and entries[0] is ...:
        return (), ()
    numbers: list[Any] = []
    kinds: list[Any] = []
    if len(entries) > len(shape):
        return None
    for entry, n in zip(entries, shape, strict=False):
        if type(entry) is int:
            if not -n <= entry < n:
                return None
            numbers.append(entry if entry >= 0 else entry + n)
            kinds.append(None)
        elif type(entry) is slice:
            try:
                start, stop, step = entry.indices(n)
            except (TypeError, ValueError):
                return None
            if step <= 0 or stop <= start:
                return None
            size = (stop - start + step - 1) // step
            if size == n:
                kinds.append(0)
            else:
                numbers.append(start)
                kinds.append((size, step))
        elif type(entry) is _jax.ArrayImpl and entry.dtype == np.int32 and n and len(entries) == 1:
            numbers.append(entry)
            kinds.append(("at", entry.shape))
        else:
            return None
    if len(numbers) == 1 and type(numbers[0]) is int:
        numbers = [_small(numbers[0])]
    # Several numbers go to a kernel faster in one array.
    return tuple(kinds), numbers if len(numbers) < 2 else np.array(numbers, np.int32)


# Small integers on the device: to put one there takes longer than a kernel that uses it.
_SMALL: dict[int, Any] = {}


def _small(number: int) -> Any:
    found = _SMALL.get(number)
    if found is None:
        if number >= 4096:
            return number
        found = _SMALL[number] = jnp.asarray(np.int32(number))
    return found


@functools.lru_cache(maxsize=4096)
def skeleton_of(shape: tuple[int, ...], kinds: tuple[Any, ...]) -> Index:
    """The static part of an index: of these kinds, see `_locate`, or of the whole, without any."""

    def like(kind: Any) -> Any:
        match kind:
            case None:
                return 0
            case 0:
                return slice(None)
            case ("at", shape):
                return np.zeros(shape, np.int32)
            case (size, step):
                return slice(0, size * step, step)

    return Index.parse(tuple(map(like, kinds)), shape).split()[0]


@functools.lru_cache(maxsize=4096)
def _quick_reader(shape: tuple[int, ...], kinds: tuple[Any, ...]) -> Callable[..., jax.Array]:
    skeleton = skeleton_of(shape, kinds)

    def read_kernel(x: jax.Array, numbers: Any) -> jax.Array:
        part = skeleton.join(list(numbers)).read(x)
        return jnp.copy(part) if skeleton.is_whole else part

    return jax.jit(read_kernel)


@functools.lru_cache(maxsize=4096)
def _quick_updater(
    method: str, shape: tuple[int, ...], kinds: tuple[Any, ...]
) -> tuple[Callable[..., jax.Array], tuple[int, ...]]:
    skeleton = skeleton_of(shape, kinds)

    def update_kernel(x: jax.Array, numbers: Any, value: Any) -> jax.Array:
        value = fit(value, skeleton.result_shape, x.dtype)
        return skeleton.join(list(numbers)).update(x, method, value)

    return jax.jit(update_kernel, donate_argnums=0, keep_unused=True), skeleton.result_shape
