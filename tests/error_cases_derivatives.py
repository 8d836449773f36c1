"""Errors of differentiation. See `test_errors.py`."""

import jax
import jax.numpy as jnp
import numpy as np

import refs
from refs import errors
from tests.error_case import X, raises


@raises(
    errors.RefEscapeError,
    "the backward rule at FILE:N touches ref `local` (created at FILE:N), which is gone "
    "when the backward pass runs: it was made inside the differentiated function, is an "
    "argument of a mapped one, or belongs to a pure one. Use a ref made outside, and "
    "`refs.grad`",
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
    errors.RefStateError,
    "a custom derivative rule touches ref `i` (created at FILE:N), which the function "
    "that it is the rule of doesn't: touch the ref there too, or write it in the backward"
    " rule",
)
def a_rule_in_lanes_that_touches_more_than_its_function(r, i):
    square = jax.custom_jvp(lambda x: x**2)
    square.defjvp(lambda p, t: (square(*p), i[0] * t[0]))
    refs.grad(lambda x: refs.vmap(square)(x).sum())(jnp.ones(2))


@raises(
    errors.RefEscapeError,
    "the backward rule at FILE:N touches ref `local` (created at FILE:N), which is gone "
    "when the backward pass runs: it was made inside the differentiated function, is an "
    "argument of a mapped one, or belongs to a pure one. Use a ref made outside, and "
    "`refs.grad`",
)
def a_residual_that_was_made_inside(r, i):
    f = jax.custom_vjp(lambda q, x: 2 * x)
    f.defvjp(lambda q, x: (2 * x, q), lambda q, g: (None, 2 * g))
    refs.grad(lambda x: f(refs.new_ref(0.0, name="local"), x))(1.0)


@raises(
    errors.RefTypeError,
    "get of ref `r` (created at FILE:N): in the tangent of a view, the index is a tangent too, "
    "and names nothing: let the function with the derivative rule take the ref and the index apart",
)
def a_rule_that_uses_the_tangent_of_a_view(r, i):
    f = jax.custom_jvp(lambda view, x: view[0] * x)
    f.defjvp(lambda p, t: (f(*p), p[0][0] * t[1] + t[0][0] * p[1]))
    refs.grad(lambda x: f(r.at[jnp.array([1, 2])], x))(1.0)


@raises(
    errors.RefTypeError,
    "get of ref `r` (created at FILE:N): in the tangent of a view, the index is a tangent too, "
    "and names nothing: let the function with the derivative rule take the ref and the index apart",
)
def a_tangent_as_index(r, i):
    refs.jit(lambda: r[np.zeros(2, jax.dtypes.float0)])()


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


def counted(call_back=False):
    """A custom function that counts its calls in a float ref."""
    count = refs.new_ref(0.0, name="count")

    @jax.custom_jvp
    def double(x):
        count[...] += 1
        if call_back:
            jax.debug.callback(lambda: None)
        return 2 * x

    @double.defjvp
    def rule(primals, tangents):
        count[...] = 1.0
        return 2 * primals[0], 2 * tangents[0]

    return count, double


@raises(
    errors.RefValueError,
    "vmap: the derivative rule of the custom function at an unknown line reads or "
    "overwrites ref `count` (created at FILE:N), which all lanes share and the function "
    "only accumulates into: only accumulate in the rule, too",
)
def a_rule_that_overwrites_what_lanes_accumulate(r, i):
    _, double = counted()
    refs.grad(lambda x: refs.vmap(double)(x).sum())(X)


@raises(
    errors.RefValueError,
    "vmap: use of what other lanes write to ref `count` (created at FILE:N) at an unknown line: "
    "all lanes share it, so after the map it would depend on the order of the 3 lanes. Map it "
    "(`in_axes`), only accumulate into it (`ref[...] += …`, at an index array `ref.at[i].add(…)`; "
    "or only `.multiply`, only `.min` or only `.max`), or loop (`refs.scan`)",
)
def a_rule_of_each_lane_that_overwrites_what_lanes_accumulate(r, i):
    _, double = counted()
    refs.vmap(refs.grad(double))(X)


@raises(
    errors.RefValueError,
    "the derivative of what refs hold goes through the custom function at FILE:N, which "
    "calls back into Python, and would once more: call back outside of it, or write the "
    "refs there",
)
def a_derivative_through_a_custom_function_that_calls_back(r, i):
    count, double = counted(call_back=True)

    def program(x):
        count[...] = x
        return double(x) + count[...]

    refs.grad(program)(1.0)


@raises(
    errors.RefEscapeError,
    "the backward rule at an unknown line touches ref `r` (created at FILE:N) inside of "
    "shard_map, where a ref from outside can't be written after the forward pass: return "
    "what it writes as a cotangent, or apply shard_map inside",
)
def a_backward_rule_inside_of_shard_map(r, i):
    @jax.custom_vjp
    def double(x):
        return 2 * x

    def backward(_, g):
        r[...] = jnp.zeros(3)
        return (2 * g,)

    double.defvjp(lambda x: (2 * x, None), backward)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = refs.shard_map(double, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
    refs.grad(lambda x: mapped(x).sum())(X)


@raises(
    errors.RefValueError,
    "vjp: saveable_args has (True,) for 2 values: it takes a bool, or a tuple with one for each",
)
def flags_of_too_few_primals(r, i):
    refs.vjp(lambda x, y: x * y, 1.0, 2.0, saveable_args=(True,))


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
    "grad: reduce_axes=('batch',) means nothing any more in JAX",
)
def axes_to_reduce(r, i):
    refs.grad(lambda x: x, reduce_axes=("batch",))
