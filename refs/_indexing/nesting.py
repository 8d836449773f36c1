"""Parts of parts: the composition of two indices, one within the other, to one index.

So a write through a view of a view costs only what it touches. It also reaches an element that the
outer index names twice: in a copy of the outer part only one of its two places would be written,
and putting the copy back would overwrite the element with the old value of the other place.
"""

from __future__ import annotations

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
from refs._indexing.syntax import Span, is_array
from refs._types import Value


def nest(outer: Index, inner: Index, *, writing: bool) -> Index:
    """The index of `inner`'s part of `outer`'s part.

    Slices of slices are slices. An integer of `inner` that is out of bounds is moved to the nearest
    place of `outer`'s part for a read. For a write it is moved out of the whole array's bounds.
    """
    if 0 in inner.result_shape:
        return _nothing(outer.shape, inner.result_shape)
    if 0 in outer.result_shape:  # Only for a write: `check_read` refuses reads.
        return _nowhere(outer.shape, inner.result_shape)
    return _Nesting(outer, inner, writing).index()


class _Nesting:
    """The composition of two indices.

    Axes have names in it: `("int", j)` is axis `j` of the shape of `inner`'s integer arrays, and
    `("span", a)` is the axis that `inner`'s slice on axis `a` of `outer`'s part gives.
    """

    def __init__(self, outer: Index, inner: Index, writing: bool):
        self.outer, self.inner, self.writing = outer, inner, writing
        self.axes = outer.axes
        self.int_axes = outer.int_axes
        spans = [k for k, d in enumerate(outer.dims) if isinstance(d, Span)]
        basic = [t for t in range(len(outer.taken_shape)) if t not in self.int_axes]
        # The axes of `outer`'s part: of each dimension with a slice, and of the integer arrays.
        self.axis_of_dim = {k: self.axes.index(t) for k, t in zip(spans, basic, strict=True)}
        self.axis_of_int = [self.axes.index(t) for t in self.int_axes]
        self.made = [a for a, t in enumerate(self.axes) if t is None]
        # Arrays on axes that `None` has made are put into the places of one dimension, the bearer.
        loose = [a for a in self.made if not self.is_span(a) and not is_static(inner.dims[a])]
        self.loose = loose
        ranked = sorted(range(len(outer.dims)), key=lambda k: k in self.axis_of_dim)
        self.bearer = ranked[0] if loose else None
        spread = None if self.bearer is None else self.axis_of_dim.get(self.bearer)
        # Slices that become integer arrays: their axes come after those of `inner`'s arrays.
        self.tail = [a for a in (spread, *self.axis_of_int) if a is not None and self.is_span(a)]
        self.int_shape = inner.int_shape + tuple(inner.dims[a].size for a in self.tail)

    def is_span(self, a: int) -> bool:
        return isinstance(self.inner.dims[a], Span)

    def index(self) -> Index:
        outer, inner = self.outer, self.inner
        arrays = self.arrays()
        dims = [
            self.of_span(k, d) if k in self.axis_of_dim else arrays.get(k, d)
            for k, d in enumerate(outer.dims)
        ]
        if self.bearer is not None:
            dims[self.bearer] = self.borne(dims[self.bearer])
        dims = [
            d if isinstance(d, Span) else known(d, n)
            for d, n in zip(dims, outer.shape, strict=True)
        ]

        new = Index.of_dims(dims, outer.shape)
        names: dict[int, tuple[str, int]] = {}
        ints = [("int", j) for j in range(len(inner.int_shape))]
        ints += [("span", a) for a in self.tail]
        names.update(zip(new.int_axes, ints, strict=True))
        kept = [("span", a) for k, a in self.axis_of_dim.items() if isinstance(dims[k], Span)]
        basic = [t for t in range(len(new.taken_shape)) if t not in names]
        names.update(zip(basic, kept, strict=True))
        place = {name: t for t, name in names.items()}

        inner_names: dict[int, tuple[str, int]] = dict(
            zip(inner.int_axes, (("int", j) for j in range(len(inner.int_shape))), strict=True)
        )
        spans = [("span", a) for a in range(len(self.axes)) if self.is_span(a)]
        rest = [t for t in range(len(inner.taken_shape)) if t not in inner_names]
        inner_names.update(zip(rest, spans, strict=True))

        reversed_by_outer = {("span", a) for a, t in enumerate(self.axes) if t in outer.flip}
        reversed_by_inner = {inner_names[t] for t in inner.flip}
        flip = {place[name] for name in reversed_by_outer ^ reversed_by_inner if name in place}
        perm = tuple(place[n] for t in inner.perm if (n := inner_names[t]) in place)
        return new._replace(flip=tuple(sorted(flip)), perm=perm, result_shape=inner.result_shape)

    # -- one dimension each ----------------------------------------------------------------------

    def of_span(self, k: int, span: Span) -> Span | Value:
        """`inner`'s part of the slice on dimension `k`: a slice, or an array of places."""
        a, n = self.axis_of_dim[k], self.outer.shape[k]
        part = self.inner.dims[a]
        if isinstance(part, Span):
            if not part.covers(span.size):
                part = self.slice_on(a)
                start = _start(span, n) + span.step * part.start
                span = Span(start, part.size, span.step * part.step)
            return self.along(a, span, n) if a in self.tail else span
        if span.covers(n) and not self.is_reversed(a):
            return self.lifted(part)
        return self.outside_is(n, _start(span, n) + span.step * self.elements_on(a), [a])

    def arrays(self) -> dict[int, Value]:
        """By dimension, the parts of `outer`'s integer arrays; none if `inner` takes them whole."""
        outer, axes = self.outer, self.axis_of_int
        if all(self.is_span(a) and self.inner.dims[a].covers(self.part_size(a)) for a in axes):
            return {}
        places = tuple(
            self.along(a, self.slice_on(a), self.part_size(a))
            if self.is_span(a)
            else self.elements_on(a)
            for a in axes
        )
        found = {}
        for k, array in enumerate(outer.dims):
            if is_array(array):
                of = numpy_of(array, *places)
                array = narrow(of.asarray(array), outer.shape[k])
                part = of.broadcast_to(array, outer.int_shape)[places]
                found[k] = self.outside_is(
                    outer.shape[k], part, [a for a in axes if not self.is_span(a)]
                )
        return found

    def borne(self, dim: Value) -> Value:
        """The bearer's places, broadcast against the arrays on axes that `None` has made."""
        n = self.outer.shape[self.bearer or 0]
        dim = self.outside_is(n, dim, self.loose)
        arrays = [np.shape(self.lifted(self.inner.dims[a])) for a in self.loose]
        of = numpy_of(dim)
        return of.broadcast_to(dim, np.broadcast_shapes(np.shape(dim), *arrays))

    # -- axes ------------------------------------------------------------------------------------

    def part_size(self, a: int) -> int:
        return self.outer.result_shape[a]

    def is_reversed(self, a: int) -> bool:
        return self.axes[a] in self.outer.flip

    def slice_on(self, a: int) -> Span:
        """`inner`'s slice of an axis of the part, counted in the value before `outer.flip`."""
        part, n = self.inner.dims[a], self.part_size(a)
        start = _start(part, n)
        if self.is_reversed(a):
            start = n - 1 - (start + (part.size - 1) * part.step)
        return part._replace(start=start)

    def elements_on(self, a: int) -> Value:
        """`inner`'s integers on an axis of the part, clamped, counted before `outer.flip`."""
        i, n = self.inner.dims[a], self.part_size(a)
        i = i if is_static(i) else clipped(self.lifted(i), n)
        return n - 1 - i if self.is_reversed(a) else i

    def outside_is(self, n: int, place: Value, axes: list[int]) -> Value:
        """Places on an axis of size `n`; for a write, those where an integer of `inner` on `axes`
        is out of bounds become `n`."""
        for a in axes:
            i = self.inner.dims[a]
            if self.writing and not is_static(i):
                inside = is_inside(self.lifted(i), self.part_size(a))
                place = numpy_of(inside, place).where(inside, place, np.int32(n))
        return place

    def lifted(self, i: Value) -> Value:
        """`inner`'s integers, with an axis of size 1 at the end for each slice in `tail`."""
        return i if not np.ndim(i) else i.reshape(*i.shape, *(1,) * len(self.tail))

    def along(self, a: int, span: Span, n: int) -> Value:
        """A slice's places on an axis of size `n`: `[size, 1, …]`, to broadcast to `int_shape`."""
        after = len(self.tail) - 1 - self.tail.index(a)
        steps = np.arange(span.size, dtype=np.int32) * np.int32(span.step)
        return _start(span, n) + steps.reshape(-1, *(1,) * after)


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
