"""Errors about what a ref is not: an array, a number, a holder of refs. See `test_errors.py`."""

import refs
from refs import errors
from tests.errors.case import X, raises

# --- Making ---------------------------------------------------------------------------------------


@raises(
    errors.RefTypeError,
    "new_ref of ref `r` (created at FILE:N): a ref can't hold a ref. Copy its value, "
    "`refs.new_ref(other[...])`",
)
def ref_of_a_ref(r, i):
    refs.new_ref(r)


@raises(
    errors.RefTypeError,
    "new_ref of ref `r` (created at FILE:N): a ref can't hold a ref. Copy its value, "
    "`refs.new_ref(other[...])`",
)
def ref_of_a_traced_ref(r, i):
    refs.jit(refs.new_ref)(r)


@raises(
    errors.RefTypeError,
    "new_ref of a list: a ref holds one array. Make a tree of refs with "
    "`jax.tree.map(refs.new_ref, tree)`",
)
def ref_of_a_list_of_refs(r, i):
    refs.new_ref([r, r])


@raises(
    errors.RefTypeError,
    "new_ref of a dict: a ref holds one array. Make a tree of refs with "
    "`jax.tree.map(refs.new_ref, tree)`",
)
def ref_of_a_tree(r, i):
    refs.new_ref({"a": X})


@raises(
    errors.RefTypeError,
    "empty_ref of ref `r` (created at FILE:N): a ref can't hold a ref. Give its array type,"
    " `jax.ShapeDtypeStruct(other.shape, other.dtype)`",
)
def empty_ref_of_a_ref(r, i):
    refs.empty_ref(r)


@raises(
    errors.RefTypeError,
    "empty_ref of a tuple: it takes an array type, `jax.ShapeDtypeStruct(shape, dtype)` for "
    "instance",
)
def empty_ref_of_a_shape(r, i):
    refs.empty_ref((2, 3))


@raises(
    errors.RefTypeError,
    "the truth value of ref `r` (created at FILE:N) is ambiguous: test `ref is not None`, "
    "or its value, `ref[...]`",
)
def truth_value(r, i):
    r or 1


@raises(
    errors.RefTypeError,
    "the truth value of ref `r` (created at FILE:N) is ambiguous: test `ref is not None`, "
    "or its value, `ref[...]`",
)
def truth_value_traced(r, i):
    # Of a ref with more than one element JAX itself says that it is ambiguous.
    refs.jit(lambda r: 1 if r else 0)(refs.new_ref(1.0, name="r"))


NOT_AN_ARRAY = (
    "ref `r` (created at FILE:N) is not an array: use its value, `ref[...] + x`, or update it in "
    "place, `ref[...] += x`"
)


@raises(errors.RefTypeError, NOT_AN_ARRAY)
def arithmetic(r, i):
    r + 1


@raises(errors.RefTypeError, NOT_AN_ARRAY)
def arithmetic_traced(r, i):
    refs.jit(lambda r: -r)(r)


@raises(errors.RefTypeError, NOT_AN_ARRAY)
def comparison(r, i):
    r == 2


@raises(errors.RefTypeError, NOT_AN_ARRAY)
def comparison_traced(r, i):
    refs.jit(lambda r: r < X)(r)


@raises(errors.RefTypeError, NOT_AN_ARRAY)
def arithmetic_after_numpys_array(r, i):
    X + r


@raises(
    errors.RefTypeError,
    "set of ref `r` (created at FILE:N) with 2 arguments: the method takes the value, and an index "
    "by name, `ref.set(value, idx=i)`; the function takes the index first, `refs.set(ref, i, "
    "value)`",
)
def index_before_the_value(r, i):
    r.set(0, 1)


@raises(
    errors.RefTypeError,
    "Ref is the type of refs, not what makes them: make one with `refs.new_ref(value)`",
)
def type_called(r, i):
    refs.Ref(X)


@raises(
    AttributeError,
    "attribute 'value' of ref `r` (created at FILE:N) can't be set: to write what it holds, "
    "`ref[...] = value`",
)
def attribute_set(r, i):
    r.value = X


@raises(
    AttributeError,
    "Ref has no attribute 'mean': if you mean the array's, read it, `ref[...].mean`",
)
def missing_attribute(r, i):
    r.mean()


@raises(
    AttributeError,
    "Ref has no attribute 'mean': if you mean the array's, read it, `ref[...].mean`",
)
def missing_attribute_traced(r, i):
    refs.jit(lambda r: r.mean())(r)


@raises(
    AttributeError,
    "`at` of ref `r` (created at FILE:N) has no attribute 'add' before it is indexed: write "
    "`ref.at[...].add` for the whole of it",
)
def update_without_an_index(r, i):
    r.at.add(1)


@raises(
    errors.RefTypeError,
    "elements of ref `r` (created at FILE:N) can't be deleted, for a ref keeps its shape: make "
    "another, `refs.new_ref(jnp.delete(ref[...], i, axis))`",
)
def deleted_element(r, i):
    del r[0]


@raises(AttributeError, "`at` has no attribute 'sum': index it, `ref.at[...]`")
def sum_without_an_index(r, i):
    r.at.sum()


NO_ROWS = raises(
    errors.RefTypeError,
    "iteration over a 0-d array, or len() of one: ref `x` (created at FILE:N) is a scalar. Read "
    "it, `ref[...]`",
)


@NO_ROWS
def iteration_over_a_scalar(r, i):
    [*refs.new_ref(1.0, name="x")]


@NO_ROWS
def iteration_over_a_traced_scalar(r, i):
    refs.jit(list)(refs.new_ref(1.0, name="x"))


@NO_ROWS
def length_of_a_scalar(r, i):
    len(refs.new_ref(1.0, name="x"))
