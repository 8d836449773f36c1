"""Parts of parts: the composition of two indices, one within the other, to one index.

So a write through a view of a view costs only what it touches. It also reaches an element that the
outer index names twice: in a copy of the outer part only one of its two places would be written,
and putting the copy back would overwrite the element with the old value of the other place.

Slices and integers are composed by arithmetic. What they can't say, such as an array that indexes
what another array has picked, is said element by element: the place of each on each axis.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import numpy as np

from refs._indexing.index import Index
from refs._indexing.places import (
    clipped,
    is_inside,
    is_static,
    known,
    located,
    narrow,
    numpy_of,
    within,
)
from refs._indexing.syntax import Span
from refs._types import Value


def nest(outer: Index, inner: Index, *, writing: bool) -> Index:
    """The index of `inner`'s part of `outer`'s part.

    An integer of `inner` that is out of bounds is moved to the nearest place of `outer`'s part for
    a read. For a write it is moved out of the whole array's bounds.
    """
    if 0 in inner.result_shape:
        return _nothing(outer.shape, inner.result_shape)
    if 0 in outer.result_shape:  # Only for a write: `check_read` refuses reads.
        return _nowhere(outer.shape, inner.result_shape)
    made = [a for a, t in enumerate(outer.axes) if t is None]
    of_arrays = [outer.axes.index(t) for t in outer.int_axes]
    is_arithmetic = (
        not (outer.has_arrays and inner.has_arrays)
        and all(isinstance(inner.dims[a], Span) or is_static(inner.dims[a]) for a in made)
        and all(_covers(inner.dims[a], outer.result_shape[a]) for a in of_arrays)
    )
    return (_by_arithmetic if is_arithmetic else _by_element)(outer, inner, writing)


# -- by arithmetic -------------------------------------------------------------------------------


def _by_arithmetic(outer: Index, inner: Index, writing: bool) -> Index:
    """`nest`, where `inner` takes what `outer`'s arrays have picked as it is, or there are none."""
    axis_of = _axes_of_spans(outer)
    dims: list[Any] = [
        _part(outer, inner, k, axis_of[k], writing) if k in axis_of else d
        for k, d in enumerate(outer.dims)
    ]
    new = Index.of_dims(
        [d if isinstance(d, Span) else known(d, n) for d, n in zip(dims, outer.shape, strict=True)],
        outer.shape,
    )
    # Axes have names: an integer is an axis of the shape of `inner`'s arrays, and `("span", a)` is
    # what `inner`'s slice on axis `a` of `outer`'s part gives.
    of_arrays = [("span", outer.axes.index(t)) for t in outer.int_axes]
    names: dict[int, Any] = dict(zip(new.int_axes, of_arrays or inner.int_axes, strict=False))
    kept = [("span", a) for k, a in axis_of.items() if isinstance(dims[k], Span)]
    basic = [t for t in range(len(new.taken_shape)) if t not in new.int_axes]
    names.update(zip(basic, kept, strict=True))
    place = {name: t for t, name in names.items()}

    spans = [("span", a) for a, d in enumerate(inner.dims) if isinstance(d, Span)]
    rest = [t for t in range(len(inner.taken_shape)) if t not in inner.int_axes]
    inner_names: dict[int, Any] = {t: t for t in inner.int_axes}
    inner_names.update(zip(rest, spans, strict=True))
    by_outer = {("span", a) for a, t in enumerate(outer.axes) if t in outer.flip}
    by_inner = {inner_names[t] for t in inner.flip}
    flip = {place[name] for name in by_outer ^ by_inner if name in place}
    perm = tuple(place[name] for t in inner.perm if (name := inner_names[t]) in place)
    return new._replace(flip=tuple(sorted(flip)), perm=perm, result_shape=inner.result_shape)


def _part(outer: Index, inner: Index, k: int, a: int, writing: bool) -> Span | Value:
    """`inner`'s part of `outer`'s slice on dimension `k`, which is axis `a` of `outer`'s part."""
    span, part, n = outer.dims[k], inner.dims[a], outer.shape[k]
    is_reversed = outer.axes[a] in outer.flip
    if isinstance(part, Span):
        if part.covers(span.size):
            return span
        start = _start(part, span.size)
        if is_reversed:
            start = span.size - 1 - (start + (part.size - 1) * part.step)
        return Span(_start(span, n) + span.step * start, part.size, span.step * part.step)
    if span.covers(n) and not is_reversed:
        return part
    place = _start(span, n) + span.step * _counted(part, span.size, is_reversed)
    if writing and not is_static(part):
        inside = is_inside(part, span.size)
        place = numpy_of(inside, place).where(inside, place, np.int32(n))
    return place


