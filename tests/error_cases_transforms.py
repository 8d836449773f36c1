"""Errors of differentiation, of vmap and of loops. See `test_errors.py`."""

import jax
import jax.numpy as jnp

import refs
from refs import errors
from tests.error_case import X, raises

# --- Differentiation ------------------------------------------------------------------------------


@raises(
    errors.RefEscapeError,
    "the backward rule at FILE:N touches ref `local` (created at FILE:N), which is gone "
    "when the backward pass runs: it was made inside the differentiated function, or "
    "belongs to a pure one. Use a ref made outside, and `refs.grad`",
)
def backward_rule_over_a_ref_made_inside(r, i):
    def program(x):
        local = refs.new_ref(jnp.zeros(()), name="local")

        @jax.custom_vjp
        def square(x):
            return x**2

        def backward(x, g):
            local[...] = g
            return (2 * x * g,)

        square.defvjp(lambda x: (x**2, x), backward)
        return square(x)

    refs.grad(program)(1.0)


@raises(
    errors.RefTypeError,
    "grad with respect to argnums=1 of a call with 1 positional arguments: pass what is "
    "differentiated by position",
)
def argnums_beyond_the_arguments(r, i):
    refs.grad(lambda x: x, argnums=1)(1.0)


@raises(
    errors.RefValueError,
    "grad with respect to ref `r` (created at FILE:N) twice: its contents are one "
    "variable. Differentiate with respect to one of the arguments that hold it",
)
def a_ref_that_is_two_variables(r, i):
    refs.grad(lambda a, b: a[0] * b[0], argnums=(0, 1))(r, r)


@raises(
    errors.RefTypeError,
    "grad with has_aux of a function that returns a int: it must return a pair, (output, "
    "auxiliary data)",
)
def auxiliary_data_that_is_missing(r, i):
    refs.grad(lambda x: x**2, has_aux=True)(1.0)


@raises(
    errors.RefEscapeError,
    "vjp of a function that returns ref `r` (created at FILE:N): return its value, "
    "`ref[...]`, or the ref as auxiliary data (`has_aux`)",
)
def a_ref_for_a_value(r, i):
    refs.vjp(lambda x: r, 1.0)


@raises(
    errors.RefEscapeError,
    "jacfwd of a function that returns ref `made` (created at FILE:N): return its value, "
    "`ref[...]`, or the ref as auxiliary data (`has_aux`)",
)
def a_new_ref_for_a_value(r, i):
    refs.jacfwd(lambda x: refs.new_ref(x, name="made"))(1.0)


@raises(
    errors.RefValueError,
    "jvp: the primals have the structure PyTreeDef(({'a': *},)), and the tangents PyTreeDef((*,))",
)
def tangents_of_another_structure(r, i):
    refs.jvp(lambda x: x["a"], ({"a": 1.0},), (1.0,))


@raises(
    errors.RefTypeError,
    "jvp takes a tuple or list of primals and one of tangents, not a float and a float",
)
def primals_that_are_no_sequence(r, i):
    refs.jvp(lambda x: x, 1.0, 1.0)


@raises(
    errors.RefTypeError,
    "grad with respect to a variable of dtype key<fry>: it has no derivative",
)
def gradient_of_a_key(r, i):
    refs.grad(jax.random.normal)(jax.random.key(0))


@raises(
    errors.RefTypeError,
    "grad with holomorphic=True with respect to a variable of dtype float32: it must be complex",
)
def holomorphic_gradient_of_a_real_ref(r, i):
    refs.grad(lambda r: r[0], holomorphic=True)(r)


@raises(
    errors.RefTypeError,
    "grad with respect to a variable of dtype int8: it has no gradient of that type. "
    "Leave it out of `argnums`, or set allow_int=True, which makes its gradient one of "
    "dtype float0",
)
def gradient_of_an_integer_ref(r, i):
    refs.grad(lambda i: i[0] * 1.0)(i)


@raises(
    errors.RefTypeError,
    "grad of a function that returns a tuple: its value must be a scalar. With "
    "has_aux=True it may return a scalar and anything else",
)
def gradient_of_two_values(r, i):
    refs.grad(lambda x: (x, x))(1.0)


@raises(
    errors.RefTypeError,
    "grad of a function that returns an array of shape (3,): its value must be a scalar. "
    "`refs.jacrev` differentiates arrays",
)
def gradient_of_an_array(r, i):
    refs.grad(lambda r: r[...])(r)


@raises(
    errors.RefTypeError,
    "grad of a function that returns a scalar of dtype int32: with holomorphic=False its "
    "value must be real",
)
def gradient_of_an_integer(r, i):
    refs.grad(lambda x: 3)(1.0)


@raises(
    errors.RefValueError,
    "with_refs: the primals have the structure PyTreeDef((*, *)), and the arguments "
    "PyTreeDef((*,))",
)
def gradient_refs_of_another_structure(r, i):
    refs.vjp(lambda x, y: x * y, 1.0, 2.0)[1].with_refs(r)


@raises(
    errors.RefTypeError,
    "with_refs takes a Ref, `jax.ad.GradValue()` or `jax.ad.DontWant()` for each primal, "
    "not a ArrayImpl",
)
def gradient_into_an_array(r, i):
    refs.vjp(lambda x: x, 1.0)[1].with_refs(jnp.zeros(()))


@raises(
    errors.RefValueError,
    "the output of the differentiated function has the structure PyTreeDef(*), and the "
    "cotangent PyTreeDef((*, *))",
)
def cotangent_of_another_structure(r, i):
    refs.vjp(lambda x: x, 1.0)[1]((1.0, 1.0))


