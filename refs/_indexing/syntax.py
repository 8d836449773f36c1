"""The syntax of NumPy index expressions: one entry for each axis, checked against its size."""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from refs import _jax
from refs._indexing.places import clipped, is_static, known, narrow, unwrapped
from refs._types import Indexer, Value
from refs.errors import RefIndexError, RefTypeError, RefValueError


class Span(NamedTuple):
    """`size` elements from `start`, `step >= 1` apart; only `start` may be traced."""

    start: Value
    size: int
    step: int = 1

    def covers(self, dim: int) -> bool:
        return self.step == 1 and self.size == dim and is_static(self.start) and self.start == 0


class NewAxis(NamedTuple):
    """`None` in an index expression; with `count` 0, an ellipsis for no axes, as a separator."""

    count: int = 1


class Reversed(NamedTuple):
    """A slice with a negative step: its elements in ascending order, to be reversed."""

    span: Span


class InBounds(NamedTuple):
    """A traced integer known to be in bounds."""

    value: Value


def is_array(entry: Any) -> bool:
    return (
        not isinstance(entry, Span | Reversed | InBounds)
        and not is_static(entry)
        and np.ndim(entry) > 0
    )


def as_tuple(idx: Indexer) -> tuple[Any, ...]:
    """The index between brackets as a tuple: there `None` is always a new axis."""
    return idx if isinstance(idx, tuple) else (idx,)


def expand(idx: Indexer, shape: tuple[int, ...]) -> list[Any]:
    """One entry for each axis of `shape`, and `NewAxis` where the result gets a new one."""
    entries: list[Any] = []
    for entry in as_tuple(idx):
        entries += _entry(entry)
    if any(isinstance(e, _Everything) for e in entries):
        basic = NewAxis | slice | _jax.Slice | type(...)
        places = [k for k, e in enumerate(entries) if not isinstance(e, basic)]
        alone = not any(isinstance(e, _Mask) or getattr(e, "ndim", 0) for e in entries)
        entries = [e for e in entries if not isinstance(e, _Everything)]
        if alone:  # At the place of these and of integers, in front if other entries lie between.
            are_adjacent = places[-1] - places[0] == len(places) - 1
            entries.insert(places[0] if are_adjacent else 0, NewAxis())
    used = sum(1 for e in entries if not isinstance(e, NewAxis) and e is not ...)
    if used > len(shape):
        raise RefIndexError(f"too many indices: {used} for an array of shape {shape}")
    dots = [k for k, e in enumerate(entries) if e is ...]
    if len(dots) > 1:
        raise RefIndexError("an index can only have a single ellipsis ('...')")
    at = dots[0] if dots else len(entries)
    rest: list[Any] = [slice(None)] * (len(shape) - used)
    entries[at : at + 1] = rest if rest or not dots else [NewAxis(0)]
    return entries


def _entry(entry: Any) -> list[Any]:
    """The entries that one item of an index expression stands for. Sizes aren't checked yet."""
    if entry is None:
        return [NewAxis()]
    start = entry.start if isinstance(entry, _jax.Slice) else entry
    if isinstance(start, _jax.NativeRef):
        raise RefTypeError("an index can't be a Ref: index with its value, `ref[i[...]]`")
    if entry is ... or isinstance(entry, slice | _jax.Slice):
        return [entry]
    if isinstance(entry, bool | np.bool_):
        return _mask_entries(np.asarray(entry))
    if isinstance(entry, list | tuple):
        try:
            entry = np.asarray(entry, dtype=None if len(entry) else np.int32)
        except ValueError:
            raise RefTypeError(f"{entry!r} as an index has rows of different lengths") from None
    if not isinstance(entry, _ARRAYS) or isinstance(entry, str):
        try:
            return [operator.index(entry)]  # pyright: ignore[reportArgumentType]
        except TypeError:
            raise RefTypeError(
                f"an index of type {type(entry).__name__}; an index is made of integers, slices, "
                "None, ..., integer arrays and concrete boolean masks"
            ) from None
    if entry.dtype == bool:
        return _mask_entries(entry)
    if entry.dtype == jax.dtypes.float0:
        raise RefTypeError(
            "in the tangent of a view, the index is a tangent too, and names nothing: let the "
            "function with the derivative rule take the ref and the index apart"
        )
    if not jnp.issubdtype(entry.dtype, jnp.integer):
        raise RefTypeError(f"an index array must hold integers or booleans, not {entry.dtype}")
    return [int(entry) if isinstance(entry, np.integer) else entry]


_ARRAYS = jax.Array, np.ndarray, np.generic  # A view has a dtype, too, and is no array.


def _mask_entries(mask: Value) -> list[Any]:
    if isinstance(mask, _jax.Tracer):
        raise RefTypeError(
            "a boolean mask must be concrete, for the result's shape depends on it, but this one "
            "is traced: use `jnp.where(mask, new, ref[...])`, or integer indices"
        )
    if np.ndim(mask) == 0:
        if mask:
            return [_Everything()]
        raise RefIndexError("an index can't be the scalar False")
    return [_Mask(np.asarray(mask).shape, k, i) for k, i in enumerate(np.nonzero(mask))]


class _Everything(NamedTuple):
    """`True` in an index expression: a new axis, or nothing if there are index arrays."""


class _Mask(NamedTuple):
    """One of the integer arrays that a boolean mask of this shape stands for: for its axis `k`."""

    shape: tuple[int, ...]
    k: int
    indices: np.ndarray


class Bounds(NamedTuple):
    """The treatment of integers out of bounds, by the keywords of `x.at[...]`.

    `mode` is None, so that Python integers must be in bounds, or a mode of `jax.numpy`: only "clip"
    moves an index into bounds.
    """

    mode: str | None = None
    wrap_negative_indices: bool = True


