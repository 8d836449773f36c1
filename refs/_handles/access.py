"""get, set, swap, addupdate and the other in-place updates, of handles and of traced refs alike.

Outside any trace an operation runs at once (`refs._buffers.operations`). Inside one it becomes
JAX's own ref primitives (`refs._handles.binding`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from refs import _jax
from refs._buffers import operations
from refs._buffers.stores import store_of
from refs._handles.binding import (
    bind_get,
    bind_whole,
    bind_write,
    describe,
    explain,
    is_only_whole,
    sharded,
)
from refs._indexing.index import Index
from refs._indexing.syntax import Span
from refs._indexing.values import check_enabled, fit
from refs._origin import blamed
from refs._types import Aval, DType, Indexer, RefLike, Sharding, Value
from refs.errors import RefError, RefEscapeError, RefStateError, RefTypeError


def check_ref(ref: RefLike, doing: str) -> Aval:
    """`ref`'s array type, after a check that it is a ref and that it can be used now."""
    if hasattr(ref, "_store"):  # A handle of ours, the common case: a fast path.
        ref._check()
        if _jax.trace_state.value is None:
            raise RefStateError(
                f"{doing} of {describe(ref)} by code that interrupted JAX itself, a signal handler "
                "for instance: JAX can't run anything before that has returned. Read the value "
                "with `np.asarray(ref)`, or set a flag and look at it between two steps"
            )
        return ref._aval.inner_aval
    if not isinstance(ref, _jax.NativeRef):
        if isinstance(of := getattr(ref, "ref", None), _jax.NativeRef):
            raise RefTypeError(
                f"{doing} of a part of {describe(of)}: a view has methods for it, "
                f"`view.{doing}(…)`, or `view.at[i]` for a part of the part"
            )
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


class blames:
    """Adds the ref's name and birthplace to an error raised about an index or a value."""

    def __init__(self, doing: str, ref: RefLike):
        self.doing, self.ref = doing, ref

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, RefError):
            # In no variable: an error and a frame that hold each other would keep the ref alive.
            raise blamed(error, self.doing, jax.typeof(self.ref)) from None


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
    if _runs_now(ref, "get"):
        try:
            return operations.read(ref, store_of(ref), idx)
        except Exception as error:
            explain(error, ref, idx)
            raise
    with blames("get", ref):
        index = Index.parse(idx, ref.shape)
        index.check_read()
    return index.finish(bind_get(ref, index))


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
    if _runs_now(ref, "set"):
        _update_now(ref, idx, "set", value)
    else:
        bind_write(_jax.swap_p, ref, *_located(ref, idx, value, "set"))


def swap(ref: RefLike, idx: Indexer, value: Value) -> jax.Array:
    """Writes `ref[idx] = value` and returns the old value.

    Args, raises: as `set`.

    >>> r = refs.new_ref(jnp.arange(3))
    >>> refs.swap(r, 0, 9)
    Array(0, dtype=int32)
    """
    if _runs_now(ref, "swap"):
        return _update_now(ref, idx, "swap", value)
    index, value = _located(ref, idx, value, "swap")
    with blames("swap", ref):
        index.check_read()
    if not is_only_whole(ref, index):
        return index.finish(bind_write(_jax.swap_p, ref, index, value, is_used=True))
    old = index.finish(bind_get(ref, index))
    bind_write(_jax.swap_p, ref, index, value)
    return old


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
    if _runs_now(ref, "addupdate"):
        _update_now(ref, idx, "add", x)
    else:
        bind_write(_jax.addupdate_p, ref, *_located(ref, idx, x, "addupdate"))


def _runs_now(ref: RefLike, doing: str) -> bool:
    """Whether an operation runs at once, after a check that the ref can be used now."""
    if _jax.trace_state.value is _jax.eval_trace and hasattr(ref, "_store"):
        return True  # The operation itself finds out whether it can.
    check_ref(ref, doing)
    return _jax.at_top_level()


def _update_now(ref: RefLike, idx: Indexer, method: str, value: Value) -> Any:
    try:
        return operations.update(ref, store_of(ref), ... if idx is None else idx, method, value)
    except Exception as error:
        explain(error, ref, ... if idx is None else idx)
        raise


def _located(ref: RefLike, idx: Indexer, value: Value, doing: str) -> tuple[Index, Value]:
    """(the index of a traced write, its value in the ref's dtype and the index's shape)."""
    with blames(doing, ref):
        check_enabled(ref.dtype)
        index = Index.parse(... if idx is None else idx, ref.shape)
        return index, fit(value, index.result_shape, ref.dtype)


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
    runs_now = _runs_now(ref, method)
    with blames(method, ref):
        check_method(ref.dtype, method)
        if runs_now and method != "apply":
            _update_now(ref, idx, method, operand)
            return
        if method == "subtract":
            index = Index.parse(idx, ref.shape)
            addupdate(ref, index, jnp.negative(fit(operand, index.result_shape, ref.dtype)))
            return
        check_enabled(ref.dtype)
        index = Index.parse(idx, ref.shape)
        if method != "apply":
            operand = fit(operand, index.result_shape, ref.dtype)
        # A user's function may read refs, this one too: it runs between a read and a write.
        # Elements named twice are updated twice: this needs the block that the arrays index.
        part, rest = index, Index.parse(..., index.result_shape)
        if is_only_whole(ref, index):
            part, rest = Index.parse(..., index.shape), index
        elif index.has_arrays:
            part, rest = _halves(index)
        with sharded(ref, index):
            new = rest.update(get(ref, part), method, operand)
    set(ref, part, new)


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
    if not _jax.is_on_explicit_mesh(ref):
        return jax.sharding.reshard(get(ref, idx), out_sharding)
    if _runs_now(ref, "get"):
        return operations.read(ref, store_of(ref), idx, out_sharding)
    with blames("get", ref):
        index = Index.parse(idx, ref.shape)
        index.check_read()
    return index.read(bind_whole(_jax.get_p, ref), out_sharding)
