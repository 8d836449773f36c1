"""Operations on refs in a trace: JAX's own primitives, so that every trace gets the same ones.

What one of them can't express, others do, or it is an error that names the user's ref.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from refs import _jax
from refs._indexing.index import Index
from refs._indexing.sharded import sharded_as_part
from refs._indexing.syntax import Span
from refs._origin import origin_of, user_site
from refs._types import Indexer, Primitive, RefLike, Value
from refs.errors import RefError, RefValueError


def describe(ref: RefLike) -> str:
    """The ref's name and birthplace, for messages."""
    return origin_of(jax.typeof(ref)).describe()


def bind_get(ref: RefLike, index: Index) -> Value:
    """Reads `index.dims` of a traced ref: a value of shape `index.taken_shape`."""
    if is_only_whole(ref, index):
        with sharded(ref, index):
            return _plain(index).read(bind_whole(_jax.get_p, ref))
    return _bind(_jax.get_p, ref, index)


def is_only_whole(ref: RefLike, index: Index) -> bool:
    """True if JAX's ref primitives refuse an index that arrays accept: see `bind_whole`."""
    if index.has_symbolic_part or index.has_long_place:
        return True
    if not _jax.is_on_explicit_mesh(ref):
        return False
    aval = jax.typeof(ref).inner_aval
    if not _jax.has_explicit_sharding(aval):
        return any(_is_sharded(d) for d in index.dims)
    return not all(
        isinstance(d, Span) and (axis is None or d.covers(n))
        for d, n, axis in zip(index.dims, index.shape, aval.sharding.spec.partitions, strict=True)
    )


def _is_sharded(dim: Span | Value) -> bool:
    return isinstance(dim, jax.Array) and _jax.has_explicit_sharding(jax.typeof(dim))


def bind_whole(primitive: Primitive, ref: RefLike, *value: Value) -> Value:
    """Reads or writes all of a ref that is sharded over an explicit mesh.

    The index is then applied to an array: it may name single elements on axes that aren't sharded.
    """
    return _bind(primitive, ref, Index.parse(..., ref.shape), *value)


def explain(error: BaseException, ref: RefLike, idx: Indexer) -> None:
    """Says more about an error of JAX's in the use of a ref: a note, or an error of its own.

    Raises:
      RefValueError: if `error` is about a part of a ref over an explicit mesh.
    """
    if isinstance(error, FloatingPointError):
        error.add_note(
            f"{describe(ref)}, used at {user_site()}: the value is written or read there"
        )
    if isinstance(error, RefError) or _jax.what_is_said(error) != "sharding":
        return
    if not _jax.is_on_explicit_mesh(ref) or Index.parse(idx, ref.shape).is_whole:
        return
    told = RefValueError(
        f"a part of {describe(ref)} at {user_site()}: how it is sharded over the explicit mesh "
        "doesn't follow from its index and from the ref's own sharding, "
        f"{jax.typeof(ref).inner_aval.sharding.spec}. Say it, "
        "`ref.at[i].get(out_sharding=jax.P(…))`; or index the axes that aren't sharded, use the "
        "whole value, `ref[...]`, or the parts in `refs.shard_map`"
    )
    told._is_blamed = True  # type: ignore[attr-defined]
    raise told from error


class sharded:
    """Explains JAX's errors about an index of a ref that is sharded over an explicit mesh."""

    def __init__(self, ref: RefLike, index: Index):
        self.ref, self.index = ref, index

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            explain(error, self.ref, self.index)


def _plain(index: Index) -> Index:
    """Only `dims` of an index, as of JAX's indexer: the callers finish or unfinish the value."""
    return Index.of_dims(index.dims, index.shape)


# What else to write, where devices would write a ref that is the same on all of them.
OR_EACH_ITS_OWN = (
    "or pass the ref with a spec that names the axis; if it is made here, make it of a value that "
    "varies (`jax.lax.pcast`)"
)


def bind_write(
    primitive: Primitive, ref: RefLike, index: Index, value: Value, is_used: bool = False
) -> Value:
    """Writes a value of shape `index.result_shape`; returns the result of the primitive.

    `is_used`: whether the caller uses the result, which is the old value.
    """
    value = _jax.vary_as(index.unfinish(value), ref)
    if axes := _jax.axes_beyond(value, ref):
        raise RefValueError(
            f"write of a value that varies over mesh axis {axes} to {describe(ref)} at "
            f"{user_site()}: what that holds is the same on every device. Reduce the value first "
            f"(`jax.lax.psum(value, {axes})`), {OR_EACH_ITS_OWN}"
        )
    # JAX's `addupdate` requires exactly the ref's sharding; a ref without a mesh has none.
    is_added = primitive is _jax.addupdate_p
    is_refused = is_added and _jax.is_on_explicit_mesh(value) and not _jax.is_on_explicit_mesh(ref)
    is_lost = is_added and _is_lost_by_jax(ref, index)
    if is_only_whole(ref, index) or is_refused or (is_lost and index.has_arrays):
        with sharded(ref, index):
            whole, plain = bind_whole(_jax.get_p, ref), _plain(index)
            method = "add" if is_added else "set"
            return bind_whole(_jax.swap_p, ref, plain.update(whole, method, value))
    value = sharded_as_part(value, ref)
    if is_lost:
        primitive, value = _jax.swap_p, jnp.add(_bind(_jax.get_p, ref, index), value)
    return _bind(primitive, ref, index, value, is_used=is_used)


def _is_lost_by_jax(ref: RefLike, index: Index) -> bool:
    """Whether JAX's derivatives fail at an `addupdate`, though not at a get, a sum and a swap.

    They do where the ref has no tangent: integers have none, nor has a ref from outside. If the
    operation is only staged, nobody knows who will differentiate it; then what can't be a sum of
    one part, since an element may be named twice, stays an `addupdate`, and so do flags, to which
    lanes may add and of which they may take the maximum.
    """
    has_tangent = jnp.issubdtype(ref.dtype, jnp.inexact)
    if _jax.is_differentiating():
        is_own = isinstance(ref, _jax.Tracer) and _jax.trace_of(ref) is _jax.current_trace()
        return not (has_tangent and is_own)
    return not (has_tangent or index.has_arrays or ref.dtype == bool)


def _bind(
    primitive: Primitive, ref: RefLike, index: Index, *value: Value, is_used: bool = True
) -> Value:
    """The result of a primitive; `is_used` says whether the caller uses it."""
    leaves, tree = jax.tree.flatten(() if index.is_whole else (index.indexer(),))
    trace = _jax.current_trace()
    if hasattr(trace, "access"):  # one of ours
        return trace.access(primitive, (ref, *value, *leaves), {"tree": tree}, is_used)
    ref = _jax.passed_on(ref)
    try:
        return primitive.bind(ref, *value, *leaves, tree=tree)
    except Exception as error:
        message = _REFUSED_BY_JAX.get(_jax.what_is_said(error))
        if message is None:
            raise
        raise RefValueError(message.format(ref=describe(ref), site=user_site())) from error


# JAX's errors about refs (see `_jax.words`) -> our messages.
_REFUSED_BY_JAX: dict[str | None, str] = {
    "a differentiated value": (
        "write of a differentiated value to {ref} at {site}: JAX's own derivatives don't follow it "
        "into a ref from outside. Use `refs.grad` (or `refs.vjp`, `refs.jvp`, `refs.linearize`)"
    ),
    "a mapped value": (
        "write of a value of each lane's own to {ref} at {site}: `jax.vmap` doesn't map what it "
        "does to a ref from outside. Use `refs.vmap`, or `refs.map` for `jax.lax.map` in batches"
    ),
}
