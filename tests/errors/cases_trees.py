"""Errors about trees of refs. See `test_errors.py`."""

import numpy as np

import refs
from refs import errors
from tests.errors.case import X, raises


@raises(
    errors.RefTypeError,
    "tree.new_ref of a tree with ref `r` (created at FILE:N): a ref can't hold a ref. Copy the "
    "refs, `refs.tree.copy(tree)`",
)
def tree_of_refs_of_refs(r, i):
    refs.tree.new_ref({"r": r})


@raises(
    errors.RefValueError,
    "tree.set of values whose tree isn't that of the refs: it has nothing at `['r'][0]`. Give a "
    "tree like that of `refs.tree.get(tree)`",
)
def tree_of_values_of_another_structure(r, i):
    refs.tree.set({"r": [r]}, {"s": 1})


@raises(
    errors.RefValueError,
    "tree.set of values whose tree isn't that of the refs: it has also `[1]`. Give a tree like "
    "that of `refs.tree.get(tree)`",
)
def tree_of_more_values(r, i):
    refs.tree.set([r], [1, 2])


@raises(
    errors.RefValueError,
    "tree.set of values whose tree isn't that of the refs: some containers are of other types. "
    "Give a tree like that of `refs.tree.get(tree)`",
)
def tree_of_values_in_other_containers(r, i):
    refs.tree.set([r], (1,))


@raises(
    errors.RefValueError,
    "tree.set of another value at `['step']`, where the tree has no ref: it would be lost. Make it "
    "a ref; of a Python number `refs.tree.new_ref` makes none, so begin with an array, "
    "`jnp.asarray(...)`",
)
def tree_with_a_new_number_where_no_ref_is(r, i):
    refs.tree.set({"r": r, "step": 0}, {"r": X, "step": 1})


@raises(
    errors.RefValueError,
    "tree.swap of ref `r` (created at FILE:N): a value of shape (3,) can't be broadcast to the "
    "indexed shape (2, 2)",
)
def tree_with_a_value_that_does_not_fit(r, i):
    wide = refs.new_ref(np.zeros((2, 2), np.float32), name="r")
    refs.tree.swap({"r": r, "wide": wide}, {"r": X, "wide": X})


@raises(
    errors.RefTypeError,
    "tree.borrow inside a traced function, where refs have no memory to lend: read the values, "
    "`refs.tree.get(tree)`, or borrow outside",
)
def tree_borrowed_in_a_traced_function(r, i):
    def f(r):
        with refs.tree.borrow(r):
            pass

    refs.jit(f)(r)


@raises(
    errors.RefStateError,
    "write to ref `r` (created at FILE:N) inside a block `with refs.tree.borrow(...)` that lends "
    "its buffer: it would wait for the block's end. Write it after the block",
)
def write_to_a_borrowed_ref(r, i):
    with refs.tree.borrow({"r": r}):
        r[0] = 1
