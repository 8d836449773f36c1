"""Errors about values and indices. See `test_errors.py`."""

import jax
import numpy as np

import refs
from refs import errors
from tests.errors.case import X, raises
from tests.tracing.hi_types import Pair

# --- Values ---------------------------------------------------------------------------------------


@raises(
    errors.RefValueError,
    "set of ref `r` (created at FILE:N): a value of shape (4,) can't be broadcast to the "
    "indexed shape (3,)",
)
def wrong_shape(r, i):
    r[...] = np.ones(4, np.float32)


@raises(
    errors.RefValueError,
    "addupdate of ref `r` (created at FILE:N): a value of shape (3,) can't be broadcast to "
    "the indexed shape (2,)",
)
def wrong_shape_traced(r, i):
    refs.jit(r.at[1:].add)(np.ones(3, np.float32))


@raises(
    errors.RefValueError,
    "swap of ref `r` (created at FILE:N): a value of shape (2, 3) can't be broadcast to the"
    " indexed shape (3,)",
)
def wrong_rank(r, i):
    refs.swap(r, ..., np.ones((2, 3), np.float32))


@raises(
    errors.RefValueError,
    "set of ref `r` (created at FILE:N): a value of shape (4,) can't be broadcast to the "
    "indexed shape (1,)",
)
def wrong_shape_of_a_view_of_a_view(r, i):
    r.at[1:].at[1:].set(np.ones(4, np.float32))


@raises(
    errors.RefTypeError,
    "set of ref `i` (created at FILE:N): a value of dtype float32 can't be held by a ref of"
    " dtype int8: cast it yourself, `value.astype(int8)`, if the loss is meant",
)
def wrong_dtype(r, i):
    i[0] = np.float32(1)


@raises(
    errors.RefTypeError,
    "addupdate of ref `i` (created at FILE:N): a Python float can't be held by a ref of dtype "
    "int8: give a number of its kind",
)
def wrong_python_number(r, i):
    refs.addupdate(i, 0, 1.5)


@raises(
    errors.RefValueError,
    "set of ref `r` (created at FILE:N): an integer of 1329 bits is out of the range of float32",
)
def number_that_no_float_holds(r, i):
    r[0] = 10**400


@raises(
    errors.RefValueError,
    "new_ref: Python integer 1099511627776 out of bounds for int32: give an array of a dtype that "
    "holds it",
)
def ref_of_a_list_of_large_numbers(r, i):
    refs.new_ref([2**40])


@raises(errors.RefTypeError, "new_ref of an array of dtype object, of which JAX has no arrays")
def ref_of_an_array_of_objects(r, i):
    refs.new_ref(np.array([None]))


@raises(
    errors.RefTypeError,
    "get of ref `r` (created at FILE:N): the start in jax.ds(start, size) must be an integer "
    "without axes",
)
def block_from_a_float(r, i):
    r[jax.ds(1.5, 2)]


@raises(
    errors.RefTypeError,
    "get of ref `r` (created at FILE:N): the start in jax.ds(start, size) must be an integer "
    "without axes",
)
def block_from_several_places(r, i):
    refs.jit(lambda: r[jax.ds(np.array([1]), 2)])()


@raises(
    errors.RefValueError,
    "get of ref `r` (created at FILE:N): the size in jax.ds(start, size) must not be negative",
)
def block_of_a_negative_size(r, i):
    r[jax.ds(0, -1)]


@raises(
    errors.RefTypeError,
    "in_place of a function over refs: it takes functions of arrays. `refs.jit` compiles in place "
    "by itself",
)
def in_place_of_a_ref_that_is_returned(r, i):
    refs.in_place(lambda x: x)(r)


@raises(
    errors.RefValueError,
    "set of ref `i` (created at FILE:N): Python integer 1099511627776 out of bounds for int32: "
    "give an array of a dtype that holds it",
)
def list_of_large_numbers(r, i):
    i[0:1] = [2**40]


@raises(
    errors.RefValueError,
    "get of ref `r` (created at FILE:N): the step of a slice can't be 0",
)
def slice_without_a_step(r, i):
    r[::0]


