"""Complete NumPy indexing, in two steps.

`parse` turns any index expression into an `Index`: one entry for each dimension of the indexed
array, of the kinds that JAX's ref primitives take (integers, integer arrays, spans with a positive
step), and the operations on the value that these lack: reverse, transpose, insert axes. An `Index`
then reads, overwrites or accumulates into an array *value*; handles, traced refs and discharge
all use it, so that an index means the same everywhere.

    >>> Index.parse((None, slice(None, None, -2), 0), (5, 3)).result_shape
    (1, 3)

Out-of-bounds indices follow `jax.numpy`: a read clamps, a write is dropped. A Python integer that
is out of bounds is an error, as in NumPy.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from refs import _jax
from refs._indexing.blocks import block_of
from refs._indexing.places import are_distinct, is_constant, is_inside, is_static, shared
from refs._indexing.sharded import automatically, sharded_as
from refs._indexing.syntax import (
    BRACKETS,
    Bounds,
    InBounds,
    NewAxis,
    Reversed,
    Span,
    bounded,
    expand,
    is_array,
)
from refs._indexing.updates import UPDATES, scatter
from refs._indexing.values import fit
from refs._types import Indexer, Value
from refs.errors import RefIndexError


class Index(NamedTuple):
    """An index expression made explicit for an array of shape `shape`.

    `dims` has a Span, an integer or an integer array for each dimension. Applying `dims` as
    `jax.ref` does gives a value of shape `taken_shape`; reversing the axes `flip` of it,
    transposing by `perm` and reshaping to `result_shape` gives NumPy's result.
    """

    shape: tuple[int, ...]
    dims: tuple[Any, ...]
    taken_shape: tuple[int, ...]
    flip: tuple[int, ...]
    perm: tuple[int, ...]
    result_shape: tuple[int, ...]

    # -- making ---------------------------------------------------------------------------------

    @staticmethod
    def parse(idx: Indexer, shape: Sequence[int], bounds: Bounds = BRACKETS) -> Index:
        if isinstance(idx, Index):
            return idx
        shape = tuple(shape)
        if idx is ... or (type(idx) is tuple and len(idx) == 1 and idx[0] is ...):
            return _whole(shape)
        entries = expand(idx, shape)
        dims = bounded([e for e in entries if not isinstance(e, NewAxis)], shape, bounds)
        located = iter(dims)
        entries = [e if isinstance(e, NewAxis) else next(located) for e in entries]
        with_arrays = any(is_array(d) for d in dims)
        int_shape = _int_shape(dims)
        taken_shape, int_axes = indexed_shape(dims, int_shape)
        flip = tuple(
            axis
            for axis, span in zip(
                [a for a in range(len(taken_shape)) if a not in int_axes],
                [d for d in dims if isinstance(d, Reversed | Span)],
                strict=True,
            )
            if isinstance(span, Reversed)
        )
        dims = tuple(d.span if isinstance(d, Reversed) else d for d in dims)

        # NumPy puts the axes of integer arrays in the place of the first one, or in front if other
        # entries separate them. `None` is such an entry, too, and isn't in `dims`.
        advanced = [
            k
            for k, e in enumerate(entries)
            if with_arrays and not isinstance(e, NewAxis | Span | Reversed)
        ]
        are_adjacent = not advanced or advanced == list(range(advanced[0], advanced[-1] + 1))
        sizes: list[int] = []
        axes: list[int] = []
        basic_axes = iter(a for a in range(len(taken_shape)) if a not in int_axes)
        if not are_adjacent:
            sizes += int_shape
            axes += int_axes
        for k, entry in enumerate(entries):
            if isinstance(entry, NewAxis):
                sizes += [1] * entry.count
            elif isinstance(entry, Span | Reversed):
                axes.append(next(basic_axes))
                sizes.append(taken_shape[axes[-1]])
            elif are_adjacent and advanced and k == advanced[0]:
                sizes += int_shape
                axes += int_axes
        return Index(shape, dims, taken_shape, flip, tuple(axes), tuple(sizes))

    @staticmethod
    def of_dims(dims: Sequence[Span | Value], shape: Sequence[int]) -> Index:
        """The index that consists of `dims` only, as JAX's own indexer does."""
        taken_shape, _ = indexed_shape(tuple(dims), _int_shape(dims))
        return Index(
            tuple(shape), tuple(dims), taken_shape, (), tuple(range(len(taken_shape))), taken_shape
        )

    @property
    def int_shape(self) -> tuple[int, ...]:
        """The shape that the integer arrays broadcast to."""
        return _int_shape(self.dims)

    @property
    def int_axes(self) -> tuple[int, ...]:
        """The axes of the taken value that come from integer arrays."""
        return indexed_shape(self.dims, self.int_shape)[1]

    @property
    def axes(self) -> list[int | None]:
        """For each axis of the result, the axis of the taken value, or None for a new axis."""
        found: list[int | None] = []
        rest = list(self.perm)
        for size in self.result_shape:
            is_new = not rest or self.taken_shape[rest[0]] != size
            found.append(None if is_new else rest.pop(0))
        return found

    @property
    def has_symbolic_part(self) -> bool:
        """Whether index arrays, or a slice of a part of an axis, have a size that is a symbol."""
        return any(
            not is_static(d.size) and not d.covers(n)
            for d, n in zip(self.dims, self.shape, strict=True)
            if isinstance(d, Span)
        ) or not all(map(is_static, self.int_shape))

    @property
    def has_long_place(self) -> bool:
        """Whether it has an integer of more than 31 bits, for which there may be no dtype."""
        return any(map(is_long, self.dims))

    @property
    def is_whole(self) -> bool:
        """True for `...`: the value is the array itself."""
        return self.is_plain and all(
            isinstance(d, Span) and d.covers(n) for d, n in zip(self.dims, self.shape, strict=True)
        )

    @property
    def is_plain(self) -> bool:
        """True when `dims` alone give NumPy's result."""
        return not self.flip and self.taken_shape == self.result_shape and self._in_order

    @property
    def _in_order(self) -> bool:
        return self.perm == tuple(range(len(self.perm)))

    def check_read(self) -> None:
        """Raises if an array names elements of an axis of size 0: a read has no nearest one."""
        for axis, (dim, n) in enumerate(zip(self.dims, self.shape, strict=True)):
            if not n and is_array(dim) and 0 not in self.int_shape:
                raise RefIndexError(
                    f"an index array of shape {np.shape(dim)} is out of bounds for axis {axis} of "
                    "size 0"
                )

    @property
    def has_arrays(self) -> bool:
        """True if there are integer arrays: they may name an element twice."""
        return any(is_array(d) for d in self.dims)

    # -- static and dynamic parts: kernels are compiled for the first, called with the second ---

    def split(self) -> tuple[Index, list[Value]]:
        """(the static part, which is hashable; the starts, integers and arrays, as operands)."""
        operands: list[Value] = []
        skeleton: list[Span | str | int | None] = []
        for dim, n in zip(self.dims, self.shape, strict=True):
            if is_long(dim):  # There may be no dtype for it.
                skeleton.append(dim)
            elif isinstance(dim, Span):
                if dim.covers(n):
                    skeleton.append(dim)
                else:
                    operands.append(_operand(dim.start))
                    skeleton.append(Span(None, dim.size, dim.step))
            else:
                operands.append(_operand(dim))
                # Parsing has checked static integers: no need to mask the write.
                skeleton.append("in bounds" if is_static(dim) else None)
        return self._replace(dims=tuple(skeleton)), operands

    def join(self, operands: Sequence[Value]) -> Index:
        """The inverse of `split`."""
        rest = iter(operands)
        dims: list[Any] = []
        for dim in self.dims:
            if isinstance(dim, Span):
                dims.append(Span(next(rest), *dim[1:]) if dim.start is None else dim)
            elif is_static(dim):
                dims.append(dim)
            else:
                dims.append(InBounds(next(rest)) if dim == "in bounds" else next(rest))
        return self._replace(dims=tuple(dims))

    def indexer(self) -> _jax.NDIndexer:
        """JAX's indexer for `dims`, with integers and arrays broadcast to `int_shape`."""
        int_shape = _int_shape(self.dims)
        indices: tuple[Any, ...] = tuple(
            _jax.Slice(d.start, d.size, d.step)
            if isinstance(d, Span)
            else shared(_operand(_broadcast_index(d, int_shape)))
            for d in self.dims
        )
        constants = [
            (np.asarray(i), n)
            for i, n in zip(indices, self.shape, strict=True)
            if np.ndim(i) and is_constant(i)
        ]
        kind: Any = _jax.DistinctIndexer if are_distinct(constants) else _jax.NDIndexer
        return kind(indices, self.shape, int_shape)

    # -- the value after the indexer, and back --------------------------------------------------

    def finish(self, taken: Value) -> Value:
        """NumPy's result, of `result_shape`, from the value of `dims` alone, of `taken_shape`."""
        if self.flip:
            taken = lax.rev(taken, self.flip)
        if not self._in_order:
            taken = lax.transpose(taken, self.perm)
        return _reshape(taken, self.result_shape)

    def unfinish(self, result: Value) -> Value:
        """The inverse of `finish`."""
        result = _reshape(result, tuple(self.taken_shape[a] for a in self.perm))
        if not self._in_order:
            result = lax.transpose(result, tuple(int(k) for k in np.argsort(self.perm)))
        return lax.rev(result, self.flip) if self.flip else result

    def fill(self, result: Value, value: Value) -> Value:
        """`result`, of `result_shape`, with the scalar `value` where the index is out of bounds."""
        places = [
            (d, n)
            for d, n in zip(self.dims, self.shape, strict=True)
            if not isinstance(d, Span) and not is_static(d)
        ]
        if not places:
            return result
        inside = functools.reduce(operator.and_, [is_inside(d, n) for d, n in places])
        inside = jnp.broadcast_to(inside, self.int_shape)
        axes = self.int_axes
        sizes = [n if a in axes else 1 for a, n in enumerate(self.taken_shape)]
        inside = jnp.broadcast_to(inside.reshape(sizes), self.taken_shape)
        return jnp.where(self.finish(inside), result, value)

    # -- reading and updating values ------------------------------------------------------------

    def read(self, x: Value, out_sharding: Any = None) -> Value:
        """The part of `x`, with the sharding `out_sharding` if that is given (explicit meshes)."""
        if out_sharding is not None:
            return automatically(Index.read, self, out_sharding, x)
        block = block_of(self.dims, self.shape)
        if not block.is_whole:
            x = block.read(x)
        if block.rest is not None:
            return self.finish(x[block.rest])
        return self.finish(_reshape(x, self.taken_shape))

    def write(self, x: Value, value: Value) -> Value:
        return self.update(x, "set", value)

    def update(self, x: Value, method: str, operand: Value, mask: Value | None = None) -> Value:
        """`x.at[...].<method>(operand)` of `jax.numpy`, for each method in `UPDATES`.

        The result is sharded as `x` is. If there is a `mask`, a bool scalar, it is `x` where that
        is false; only "set" and "add" take one.
        """
        if not _jax.is_on_explicit_mesh(x):
            return self._update(x, method, operand, mask)
        # A user's function runs on the mesh of its caller, not inside `auto_axes`.
        if method == "apply" or self.is_whole:
            return sharded_as(self._update(x, method, operand, mask), jax.typeof(x))

        def update(index: Index, x: Value, *operands: Value) -> Value:
            return index._update(x, method, *operands)

        operands = [operand] if mask is None else [operand, mask]
        return automatically(update, self, jax.typeof(x).sharding, x, *operands)

    def _update(self, x: Value, method: str, operand: Value, mask: Value | None = None) -> Value:
        if method in ("set", "add"):
            return self._update_taken(x, self.unfinish(operand), method, mask)
        if not self.has_arrays:
            new = UPDATES[method](self.read(x), operand)
            return self.write(x, fit(new, self.result_shape, x.dtype))
        if method != "apply":
            operand = self.unfinish(jnp.broadcast_to(operand, self.result_shape))
        return self._update_taken(x, operand, method)

    def _update_taken(
        self, x: Value, value: Value, method: str, mask: Value | None = None
    ) -> Value:
        """`_update` with an operand of `taken_shape`, or a function."""
        block = block_of(self.dims, self.shape)
        if block.rest is not None:
            part = x if block.is_whole else block.read(x)
            part = scatter(part, block.rest, method, value, mask)
            return part if block.is_whole else block.update(x, part, "set")
        value = _reshape(value, block.access.sizes)
        if not block.is_whole:
            return block.update(x, value, method, mask)
        value = value if method == "set" else jnp.add(x, value)
        return value if mask is None else lax.select(mask, value, x)


