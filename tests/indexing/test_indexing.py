"""Indexing means what NumPy means by it: eagerly, under JAX's jit and under ours.

NumPy is the oracle for every index that is in bounds, `jax.numpy` for those that are not.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import refs

SHAPES = [(), (1,), (3,), (4,), (0,), (2, 3), (3, 1), (2, 0), (2, 3, 2)]

# Each example compiles a few kernels, and there are many laws: a share of what the profile asks
# for is enough.
fewer = settings(max_examples=max(8, settings.default.max_examples // 20))


# --- Ways to run a program: `program(ref, dynamic)` returns arrays ---


def eagerly(program, ref, dynamic):
    return program(ref, dynamic)


def in_jax_jit(program, ref, dynamic):
    return jax.jit(program)(ref, dynamic)


def in_refs_jit(program, ref, dynamic):
    return refs.jit(lambda dynamic: program(ref, dynamic))(dynamic)


ways = pytest.mark.parametrize("run", [eagerly, in_jax_jit, in_refs_jit])
our_ways = pytest.mark.parametrize("run", [eagerly, in_refs_jit])


# --- Index expressions ---


@dataclass(frozen=True)
class Dynamic:
    """Stands for the `place`-th dynamic value: an integer or integer array."""

    place: int


@dataclass(frozen=True)
class DynamicSlice:
    """`jax.ds(start, size, stride)`, the start a dynamic value or an integer."""

    start: Any
    size: int
    stride: int


@dataclass(frozen=True)
class Case:
    """An index expression for an array of shape `shape`."""

    shape: tuple
    entries: tuple
    dynamic: tuple = ()

    def for_numpy(self):
        def entry(e):
            if isinstance(e, Dynamic):
                return self.dynamic[e.place]
            if isinstance(e, DynamicSlice):
                start = entry(e.start)
                return slice(int(start), int(start) + e.size * e.stride, e.stride)
            return e

        return tuple(entry(e) for e in self.entries)

    def for_refs(self, dynamic):
        def entry(e):
            if isinstance(e, Dynamic):
                return dynamic[e.place]
            return jax.ds(entry(e.start), e.size, e.stride) if isinstance(e, DynamicSlice) else e

        entries = tuple(entry(e) for e in self.entries)
        return entries[0] if len(entries) == 1 else entries

    @property
    def has_arrays(self):
        """True where an element may be named twice."""
        return any(np.ndim(e) > 0 for e in self.for_numpy() if e is not None and e is not ...)

    @property
    def value(self):
        return np.arange(1, 1 + np.prod(self.shape, dtype=int), dtype=np.int32).reshape(self.shape)

    @property
    def result_shape(self):
        return self.value[self.for_numpy()].shape


@st.composite
def cases(draw):
    shape = draw(st.sampled_from(SHAPES))
    n_axes = draw(st.integers(0, len(shape)))
    axes = [*range(n_axes)]
    if n_axes < len(shape) or draw(st.booleans()):
        # With `...` somewhere, the entries after it index the last axes.
        at = draw(st.integers(0, n_axes))
        axes[at:] = [..., *range(len(shape) - (n_axes - at), len(shape))]
    dynamic, entries = [], []
    # Integer arrays of one index must broadcast together.
    int_shape = draw(st.sampled_from([(2,), (3,), (2, 2), (0,)]))

    def dynamically(x):
        if draw(st.booleans()):
            return x
        dynamic.append(x)
        return Dynamic(len(dynamic) - 1)

    skip = 0
    for place, axis in enumerate(axes):
        if skip:
            skip -= 1
            continue
        if draw(st.integers(0, 5)) == 0:
            entries.append(None)
        if axis is ...:
            entries.append(...)
            continue
        n = shape[axis]
        kinds = ["slice", "slice", "ds"] + ["int", "array"] * (n > 0)
        masked_axes = 1
        if int_shape == (2,) and n >= 2:
            kinds.append("mask")
            if axes[place + 1 : place + 2] == [axis + 1]:
                masked_axes = draw(st.integers(1, 2))
        kind = draw(st.sampled_from(kinds))
        if kind == "int":
            i = draw(st.integers(-n, n - 1))
            entries.append(
                dynamically(draw(st.sampled_from([int, np.int32, np.int64, np.int8]))(i))
            )
        elif kind == "slice":
            bound = st.none() | st.integers(-n - 1, n + 1)
            step = draw(st.none() | st.integers(-3, 3).filter(bool))
            entries.append(slice(draw(bound), draw(bound), step))
        elif kind == "ds":
            stride = draw(st.sampled_from([1, 1, 2, 3]))
            size = draw(st.integers(0, (n + stride - 1) // stride))
            room = n - (size - 1) * stride - 1 if size else n
            entries.append(DynamicSlice(dynamically(draw(st.integers(0, room))), size, stride))
        elif kind == "mask":
            mask = np.zeros(shape[axis : axis + masked_axes], bool)
            for k in draw(st.permutations(range(mask.size)))[:2]:
                mask.flat[k] = True
            entries.append(mask)
            skip = masked_axes - 1
        else:
            part = draw(st.sampled_from([int_shape, int_shape[-1:], (1,)]))
            flat = [draw(st.integers(-n, n - 1)) for _ in range(np.prod(part, dtype=int))]
            array = np.array(flat, np.int32).reshape(part)
            # A list holds its elements' type only if there are any.
            as_list = array.size > 0 and draw(st.booleans())
            entries.append(array.tolist() if as_list else dynamically(array))
    entries += [None] * (draw(st.integers(0, 5)) == 0)
    return Case(shape, tuple(entries), tuple(dynamic))


def values_for(case):
    """Arrays and scalars that may be assigned to what the case names."""
    shape = case.result_shape
    scalar = np.asarray(7, np.int32)
    if case.has_arrays:  # Which of two values stays is not defined.
        return [scalar]
    full = np.arange(1, 1 + np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    values = [scalar, full, full[None], full[None, None]]
    if shape and shape[0] > 1:
        values += [full[:1], full[0]]
    return values


# --- Reading and every update, against NumPy ---


def numpy_program(case, method, value):
    x, index = case.value.copy(), case.for_numpy()
    old = x[index].copy()
    # NumPy drops leading axes of size 1 everywhere but in the assignment to one element.
    value = value.reshape(value.shape[-old.ndim :] if old.ndim else ())
    if method in ("set", "swap"):
        x[index] = value
    elif method != "get":
        ufuncs = {"add": np.add, "multiply": np.multiply, "min": np.minimum, "max": np.maximum}
        ufuncs[method].at(x, index, np.broadcast_to(value, old.shape))
    return (old if method in ("get", "swap") else None), x


def refs_program(case, method, value):
    def program(ref, dynamic):
        index = case.for_refs(dynamic)
        old = None
        if method == "get":
            old = ref[index]
        elif method == "set":
            ref[index] = value
        elif method == "swap":
            old = ref.at[index].swap(value)
        elif method == "add":
            refs.addupdate(ref, index, value)
        else:
            getattr(ref.at[index], method)(value)
        return old, ref[...]

    return program


def check(case, method, value, run):
    expected = numpy_program(case, method, value)
    ref = refs.new_ref(case.value)
    dynamic = [jnp.asarray(d, jnp.int32) for d in case.dynamic]
    old, new = run(refs_program(case, method, value), ref, dynamic)
    for want, got in zip(expected, (old, new), strict=True):
        if want is None:
            assert got is None
        else:
            assert got.shape == want.shape
            assert got.dtype == np.int32
            np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(ref[...], expected[1])


@ways
@pytest.mark.parametrize("method", ["get", "set", "swap", "add", "multiply", "max"])
def test_any_index_means_what_numpy_means(run, method):
    @fewer
    @given(cases(), st.data())
    def law(case, data):
        check(case, method, data.draw(st.sampled_from(values_for(case))), run)

    law()


X = (2, 3, 4)
INDICES = [
    (np.array([0, 0, 1]),),
    ([1, 1, 1], [0, 0, 2]),
    (np.array([[0, 1], [1, 1]]), slice(None), [[3], [0]]),
    (0, slice(None), [1, 2]),
    (slice(None), 0, [1, 2]),
    ([0, 1], None, 1),
    (slice(None, None, -1), None, [0, 2, 0], slice(3, None, -2)),
    (np.array([[True, False, True], [False, True, False]]),),
    (slice(None, None, -1), np.array([True, False, True])),
    (np.array([False, False]),),
    (..., np.array([False, True, True, False])),
    (np.zeros((0,), int),),
    ([],),
    (slice(2, 0),),
    (slice(None), slice(None), slice(10, -10, -3)),
    (None, ..., None, -1),
    (True,),
    (True, [0, 1]),
    # An ellipsis for no axes stands between, all the same.
    (None, np.array([[True, False, True], [False, True, False]]), ..., -1),
    (np.array(1), np.uint8(2)),
    (),
    (None,),
    (None, None),
]


@our_ways
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_corners(run, index):
    check(Case(X, index), "swap", np.int32(5), run)


def test_none_in_brackets_is_an_axis_and_alone_in_functions_the_whole():
    ref = refs.new_ref(jnp.arange(3))
    assert ref[None].shape == ref.at[None].get().shape == ref.at[None].swap(1).shape == (1, 3)
    assert refs.get(ref).shape == refs.get(ref, None).shape == refs.swap(ref, None, 2).shape == (3,)
    assert refs.get(ref, (None,)).shape == (1, 3)


@ways
def test_duplicates_accumulate_each_and_iadd_does_not(run):
    def program(ref, dynamic):
        refs.addupdate(ref, [0, 0, 1], jnp.array([1, 2, 4]))
        ref[jnp.array([2, 2])] += 5

    ref = refs.new_ref(jnp.zeros(3, jnp.int32))
    run(program, ref, [])
    assert ref[...].tolist() == [3, 4, 5]


# --- Out of bounds ---


OUT_OF_BOUNDS = {
    "get": (lambda x, i: x[i], lambda ref, i: ref[i]),
    "set": (lambda x, i: x.at[i].set(9), lambda ref, i: refs.set(ref, i, 9)),
    "add": (lambda x, i: x.at[i].add(9), lambda ref, i: refs.addupdate(ref, i, 9)),
    "multiply": (lambda x, i: x.at[i].multiply(9), lambda ref, i: ref.at[i].multiply(9)),
}


@our_ways
@pytest.mark.parametrize("method", OUT_OF_BOUNDS)
@pytest.mark.parametrize("index", [4, -5, -100, [4, 0], [-5, -1, -1], [[100], [2]]], ids=str)
def test_arrays_and_traced_integers_out_of_bounds_are_as_in_jax_numpy(run, method, index):
    x, i = jnp.arange(1, 5), jnp.asarray(index)
    of_array, of_ref = OUT_OF_BOUNDS[method]
    ref = refs.new_ref(x)
    read = run(of_ref, ref, i)
    new = of_array(x, i)
    np.testing.assert_array_equal(read if method == "get" else ref[...], new)


@our_ways
@pytest.mark.parametrize("row", [0, 2, -3])
@pytest.mark.parametrize("column", [3, 1, -4])  # the first is among the quick tests
def test_one_of_two_traced_integers_out_of_bounds(run, row, column):
    x = jnp.arange(6).reshape(2, 3)
    ref, (i, j) = refs.new_ref(x), jnp.array([row, column])
    read = run(lambda ref, ij: ref[ij[0], ij[1]], ref, (i, j))
    run(lambda ref, ij: refs.set(ref, (ij[0], ij[1]), -1), ref, (i, j))
    assert read == x[i, j]
    np.testing.assert_array_equal(ref[...], x.at[i, j].set(-1))


@ways
@pytest.mark.parametrize("index", [4, -5, (0, 0), np.int64(4)], ids=str)
def test_python_integers_out_of_bounds_are_errors(run, index):
    ref = refs.new_ref(jnp.arange(4))
    for program in (lambda ref, _: ref[index], lambda ref, _: refs.set(ref, index, 1)):
        with pytest.raises(refs.errors.RefIndexError):
            run(program, ref, [])
    assert ref[...].tolist() == [0, 1, 2, 3]


@ways
@pytest.mark.parametrize("start", [2, 3, -1, 9, -9])
@pytest.mark.parametrize("traced", [False, True])
def test_ds_moves_into_bounds_as_dynamic_slice_does(run, start, traced):
    x = jnp.arange(4)
    want = lax.dynamic_slice(x, (start,), (2,))

    def program(ref, dynamic):
        window = jax.ds(dynamic if traced else start, 2)
        old = ref[window]
        ref[window] = 7
        return old

    ref = refs.new_ref(x)
    np.testing.assert_array_equal(run(program, ref, start), want)
    updated = lax.dynamic_update_slice(x, jnp.full(2, 7), (start,))
    np.testing.assert_array_equal(ref[...], updated)


# --- What is no index, or no value for one ---

NO_INDICES = [
    ((0, 0, 0), refs.errors.RefIndexError),
    ((..., ...), refs.errors.RefIndexError),
    (1.5, refs.errors.RefTypeError),
    ("a", refs.errors.RefTypeError),
    (jnp.array([0.5]), refs.errors.RefTypeError),
    (np.array([True, False, True]), refs.errors.RefIndexError),
    (([0, 1], [0, 1, 2]), refs.errors.RefIndexError),
    (jax.ds(0, 3), refs.errors.RefIndexError),
]


@ways
@pytest.mark.parametrize("index, error", NO_INDICES, ids=str)
def test_bad_indices(run, index, error):
    ref = refs.new_ref(jnp.arange(4).reshape(2, 2))
    for program in (
        lambda ref, _: ref[index],
        lambda ref, _: refs.set(ref, index, 1),
        lambda ref, _: ref.at[index].add(1),
        lambda ref, _: ref.at[index].max(1),
    ):
        with pytest.raises(error):
            run(program, ref, [])
    assert ref[...].tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize("run", [in_jax_jit, in_refs_jit])
def test_traced_masks_and_slice_bounds_are_errors(run):
    ref = refs.new_ref(jnp.arange(4))
    with pytest.raises(refs.errors.RefTypeError, match="mask must be concrete"):
        run(lambda ref, m: ref[m], ref, jnp.array([True, False, True, False]))
    with pytest.raises(refs.errors.RefTypeError, match=r"jax\.ds"):
        run(lambda ref, i: ref[i:], ref, 1)
