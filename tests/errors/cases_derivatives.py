"""Errors of differentiation. See `test_errors.py`."""

import threading

import jax
import jax.numpy as jnp

import refs
from refs import errors
from tests.errors.case import X, raises


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
    "grad with has_aux of a function that returns an array: it must return a pair, (output, "
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
    errors.RefEscapeError,
    "jacfwd of a function that returns ref `made` (created at FILE:N): return its value, "
    "`ref[...]`, or the ref as auxiliary data (`has_aux`)",
)
def a_new_ref_for_a_value_in_a_trace(r, i):
    refs.jit(refs.jacfwd(lambda x: refs.new_ref(x, name="made")))(1.0)


@raises(
    errors.RefValueError,
    "jvp: the primals have the structure PyTreeDef(({'a': *},)), and the tangents PyTreeDef((*,))",
)
def tangents_of_another_structure(r, i):
    refs.jvp(lambda x: x["a"], ({"a": 1.0},), (1.0,))


@raises(
    errors.RefStateError,
    "write of ref `r` (created at FILE:N) at the end of a differentiated function: it has been "
    "written from elsewhere meanwhile, by another thread or by a callback, and that would be lost. "
    "No ref has changed. Differentiate inside of `refs.jit`, whose calls are one operation, or "
    "hold a lock",
)
def a_write_of_what_another_thread_has_written(r, i):
    def loss(x):
        r[0] = x
        other = threading.Thread(target=lambda: r.at[1].add(0))
        other.start()
        other.join()
        return x

    refs.grad(loss)(1.0)


@raises(
    errors.RefTypeError,
    "jvp takes a tuple or list of primals and one of tangents, not a float and a float",
)
def primals_that_are_no_sequence(r, i):
    refs.jvp(lambda x: x, 1.0, 1.0)


@raises(
    errors.RefTypeError,
    "grad with respect to `args[0]`, of dtype key<fry>: it has no derivative",
)
def gradient_of_a_key(r, i):
    refs.grad(jax.random.normal)(jax.random.key(0))


@raises(
    errors.RefTypeError,
    "grad with holomorphic=True with respect to ref `r` (created at FILE:N), of dtype float32: it "
    "must be complex",
)
def holomorphic_gradient_of_a_real_ref(r, i):
    refs.grad(lambda r: r[0], holomorphic=True)(r)


@raises(
    errors.RefTypeError,
    "grad with respect to ref `i` (created at FILE:N), of dtype int8: it has no gradient of that "
    "type. Pass it as another argument, close over it, or set allow_int=True",
)
def gradient_of_an_integer_ref(r, i):
    refs.grad(lambda state: state["w"][0] * 1.0)({"w": r, "step": i})


@raises(
    errors.RefTypeError,
    "value_and_grad with respect to ref `i` (created at FILE:N), of dtype int8: it has no gradient "
    "of that type. Pass it as another argument, close over it, or set allow_int=True",
)
def gradient_of_a_view_of_an_integer_ref_in_a_trace(r, i):
    refs.jit(lambda i: refs.value_and_grad(lambda i: i[...] * 1.0)(i.at[0]))(i)


@raises(
    errors.RefTypeError,
    "jacrev with respect to `args[1][0]['step']`, of dtype int32: it has no gradient of that type. "
    "Pass it as another argument, close over it, or set allow_int=True",
)
def gradient_of_an_integer_beside_a_ref(r, i):
    refs.jacrev(lambda x, state: state[1][0] * x, argnums=(0, 1))(1.0, ({"step": 3}, r))


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


@raises(
    errors.RefValueError,
    "write of a differentiated value to ref `r` (created at FILE:N) at FILE:N: JAX's own "
    "derivatives don't follow it into a ref from outside. Use `refs.grad` (or `refs.vjp`,"
    " `refs.jvp`, `refs.linearize`)",
)
def a_native_derivative_of_a_write(r, i):
    def program(x):
        r[0] = x
        return x

    refs.jit(jax.grad(program))(1.0)


@raises(
    errors.RefTypeError,
    "`jax.grad` can't differentiate with respect to a ref: `refs.grad` can, and the "
    "gradient is an array",
)
def a_native_derivative_with_respect_to_a_ref(r, i):
    refs.jit(jax.grad(lambda q: q[0] ** 2))(r)


@raises(
    errors.RefValueError,
    "grad with respect to argnums=(0, -1): an argument stands twice",
)
def an_argument_that_is_two_variables(r, i):
    refs.grad(lambda a: a**2, argnums=(0, -1))(1.0)