BRACKETS = Bounds()


def bounded(
    entries: list[Any], shape: tuple[int, ...], bounds: Bounds
) -> tuple[Reversed | Span | Value, ...]:
    """Entries, one for each axis, checked against the sizes of the axes and made explicit."""
    return tuple(
        _bound(e, axis, n, bounds) for axis, (e, n) in enumerate(zip(entries, shape, strict=True))
    )


def _bound(entry: Any, axis: int, n: int, bounds: Bounds) -> Reversed | Span | Value:
    if isinstance(entry, _Mask):
        if entry.shape[entry.k] != n:
            raise RefIndexError(
                f"boolean mask of shape {entry.shape} does not match axis {axis} of size {n}"
            )
        return narrow(entry.indices, n)
    if isinstance(entry, _jax.Slice):
        if not is_static(entry.size):
            raise RefTypeError("the size in jax.ds(start, size) must be a Python integer")
        size, start, step = int(entry.size), entry.start, entry.stride
        if size < 0:
            raise RefValueError("the size in jax.ds(start, size) must not be negative")
        if isinstance(start, (float, complex, *_ARRAYS)) and (
            np.ndim(start) or not jnp.issubdtype(jnp.result_type(start), jnp.integer)
        ):
            raise RefTypeError("the start in jax.ds(start, size) must be an integer without axes")
        if not is_static(step) or step < 1:
            raise RefValueError(
                "the stride in jax.ds(start, size, stride) must be a Python integer, at least 1"
            )
        step = int(step) if size > 1 else 1
        span = (size - 1) * step + 1 if size else 0
        if span > n:
            by = f" and stride {step}, which spans {span} elements," if step > 1 else ""
            raise RefIndexError(f"jax.ds of size {size}{by} on axis {axis} of size {n}")
        if is_static(start):  # moved into bounds, as lax.dynamic_slice moves a traced start
            start = min(max(start + n if start < 0 else start, 0), n - span)
        return Span(start, size, step)
    if isinstance(entry, slice):
        return _bound_slice(entry, n)
    return _bound_integer(entry, axis, n, bounds)


def _bound_integer(entry: Value, axis: int, n: int, bounds: Bounds) -> Value:
    wraps = bounds.wrap_negative_indices
    if is_static(entry) and (-n if wraps else 0) <= entry < n:
        return int(entry) % n
    if (is_static(entry) and bounds.mode is None) or (not n and not np.ndim(entry)):
        shown = "an index" if isinstance(entry, _jax.Tracer) else f"index {entry}"
        raise RefIndexError(f"{shown} is out of bounds for axis {axis} of size {n}")
    if is_static(entry) or isinstance(entry, np.ndarray):
        entry = narrow(np.asarray(entry), n)
    if not wraps:
        entry = unwrapped(entry, n)
    return known(clipped(entry, n), n) if bounds.mode == "clip" and n else entry


def _bound_slice(entry: slice, n: int) -> Reversed | Span:
    if entry == slice(None):  # also for an axis whose size is a symbol
        return Span(0, n)
    try:
        if not is_static(n):
            return _symbolic_slice(entry, n)
        start, stop, step = entry.indices(n)
    except (TypeError, jax.errors.TracerIntegerConversionError):
        bounds = (entry.start, entry.stop, entry.step)
        if any(isinstance(b, _jax.Tracer | _jax.NativeRef) for b in bounds):
            why = "a slice with traced bounds has no static size: use `jax.ds(start, size)`"
        else:
            why = f"the bounds of a slice must be integers or None, not {bounds}"
        raise RefTypeError(why) from None
    except ValueError:
        raise RefValueError("the step of a slice can't be 0") from None
    size = max(0, math.ceil((stop - start) / step))
    if size <= 1:  # Direction and step have no meaning.
        return Span(start if size else 0, size)
    if step > 0:
        return Span(start, size, step)
    return Reversed(Span(start + (size - 1) * step, size, -step))


def _symbolic_slice(entry: slice, n: Any) -> Reversed | Span:
    """A slice of an axis whose size is a symbol. What is known of that must tell where it lies.

    Raises:
      RefIndexError: if it doesn't.
    """
    step = 1 if entry.step is None else operator.index(entry.step)
    if not step:
        raise ValueError
    first, end = (0, n) if step > 0 else (n - 1, -1)

    def place(bound: Any, absent: Any) -> Any:
        if bound is None:
            return absent
        bound = bound if jax.export.is_symbolic_dim(bound) else operator.index(bound)
        return n + bound if bound < 0 else bound

    try:
        start, stop = place(entry.start, first), place(entry.stop, end)
        is_inside = start >= 0 and stop <= n if step > 0 else start < n and stop >= -1
        size = (stop - start + step - 1) // step if step > 0 else (start - stop - step - 1) // -step
        is_inside = is_inside and size >= (0 if abs(step) == 1 else 1)
    except jax.errors.InconclusiveDimensionOperation:
        is_inside = False
    if not is_inside:
        shown = ":".join("" if b is None else str(b) for b in (entry.start, entry.stop, entry.step))
        raise RefIndexError(
            f"whether `{shown}` lies inside an axis of size {n} isn't known: say so of the symbol, "
            f"`jax.export.symbolic_shape(..., constraints=['{n} >= 10'])`, or use `jax.ds`"
        )
    first = start if step > 0 else start + (size - 1) * step
    span = Span(first if is_static(first) else jnp.asarray(first), size, abs(step))
    return span if step > 0 else Reversed(span)
