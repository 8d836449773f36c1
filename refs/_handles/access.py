"""get, set, swap, addupdate and the other in-place updates, of handles and of traced refs alike.

Outside any trace an operation runs at once (`refs._buffers.kernels`). Inside one it becomes JAX's
own ref primitives (`refs._handles.binding`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from refs import _jax
from refs._buffers import kernels, quick
from refs._buffers.handles import sharding_of
from refs._handles.binding import (
    bind_get,
    bind_whole,
    bind_write,
    blamed_error,
    describe,
    is_only_whole,
    sharded,
    tell_of_nan,
)
from refs._indexing.index import Index
from refs._indexing.syntax import Span
from refs._indexing.values import fit, is_enabled
from refs._origin import origin_of
from refs._types import Aval, DType, Indexer, RefLike, Sharding, Value
from refs.errors import RefError, RefEscapeError, RefStateError, RefTypeError


def check_ref(ref: RefLike, doing: str) -> Aval:
    """`ref`'s array type, after a check that it is a ref and that it can be used now."""
    if hasattr(ref, "_cell"):  # A handle of ours, the common case: a fast path.
        ref._check()
        if _jax.trace_state.value is None:
            raise RefStateError(
                f"{doing} of {describe(ref)} by code that interrupted JAX itself, a signal handler "
                "for instance: JAX can't run anything before that has returned. Read the value "
                "with `np.asarray(ref)`, or set a flag and look at it between two steps"
            )
        return ref._aval.inner_aval
    if not isinstance(ref, _jax.NativeRef):
        raise RefTypeError(
            f"{doing} needs a Ref, not a {type(ref).__name__}: make one with `refs.new_ref`"
        )
    if not isinstance(ref, _jax.Tracer):
        _jax.native_buffer(ref)  # raises if the handle has ended
    elif _jax.at_top_level():
        raise escaped(ref, doing)
    aval = jax.typeof(ref).inner_aval
    if aval.is_high:
        raise RefTypeError(
            f"{doing} of {describe(ref)}, one of JAX's own that holds a value of type {aval}: refs "
            "hold arrays. Make a ref of each array that it consists of"
        )
    return aval


def escaped(ref: RefLike, doing: str) -> RefEscapeError:
    """The error about a traced ref that is used when its function has ended."""
    return RefEscapeError(
        f"{doing} of {describe(ref)} outside the traced function that it belongs to: there it "
        "stands for a value that isn't known yet. Return its value, `ref[...]`, or return the ref "
        "itself from `refs.jit`"
    )


class blamed:
    """Adds the ref's name and birthplace to an error raised about an index or a value."""

    def __init__(self, doing: str, ref: RefLike):
        self.doing, self.ref = doing, ref

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, RefError) and not getattr(error, "_is_blamed", False):
            # In no variable: an error and a frame that hold each other would keep the ref alive.
            raise blamed_error(error, f"{self.doing} of {describe(self.ref)}: {error}") from None
        if error is not None:
            tell_of_nan(error, origin_of(jax.typeof(self.ref)))


def get(ref: RefLike, idx: Indexer = None) -> jax.Array:
    """Reads `ref[idx]`.

    Args:
      ref: a ref of any shape, concrete or traced.
      idx: a NumPy index; `None` and `...` mean the whole, as in `jax.ref.get`.

    Returns:
      A new array: later writes to the ref don't change it.

    Raises:
      RefTypeError, RefIndexError: if the ref has no such index.
      RefStateError: if the ref was frozen, freed or lost.

    >>> r = refs.new_ref(jnp.arange(5))
    >>> refs.get(r, slice(1, 3))
    Array([1, 2], dtype=int32)
    """
    idx = ... if idx is None else idx
    if _is_quick(ref) and (value := quick.try_read(ref, idx)) is not None:
        return value
    aval = check_ref(ref, "get")
    with blamed("get", ref):
        index = Index.parse(idx, aval.shape)
        index.check_read()
    return _read(ref, index)


def set(ref: RefLike, idx: Indexer, value: Value) -> None:
    """Writes `ref[idx] = value`.

    Args:
      ref: a ref of any shape, concrete or traced.
      idx: a NumPy index; `None` and `...` mean the whole.
      value: an array or scalar that broadcasts to the indexed shape and whose dtype the ref's
        can hold.

    Raises:
      RefTypeError, RefValueError, RefIndexError: if the value or the index doesn't fit; the ref
        keeps its value.
      RefStateError: if the ref was frozen, freed or lost.

    >>> r = refs.new_ref(jnp.zeros(3))
    >>> refs.set(r, slice(None, None, 2), 7)
    >>> r
    Ref([7., 0., 7.], dtype=float32)
    """
    if _is_quick(ref) and quick.try_update(ref, ... if idx is None else idx, "set", value):
        return
    index, value = _located(ref, idx, value, "set")
    _write(ref, index, value)


def swap(ref: RefLike, idx: Indexer, value: Value) -> jax.Array:
    """Writes `ref[idx] = value` and returns the old value.

    Args, raises: as `set`.

    >>> r = refs.new_ref(jnp.arange(3))
    >>> refs.swap(r, 0, 9)
    Array(0, dtype=int32)
    """
    index, value = _located(ref, idx, value, "swap")
    with blamed("swap", ref):
        index.check_read()
    if not _jax.at_top_level():
        if not is_only_whole(ref, index):
            return index.finish(bind_write(_jax.swap_p, ref, index, value, is_used=True))
        old = _read(ref, index)
        _write(ref, index, value)
        return old
    with sharded(ref, index):
        return kernels.swap(ref, index, value)