# -- element by element --------------------------------------------------------------------------


def _by_element(outer: Index, inner: Index, writing: bool) -> Index:
    """`nest`, as an integer array for each dimension, of the shape of the result."""
    shape = inner.result_shape
    elements = _places(inner, outer.result_shape)

    def picked(array: Value) -> Value:
        """Of an array with the axes of `outer`'s part: what `inner` picks of it."""
        axes = [a for a, n in enumerate(np.shape(array)) if n > 1]
        of = numpy_of(array, *(elements[a] for a in axes))
        # `jax.numpy` leaves a constant one of NumPy's until something is done to it.
        array = of.broadcast_to(of.asarray(array), np.shape(array))
        array = array.reshape([np.shape(array)[a] for a in axes])
        return array[tuple(elements[a] for a in axes)] if axes else array

    dims = [*map(picked, _places(outer, outer.shape))]
    inside = [*map(picked, _inside(outer, outer.shape)), *_inside(inner, outer.result_shape)]
    if writing and inside:
        are_inside = functools.reduce(operator.and_, inside)
        of = numpy_of(are_inside, dims[0])
        dims[0] = of.where(are_inside, dims[0], np.int32(outer.shape[0]))
    dims[0] = numpy_of(dims[0]).broadcast_to(dims[0], shape)
    return Index.of_dims(dims, outer.shape)


def _places(index: Index, shape: tuple[int, ...]) -> list[Value]:
    """For each axis of an array of this shape: the places of what an index names, in bounds.

    They are of the shape of its result, but of size 1 along axes that they don't depend on.
    """
    axis_of, found = _axes_of_spans(index), []
    for k, (dim, n) in enumerate(zip(index.dims, shape, strict=True)):
        if isinstance(dim, Span):
            steps = np.arange(dim.size, dtype=np.int32) * np.int32(dim.step)
            a = axis_of[k]
            if index.axes[a] in index.flip:
                steps = steps[::-1]
            steps = steps.reshape([-1 if axis == a else 1 for axis in range(len(index.axes))])
            found.append(_start(dim, n) + steps)
        else:
            place = dim if is_static(dim) else clipped(_along_result(index, dim), n)
            found.append(np.asarray(place, np.int32) if is_static(place) else place)
    return found


def _inside(index: Index, shape: tuple[int, ...]) -> Iterator[Value]:
    """Which elements of an index's result are in bounds, by its integers that may not be."""
    for dim, n in zip(index.dims, shape, strict=True):
        if not (isinstance(dim, Span) or is_static(dim)):
            yield is_inside(_along_result(index, dim), n)


def _along_result(index: Index, array: Value) -> Value:
    """An integer array of an index, with the axes of the index's result."""
    of = numpy_of(array)
    array = of.broadcast_to(narrow(of.asarray(array), np.iinfo(np.int32).max), index.int_shape)
    sizes = dict(zip(map(index.axes.index, index.int_axes), index.int_shape, strict=True))
    return array.reshape([sizes.get(a, 1) for a in range(len(index.axes))])


# -- both ----------------------------------------------------------------------------------------


def _axes_of_spans(index: Index) -> dict[int, int]:
    """For each dimension with a slice: the axis of the index's result."""
    spans = [k for k, d in enumerate(index.dims) if isinstance(d, Span)]
    basic = [t for t in range(len(index.taken_shape)) if t not in index.int_axes]
    return {k: index.axes.index(t) for k, t in zip(spans, basic, strict=True)}


def _covers(dim: Span | Value, n: int) -> bool:
    return isinstance(dim, Span) and dim.covers(n)


def _counted(i: Value, n: int, is_reversed: bool) -> Value:
    """Integers on an axis of size `n`, in bounds, counted from its other end if it is reversed."""
    i = i if is_static(i) else clipped(i, n)
    return n - 1 - i if is_reversed else i


def _start(span: Span, n: int) -> Value:
    """The start of a slice of an axis of size `n`, clamped so that the slice fits."""
    if is_static(span.start):
        return span.start
    return within(located(span.start, n), n - (span.size - 1) * span.step - 1)


def _nothing(shape: tuple[int, ...], result_shape: tuple[int, ...]) -> Index:
    """An index of no elements: `result_shape` has an axis of size 0."""
    dims = [Span(0, n if k else 0) for k, n in enumerate(shape)]
    return Index.of_dims(dims, shape)._replace(result_shape=result_shape)


def _nowhere(shape: tuple[int, ...], result_shape: tuple[int, ...]) -> Index:
    """An index all of whose elements are out of bounds."""
    dims = [np.full(result_shape, n, np.int32) for n in shape]
    return Index.of_dims(dims, shape)