@raises(
    errors.RefValueError,
    "set of ref `i` (created at FILE:N): 300 is out of the range of int8, -128 to 127",
)
def number_out_of_range(r, i):
    i[0] = 300


@raises(
    errors.RefTypeError,
    "multiply of ref `r` (created at FILE:N): a value of dtype complex64 can't be held by a"
    " ref of dtype float32: cast it yourself, `value.astype(float32)`, if the loss is meant",
)
def complex_into_real(r, i):
    refs.jit(r.at[0].multiply)(1j)


@raises(
    errors.RefTypeError,
    "set of ref `k` (created at FILE:N): a Python int can't be held by a ref of dtype key<fry>: "
    "give `jax.random.key(seed)`",
)
def number_into_a_key(r, i):
    refs.new_ref(jax.random.key(0), name="k").set(3)


@raises(
    errors.RefTypeError,
    "set of ref `r` (created at FILE:N): a value of type str is not an array or a number for JAX",
)
def value_that_is_no_array(r, i):
    r[0] = "text"


@raises(
    errors.RefTypeError,
    "set of ref `r` (created at FILE:N): a Ref can't hold a Ref: write its value, `ref[...]"
    " = other[...]`",
)
def ref_into_a_ref(r, i):
    r[...] = r


@raises(
    errors.RefTypeError,
    "apply of ref `i` (created at FILE:N): a value of dtype float32 can't be held by a ref "
    "of dtype int8: cast it yourself, `value.astype(int8)`, if the loss is meant",
)
def function_of_another_dtype(r, i):
    i.at[...].apply(lambda x: x / 2)


# --- Indices --------------------------------------------------------------------------------------


@raises(
    errors.RefIndexError,
    "get of ref `r` (created at FILE:N): index 3 is out of bounds for axis 0 of size 3",
)
def index_out_of_bounds(r, i):
    r[3]


@raises(
    errors.RefIndexError,
    "set of ref `r` (created at FILE:N): too many indices: 2 for an array of shape (3,)",
)
def too_many_indices(r, i):
    r[0, 1] = 1


@raises(
    errors.RefIndexError,
    "get of ref `r` (created at FILE:N): too many indices: 1 for an array of shape ()",
)
def too_many_indices_of_a_view(r, i):
    r.at[0].at[0].get()


@raises(
    errors.RefIndexError,
    "get of ref `r` (created at FILE:N): an index can only have a single ellipsis ('...')",
)
def two_ellipses(r, i):
    r[..., ...]


@raises(
    errors.RefTypeError,
    "get of ref `r` (created at FILE:N): an index can't be a Ref: index with its value, "
    "`ref[i[...]]`",
)
def ref_as_index(r, i):
    r[i]


@raises(
    errors.RefTypeError,
    "get of ref `r` (created at FILE:N): an index can't be a Ref: index with its value, "
    "`ref[i[...]]`",
)
def ref_as_index_traced(r, i):
    refs.jit(lambda r, i: r[i[0], i])(r, i)


@raises(
    errors.RefTypeError,
    "get of ref `r` (created at FILE:N): an index of type str; an index is made of "
    "integers, slices, None, ..., integer arrays and concrete boolean masks",
)
def text_as_index(r, i):
    r["a"]


@raises(
    errors.RefTypeError,
    "get of ref `r` (created at FILE:N): an index array must hold integers or booleans, not"
    " float64",
)
def floats_as_index(r, i):
    r[np.ones(2)]


@raises(
    errors.RefTypeError,
    "get of ref `r` (created at FILE:N): [0, [1]] as an index has rows of different lengths",
)
def ragged_list_as_index(r, i):
    r[[0, [1]]]


@raises(
    errors.RefTypeError,
    "get of ref `r` (created at FILE:N): a boolean mask must be concrete, for the result's "
    "shape depends on it, but this one is traced: use `jnp.where(mask, new, ref[...])`, or "
    "integer indices",
)
def traced_mask(r, i):
    refs.jit(lambda m: r[m])(X > 0)