@raises(
    errors.RefValueError,
    "jvp: ref `r` (created at FILE:N) stands for the tangents of two primals, and can get "
    "only one of them in the end: give each a ref of its own",
)
def a_ref_of_two_tangents(r, i):
    refs.jvp(lambda a, b: a[0] * b, (r, 2.0), (r, r))


@raises(
    errors.RefValueError,
    "jvp: the tangent of a view of ref `r` (created at FILE:N) of type float32[2] is of "
    "type float32[3]",
)
def a_tangent_of_another_shape_than_its_view(r, i):
    refs.jvp(lambda v: v[0], (r.at[1:],), (X,))


@raises(
    errors.RefTypeError,
    "with_refs: a cotangent of type float32[3] can't be accumulated into ref `i` (created "
    "at FILE:N) of type int8[3]",
)
def a_gradient_into_a_ref_of_another_type(r, i):
    refs.vjp(lambda x: x**2, X)[1].with_refs(i)


@raises(
    errors.RefValueError,
    "vjp: saveable_args has (True,) for 2 values: it takes a bool, or a tuple with one for each",
)
def flags_of_too_few_primals(r, i):
    refs.vjp(lambda x, y: x * y, 1.0, 2.0, saveable_args=(True,))


@raises(
    errors.RefValueError,
    "checkpoint: prevent_cse has (True, False) for 1 values: it takes a bool, or a tuple with one "
    "for each",
)
def prevent_cse_for_too_many(r, i):
    refs.checkpoint(lambda x: x, prevent_cse=(True, False))(1.0)


@raises(
    errors.RefValueError,
    "linearize: in_nzs has (True,) for a value of structure PyTreeDef(*): it takes a bool, or a "
    "tuple with one for each",
)
def flags_within_a_value(r, i):
    refs.linearize(lambda x: x, 1.0, in_nzs=((True,),))


@raises(
    errors.RefValueError,
    "the pullback needs the value of variable 1 of 2, which it hasn't saved: put it into "
    "`args_res` first",
)
def a_pullback_without_its_values(r, i):
    refs.vjp(lambda x, r: (x * r[...]).sum(), 2.0, r, saveable_args=(True, False))[1](1.0)


@raises(
    errors.RefValueError,
    "`args_res` of the pullback has 1 values, for 2 variables: put a value or a ref into the place "
    "of each",
)
def a_pullback_with_too_few_values(r, i):
    _, pullback = refs.vjp(lambda x, r: (x * r[...]).sum(), 2.0, r)
    pullback.args_res = [r]
    pullback(1.0)


@raises(
    errors.RefValueError,
    "grad: reduce_axes=('batch',) means nothing any more in JAX",
)
def axes_to_reduce(r, i):
    refs.grad(lambda x: x, reduce_axes=("batch",))


@raises(
    errors.RefTypeError,
    "jacfwd with respect to `args[0]`, of dtype int32: it has no gradient of that type. Pass it as "
    "another argument, or close over it",
)
def forward_jacobian_of_an_integer(r, i):
    refs.jacfwd(lambda n: n * 1.0)(1)


@raises(
    errors.RefTypeError,
    "hessian with respect to ref `i` (created at FILE:N), of dtype int8: it has no gradient of "
    "that type. Pass it as another argument, or close over it",
)
def hessian_of_an_integer_ref(r, i):
    refs.hessian(lambda i: i[0] * 1.0)(i)


@raises(
    errors.RefTypeError,
    "hessian of a function that returns an array of shape (3,) and dtype bool: with "
    "holomorphic=False its value must be real",
)
def hessian_of_flags(r, i):
    refs.hessian(lambda r: r[...] > 0)(r)


@raises(errors.RefTypeError, "Expected a callable value, got 3, for hessian")
def hessian_of_no_function(r, i):
    refs.hessian(3)


@raises(
    errors.RefEscapeError,
    "grad of a function that returns ref `r` (created at FILE:N): return its value, "
    "`ref[...]`, or the ref as auxiliary data (`has_aux`)",
)
def gradient_of_a_ref_that_is_closed_over(r, i):
    refs.jit(refs.grad(lambda x: r))(1.0)


@raises(
    errors.RefEscapeError,
    "vjp of a function that returns ref `r` (created at FILE:N): return its value, "
    "`ref[...]`, or the ref as auxiliary data (`has_aux`)",
)
def gradient_of_a_ref_that_is_an_argument(r, i):
    refs.jit(lambda q: refs.vjp(lambda x, q: q, 1.0, q))(r)