# --- vmap -----------------------------------------------------------------------------------------


@raises(
    errors.RefValueError,
    "vmap: lane-dependent write to ref `r` (created at FILE:N) at FILE:N: all lanes share"
    " it, so after the map it would depend on the order of the 3 lanes. Map it "
    "(`in_axes`), only accumulate into it (`ref[...] += …`), or loop (`refs.scan`)",
)
def lanes_that_write_what_they_share(r, i):
    def lane(x):
        r[0] = x

    refs.vmap(lane)(X)


@raises(
    errors.RefValueError,
    "vmap: use of what other lanes write to ref `i` (created at FILE:N) at FILE:N: all "
    "lanes share it, so after the map it would depend on the order of the 3 lanes. Map it"
    " (`in_axes`), only accumulate into it (`ref[...] += …`), or loop (`refs.scan`)",
)
def lanes_that_read_what_they_accumulate(r, i):
    def lane(x):
        i[0] += 1
        return i[0]

    refs.vmap(lane)(X)


@raises(
    errors.RefValueError,
    "vmap: use of what other lanes write to ref `r` (created at FILE:N) at FILE:N: all "
    "lanes share it, so after the map it would depend on the order of the 3 lanes. Map it"
    " (`in_axes`), only accumulate into it (`ref[...] += …`), or loop (`refs.scan`)",
)
def lanes_that_overwrite_and_accumulate(r, i):
    def lane(x):
        r[0] = 5
        r[1] += x

    refs.vmap(lane)(X)


@raises(
    errors.RefValueError,
    "vmap: use of what other lanes write to a ref at FILE:N: all lanes share it, so after"
    " the map it would depend on the order of the 3 lanes. Map it (`in_axes`), only "
    "accumulate into it (`ref[...] += …`), or loop (`refs.scan`)",
)
def lanes_that_swap_a_nameless_ref(r, i):
    nameless = jax.new_ref(jnp.zeros(3))

    def lane(x):
        return refs.swap(nameless, 0, 1.0)

    refs.vmap(lane)(X)


@raises(
    errors.MissingRuleError,
    "lanes accumulate into a shared ref through several indices, or a reshaped or "
    "transposed view of it: index the ref once",
)
def lanes_that_accumulate_into_a_reshaped_ref(r, i):
    native = jax.new_ref(jnp.zeros((3, 1)))

    def lane(x):
        jax.jit(lambda q: jax.ref.addupdate(q.reshape(3), 0, x))(native)

    refs.vmap(lane)(X)


@raises(
    errors.RefValueError,
    "vmap: ref `table` (created at FILE:N) is passed twice, mapped over axes 0 and 1: "
    "each lane has one view of it",
)
def a_ref_mapped_over_two_axes(r, i):
    table = refs.new_ref(jnp.zeros((2, 2)), name="table")
    refs.vmap(lambda a, b: None, in_axes=(0, 1))(table, table)


@raises(
    errors.RefValueError,
    "vmap over arguments with 2 and 3 lanes: they must have the same number",
)
def lanes_of_different_number(r, i):
    refs.vmap(lambda a, b: None)(r, jnp.zeros(2))


@raises(
    errors.RefValueError,
    "vmap over no argument: nothing in `in_axes` is an axis. Give one, or axis_size",
)
def lanes_of_no_number(r, i):
    refs.vmap(lambda a: None, in_axes=None)(r)


@raises(
    errors.RefValueError,
    "vmap over ref `r` (created at FILE:N), which the function also closes over: that "
    "would be the whole ref, in every lane. Use the argument only",
)
def a_ref_mapped_and_closed_over(r, i):
    def lane(row):
        row[...] = r[0]

    refs.vmap(lane)(r)


@raises(
    errors.RefTypeError,
    "vmap: in_axes has a str for ref `r` (created at FILE:N): it takes integers and None",
)
def an_axis_that_is_no_integer(r, i):
    refs.vmap(lambda a: None, in_axes=("rows",))(r)


@raises(
    errors.RefValueError,
    "vmap over axis 1 of ref `r` (created at FILE:N) of shape (3,), which has no such axis",
)
def an_axis_that_is_not_there(r, i):
    refs.vmap(lambda a: None, in_axes=1)(r)


@raises(
    errors.RefValueError,
    "vmap: in_axes=(0, 0) doesn't fit the 1 positional arguments: it must be an integer, "
    "None, or a tuple with an entry for each, of which every one is a prefix of the "
    "argument's structure",
)
def axes_for_other_arguments(r, i):
    refs.vmap(lambda a: None, in_axes=(0, 0))(r)


@raises(
    errors.RefTypeError,
    "vmap over a view of ref `r` (created at FILE:N): map over the ref, or an index, and "
    "take the view inside",
)
def lanes_over_a_view(r, i):
    refs.vmap(lambda view: None)(r.at[:2])


# --- Loops ----------------------------------------------------------------------------------------


@raises(
    errors.RefTypeError,
    "scan over a view of ref `r` (created at FILE:N): scan over the ref, or over indices,"
    " and take the view inside",
)
def scan_over_a_view(r, i):
    refs.scan(lambda carry, row: (carry, None), 0, r.at[:2])


@raises(
    errors.RefTypeError,
    "while_loop: its carry holds ref `r` (created at FILE:N), which stays the same ref: "
    "close over it",
)
def a_loop_that_carries_a_ref(r, i):
    refs.while_loop(lambda carry: False, lambda carry: carry, r)