@raises(
    errors.RefIndexError,
    "get of ref `r` (created at FILE:N): an index can't be the scalar False",
)
def scalar_false(r, i):
    r[np.False_]


@raises(
    errors.RefIndexError,
    "set of ref `r` (created at FILE:N): an index can't be the scalar False",
)
def pythons_false(r, i):
    r[False] = 1


@raises(
    errors.RefIndexError,
    "get of ref `r` (created at FILE:N): boolean mask of shape (2,) does not match axis 0 "
    "of size 3",
)
def mask_of_another_shape(r, i):
    r[np.ones(2, bool)]


@raises(
    errors.RefTypeError,
    "get of ref `r` (created at FILE:N): the size in jax.ds(start, size) must be a Python integer",
)
def dynamic_slice_of_traced_size(r, i):
    refs.jit(lambda n: r[jax.ds(0, n)])(2)


@raises(
    errors.RefIndexError,
    "get of ref `r` (created at FILE:N): jax.ds of size 4 on axis 0 of size 3",
)
def dynamic_slice_too_long(r, i):
    r[jax.ds(0, 4)]


@raises(
    errors.RefIndexError,
    "get of ref `r` (created at FILE:N): jax.ds of size 3 and stride 2, which spans 5 elements, on"
    " axis 0 of size 3",
)
def dynamic_slice_too_long_by_its_stride(r, i):
    r[jax.ds(0, 3, 2)]


@raises(
    errors.RefValueError,
    "set of ref `r` (created at FILE:N): the stride in jax.ds(start, size, stride) must be a Python"
    " integer, at least 1",
)
def dynamic_slice_of_one_element_again_and_again(r, i):
    r[jax.ds(0, 3, 0)] = 1.0


@raises(
    errors.RefTypeError,
    "get of ref `r` (created at FILE:N): a slice with traced bounds has no static size: use"
    " `jax.ds(start, size)`",
)
def slice_with_traced_bounds(r, i):
    refs.jit(lambda n: r[:n])(2)


@raises(
    errors.RefIndexError,
    "get of ref `local` (created at FILE:N): index arrays of shapes (2,), (3,) do not "
    "broadcast together",
)
def index_arrays_that_do_not_broadcast(r, i):
    square = refs.new_ref(np.zeros((3, 3)), name="local")
    square[np.arange(2), np.arange(3)]


@raises(errors.RefTypeError, "get needs a Ref, not a ndarray: make one with `refs.new_ref`")
def array_where_a_ref_is_meant(r, i):
    refs.get(X)


@raises(
    errors.RefTypeError,
    "get of a ref, one of JAX's own that holds a value of type PairType(one=ShapedArray"
    "(float32[3])): refs hold arrays. Make a ref of each array that it consists of",
)
def ref_of_a_type_of_the_users(r, i):
    refs.jit(lambda pair: refs.get(jax.new_ref(pair)))(Pair(r[...], r[...]))


@raises(
    errors.RefTypeError,
    "new_ref of a PairType: a ref holds one array. Make a tree of refs with "
    "`jax.tree.map(refs.new_ref, tree)`",
)
def new_ref_of_a_type_of_the_users(r, i):
    refs.jit(lambda pair: refs.new_ref(pair)[...])(Pair(r[...], r[...]))


@raises(
    errors.RefTypeError,
    "set of ref `r` (created at FILE:N): the bounds of a slice must be integers or None, not "
    "('a', None, None)",
)
def slice_with_bounds_of_another_kind(r, i):
    r["a":] = 1


@raises(
    errors.RefTypeError,
    "set of ref `key` (created at FILE:N): a value of dtype uint32 can't be held by a ref of dtype "
    "key<fry>: `jax.random.wrap_key_data` makes a key of its bits, and `key_data` gives them",
)
def bits_into_a_ref_of_a_key(r, i):
    key = refs.new_ref(jax.random.key(0), name="key")
    key[...] = jax.random.key_data(key[...])