def addupdate(ref: RefLike, idx: Indexer, x: Value) -> None:
    """Accumulates `x` into `ref[idx]`; an element that `idx` names twice gets both contributions.

    `ref[idx] += x` reads, adds and writes, as in NumPy: with it, an element named twice gets only
    the last sum.

    Args, raises: as `set`.

    >>> r = refs.new_ref(jnp.zeros(3))
    >>> refs.addupdate(r, jnp.array([0, 0, 2]), 1.0)
    >>> r
    Ref([2., 0., 1.], dtype=float32)
    """
    if _is_quick(ref) and quick.try_update(ref, ... if idx is None else idx, "add", x):
        return
    index, x = _located(ref, idx, x, "addupdate")
    if not _jax.at_top_level():
        bind_write(_jax.addupdate_p, ref, index, x)
        return
    with sharded(ref, index):
        kernels.update(ref, index, "add", x)


def _is_quick(ref: RefLike) -> bool:
    return _jax.trace_state.value is _jax.eval_trace and hasattr(ref, "_cell")


def _check_writable(ref: RefLike, doing: str) -> Aval:
    aval = check_ref(ref, doing)
    if not is_enabled(aval.dtype):
        raise RefTypeError(
            f"{doing} of {describe(ref)}, of dtype {aval.dtype}, where 64-bit types are disabled: "
            "the new value would have 32 bits. Write it as it was made, in "
            "`with jax.enable_x64(True):`"
        )
    return aval


def _located(ref: RefLike, idx: Indexer, value: Value, doing: str) -> tuple[Index, Value]:
    """(the index of a write, its value in the ref's dtype and the index's `result_shape`)."""
    aval = _check_writable(ref, doing)
    with blamed(doing, ref):
        index = Index.parse(... if idx is None else idx, aval.shape)
        return index, _fitted(ref, index, value)


def _fitted(ref: RefLike, index: Index, value: Value) -> Value:
    """The value of a write, in the ref's dtype and the index's `result_shape`."""
    is_divided = index.is_whole and _jax.at_top_level() and sharding_of(ref) is not None
    place = place_of_values(ref) if is_divided else None
    return fit(value, index.result_shape, ref.dtype, place)


def place_of_values(ref: RefLike) -> Sharding:
    """Where values that are written to the whole of a concrete ref are to lie."""
    place = ref.sharding
    # Values are written from the device's memory.
    return place.with_memory_kind("device") if _jax.is_of_host(place) else place


def accumulate(ref: RefLike, idx: Indexer, method: str, operand: Value) -> None:
    """`ref.at[idx].<method>(operand)` for `add`, `multiply`, `min` and `max`."""
    if method == "add":
        addupdate(ref, idx, operand)
    else:
        update(ref, idx, method, operand)


def check_method(dtype: DType, method: str) -> None:
    """Raises if elements of a dtype have no `ref.at[…].<method>`."""
    if jnp.issubdtype(dtype, jnp.bool_) and method in ("subtract", "divide", "power"):
        raise RefTypeError(f"booleans have no {method}: write what you mean, `ref[i] = …`")


def update(ref: RefLike, idx: Indexer, method: str, operand: Value) -> None:
    """`ref.at[idx].<method>(operand)` for all but `set` and `add`."""
    aval = _check_writable(ref, method)
    with blamed(method, ref):
        check_method(aval.dtype, method)
        index = Index.parse(idx, aval.shape)
        if method == "subtract":
            addupdate(ref, index, jnp.negative(_fitted(ref, index, operand)))
            return
        if method != "apply":
            operand = _fitted(ref, index, operand)
            if _jax.at_top_level():
                with sharded(ref, index):
                    kernels.update(ref, index, method, operand)
                return
        # A user's function may read refs, this one too: it runs between a read and a write.
        # Elements named twice are updated twice: this needs the block that the arrays index.
        part, rest = index, Index.parse(..., index.result_shape)
        if is_only_whole(ref, index):
            part, rest = Index.parse(..., index.shape), index
        elif index.has_arrays:
            part, rest = _halves(index)
        with sharded(ref, index):
            new = rest.update(_read(ref, part), method, operand)
    _write(ref, part, new)


def _halves(index: Index) -> tuple[Index, Index]:
    """(the index of the block that the spans name, the index of the rest within the block)."""
    spans = [
        d if isinstance(d, Span) else Span(0, n)
        for d, n in zip(index.dims, index.shape, strict=True)
    ]
    block = Index.of_dims(spans, index.shape)
    rest = [
        Span(0, n) if isinstance(d, Span) else d
        for d, n in zip(index.dims, block.taken_shape, strict=True)
    ]
    return block, index._replace(shape=block.taken_shape, dims=tuple(rest))


def get_sharded(
    ref: RefLike, idx: Indexer, out_sharding: jax.sharding.PartitionSpec | Sharding
) -> jax.Array:
    """Reads `ref[idx]`, sharded over an explicit mesh as `out_sharding`."""
    aval = check_ref(ref, "get")
    with blamed("get", ref):
        index = Index.parse(idx, aval.shape)
        index.check_read()
    if not _jax.is_on_explicit_mesh(ref):
        return jax.sharding.reshard(_read(ref, index), out_sharding)
    if _jax.at_top_level():
        return kernels.read(ref, index, out_sharding)
    return index.read(bind_whole(_jax.get_p, ref), out_sharding)


def _read(ref: RefLike, index: Index) -> Value:
    if not _jax.at_top_level():
        return index.finish(bind_get(ref, index))
    with sharded(ref, index):
        return kernels.read(ref, index)


def _write(ref: RefLike, index: Index, value: Value) -> None:
    if not _jax.at_top_level():
        bind_write(_jax.swap_p, ref, index, value)
        return
    with sharded(ref, index):
        kernels.update(ref, index, "set", value)