@functools.lru_cache(maxsize=1024)
def _whole(shape: tuple[int, ...]) -> Index:
    """The index `...`, the most frequent one."""
    return Index.of_dims([Span(0, n) for n in shape], shape)


def _reshape(x: Value, shape: tuple[int, ...]) -> Value:
    return x if x.shape == shape else lax.reshape(x, shape)


def is_long(dim: Span | Value) -> bool:
    """Whether an entry has a static integer of more than 31 bits."""
    place = dim.start if isinstance(dim, Span) else dim
    return is_static(place) and place > np.iinfo(np.int32).max


def _operand(i: Value) -> Value:
    return np.int32(i) if is_static(i) else i


def _broadcast_index(i: Value, shape: tuple[int, ...]) -> Value:
    if np.shape(i) == shape:
        return i
    broadcast = (
        np.broadcast_to if isinstance(i, np.ndarray | int | np.integer) else jnp.broadcast_to
    )
    return broadcast(i, shape)


def _int_shape(dims: Sequence[Span | Value]) -> tuple[int, ...]:
    shapes = [np.shape(d) for d in dims if is_array(d)]
    try:
        return tuple(jnp.broadcast_shapes(*shapes))  # NumPy's takes no symbolic sizes.
    except ValueError:
        raise RefIndexError(
            f"index arrays of shapes {', '.join(map(str, shapes))} do not broadcast together"
        ) from None


def indexed_shape(
    dims: Sequence[Reversed | Span | Value], int_shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(the shape of the value that JAX's indexer takes, its axes that come from integer arrays)."""
    spans = [d.span if isinstance(d, Reversed) else d for d in dims]
    sizes = tuple(d.size for d in spans if isinstance(d, Span))
    ints = [k for k, d in enumerate(spans) if not isinstance(d, Span)]
    are_adjacent = not ints or ints == list(range(ints[0], ints[-1] + 1))
    at = ints[0] if ints and are_adjacent else 0
    shape = sizes[:at] + int_shape + sizes[at:]
    return shape, tuple(range(at, at + len(int_shape)))
