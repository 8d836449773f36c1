"""Errors about trees of refs. See `test_errors.py`."""

import jax
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


NO_ARRAY = (
    "is of type str, no array and no ref: close over it, make it a static field, or pass the tree "
    "without it"
)
NOR_STATIC = NO_ARRAY.replace("static field", "static argument or field")


def model(r):
    return {"layers": [{"w": r, "activation": "gelu"}]}


def apply(model, x):
    [layer] = model["layers"]
    return (x * layer["w"][...]).sum()


@raises(errors.RefTypeError, f"grad: `args[0]['layers'][0]['activation']` {NO_ARRAY}")
def gradient_for_a_tree_with_text(r, i):
    refs.grad(apply)(model(r), X)


@raises(errors.RefTypeError, f"value_and_grad: `args[1]['layers'][0]['activation']` {NO_ARRAY}")
def gradient_for_the_second_argument_with_text(r, i):
    refs.value_and_grad(lambda x, model: apply(model, x), argnums=1)(X, model(r.at[:]))


@raises(errors.RefTypeError, f"jacrev: `args[0]['layers'][0]['activation']` {NO_ARRAY}")
def jacobian_for_a_tree_with_text_in_a_trace(r, i):
    refs.jit(lambda r: refs.jacrev(apply)(model(r), X))(r)


@raises(errors.RefTypeError, f"vjp: `primals[0]['layers'][0]['activation']` {NO_ARRAY}")
def pullback_for_a_tree_with_text(r, i):
    refs.vjp(apply, model(r), X)


@raises(errors.RefTypeError, f"jvp: `primals[0]['layers'][0]['activation']` {NO_ARRAY}")
def derivative_for_a_tree_with_text(r, i):
    refs.jvp(apply, (model(r), X), (model(X), X))


@raises(errors.RefTypeError, f"vmap: `args[0]['layers'][0]['activation']` {NO_ARRAY}")
def lanes_of_a_tree_with_text(r, i):
    refs.vmap(apply, in_axes=(0, None))(model(r), X)


@raises(errors.RefTypeError, f"checkpoint: `args[0]['layers'][0]['activation']` {NOR_STATIC}")
def checkpointed_call_with_text(r, i):
    refs.checkpoint(apply)(model(r), X)


@raises(errors.RefTypeError, f"checkpoint: `args[1]['layers'][0]['activation']` {NOR_STATIC}")
def checkpointed_call_in_a_trace_with_text_after_a_static_argument(r, i):
    layer = refs.checkpoint(lambda kind, model, x: apply(model, x), static_argnums=0)
    refs.jit(lambda x: layer("dense", model(r), x))(X)


@raises(
    errors.RefTypeError, f"call of `apply`: `kwargs['x']['layers'][0]['activation']` {NOR_STATIC}"
)
def compiled_call_in_a_trace_with_text(r, i):
    compiled = refs.jit(apply)
    refs.jit(lambda: compiled(model={"layers": []}, x=model(r)))()


@raises(errors.RefTypeError, f"call of `apply`: `args[1]['layers'][0]['activation']` {NOR_STATIC}")
def compiled_call_with_text_after_a_static_argument(r, i):
    @refs.jit(static_argnums=0)
    def apply(kind, model):
        return model["layers"][0]["w"][...]

    apply("dense", model(r))


@raises(errors.RefTypeError, f"cond: `operands[1]['activation']` {NO_ARRAY}")
def branch_with_text_among_its_operands(r, i):
    refs.cond(True, lambda r, x: None, lambda r, x: None, r, {"activation": "gelu"})


@raises(errors.RefTypeError, f"switch: `operands[0]['layers'][0]['activation']` {NO_ARRAY}")
def switch_with_text_among_its_operands(r, i):
    refs.switch(0, [lambda m: None], model(r))


@raises(errors.RefTypeError, f"scan: `init['activation']` {NO_ARRAY}")
def scan_with_text_in_its_carry(r, i):
    refs.scan(lambda carry, x: (carry, None), {"activation": "gelu"}, r)


@raises(errors.RefTypeError, f"scan: `xs['layers'][0]['activation']` {NO_ARRAY}")
def scan_with_text_among_its_rows(r, i):
    refs.scan(lambda carry, x: (carry, None), 0, model(r))


@raises(errors.RefTypeError, f"make_jaxpr: `args[1]['layers'][0]['activation']` {NOR_STATIC}")
def jaxpr_with_text_in_a_tree(r, i):
    refs.make_jaxpr(lambda n, model: None, static_argnums=0)("n", model(r))


@raises(errors.RefTypeError, f"reversible: `kwargs['how']` {NOR_STATIC}")
def reversible_with_text(r, i):
    refs.reversible(lambda r, how: None)(r, how="gelu")


OF_A_VIEW = (
    "a tree with a part of ref `r` (created at FILE:N): it takes whole refs. Put the ref in the "
    "place of `ref.at[i]`, or use the view by itself, `view[...]`"
)


@raises(errors.RefTypeError, f"tree.get of {OF_A_VIEW}")
def values_of_a_tree_with_a_view(r, i):
    refs.tree.get({"v": r.at[0]})


@raises(errors.RefTypeError, f"tree.set of {OF_A_VIEW}")
def values_for_a_tree_with_a_view(r, i):
    refs.tree.set({"v": r.at[0]}, {"v": 1.0})


@raises(errors.RefTypeError, f"tree.freeze of {OF_A_VIEW}")
def end_of_a_tree_with_a_view(r, i):
    refs.tree.freeze({"v": r.at[0]})


@raises(
    errors.RefTypeError,
    "tree.set of ref `d` (created at FILE:N): a value of dtype float32 can't be held by a ref of "
    "dtype float64: 64-bit types are disabled. Write it in `with jax.enable_x64(True):`",
)
def values_of_64_bits_where_those_are_disabled(r, i):
    with jax.enable_x64(True):
        d = refs.new_ref(np.ones(3), name="d")
    refs.tree.set([d], [np.ones(3)])
