"""Errors of custom derivative rules. See `test_errors.py`."""

import jax
import jax.numpy as jnp
import numpy as np

import refs
from refs import errors
from tests.errors.case import X, raises


def with_a_backward_rule_over_a_new_ref(x):
    local = refs.new_ref(jnp.zeros(()), name="local")

    @jax.custom_vjp
    def square(x):
        return x**2

    def backward(x, g):
        local[...] = g
        return (2 * x * g,)

    square.defvjp(lambda x: (x**2, x), backward)
    return square(x)


@raises(
    errors.RefEscapeError,
    "use of ref `local` (created at FILE:N), which was made inside a differentiated function, "
    "when that has ended: a backward rule, which runs later, can't touch it. Use a ref made "
    "outside",
)
def backward_rule_over_a_ref_made_inside(r, i):
    refs.jit(refs.grad(with_a_backward_rule_over_a_new_ref))(1.0)


@raises(
    errors.RefEscapeError,
    "use of ref `local` (created at FILE:N), which was made inside a differentiated function, "
    "when that has ended: a backward rule, which runs later, can't touch it. Use a ref made "
    "outside",
)
def backward_rule_over_a_ref_made_inside_op_by_op(r, i):
    refs.grad(with_a_backward_rule_over_a_new_ref)(1.0)


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
    errors.RefStateError,
    "a custom derivative rule touches ref `r` (created at FILE:N), which the function "
    "that it is the rule of doesn't: touch the ref there too, or write it in the backward"
    " rule",
)
def a_rule_in_lanes_that_touches_a_row(r, i):
    def lane(row, x):
        square = jax.custom_vjp(lambda x: x**2)
        square.defvjp(lambda x: (x**2, row[...]), lambda held, g: (held * g,))
        return square(x)

    refs.grad(lambda xs: refs.vmap(lane)(r, xs).sum())(X)


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
        count[...] = jnp.sin(count[...])
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
    "vmap: use of what other lanes write to ref `count` (created at FILE:N) at FILE:N: "
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


def mapped_with_a_backward_rule_over(ref):
    @jax.custom_vjp
    def double(x):
        return 2 * x

    def backward(_, g):
        ref[...] = jnp.zeros(3)
        return (2 * g,)

    double.defvjp(lambda x: (2 * x, None), backward)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return refs.shard_map(double, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))


@raises(
    errors.RefEscapeError,
    "ref `r` (created at FILE:N) is touched inside of shard_map, which doesn't take refs from "
    "outside: pass it as an argument to `refs.shard_map`. A backward rule may return what it "
    "writes as a cotangent, or apply shard_map inside",
)
def a_backward_rule_inside_of_shard_map(r, i):
    mapped = mapped_with_a_backward_rule_over(r)
    refs.jit(refs.grad(lambda x: mapped(x).sum()))(X)


@raises(
    errors.RefEscapeError,
    "ref `r` (created at FILE:N) is touched inside of shard_map, which doesn't take refs from "
    "outside: pass it as an argument to `refs.shard_map`. A backward rule may return what it "
    "writes as a cotangent, or apply shard_map inside",
)
def a_backward_rule_inside_of_shard_map_op_by_op(r, i):
    mapped = mapped_with_a_backward_rule_over(r)
    refs.grad(lambda x: mapped(x).sum())(X)


@raises(
    errors.RefEscapeError,
    "a backward rule inside of shard_map touches a ref from outside, which can't be written after "
    "the forward pass: return what it writes as a cotangent, or apply shard_map inside",
)
def a_backward_rule_inside_of_shard_map_in_jit(r, i):
    mapped = mapped_with_a_backward_rule_over(r)
    refs.grad(lambda x: jax.jit(mapped)(x).sum())(X)


@raises(
    errors.RefEscapeError,
    "the backward rule at an unknown line touches ref `r` (created at FILE:N) inside of "
    "shard_map, where a ref from outside can't be written after the forward pass: return "
    "what it writes as a cotangent, or apply shard_map inside",
)
def a_backward_rule_inside_of_shard_map_in_lanes(r, i):
    mapped = mapped_with_a_backward_rule_over(r)
    refs.grad(lambda x: refs.vmap(lambda x: mapped(x).sum())(x).sum())(X[None])


@raises(
    errors.RefEscapeError,
    "the backward rule at FILE:N touches ref `local` (created at FILE:N), which is gone "
    "when the backward pass runs: it was made inside the differentiated function, is an "
    "argument of a mapped one, or belongs to a pure one. Use a ref made outside, and "
    "`refs.grad`",
)
def backward_rule_over_a_ref_made_inside_in_jit(r, i):
    refs.grad(jax.jit(with_a_backward_rule_over_a_new_ref))(1.0)


@raises(
    errors.RefValueError,
    "derivative with respect to the contents of ref `r` (created at FILE:N) through the custom "
    "function at FILE:N, which closes over the ref and reads it: its rule says nothing about that, "
    "and the derivative would be zero. Pass the value or the ref to the function as an argument; "
    "if it is to be a constant, pass `jax.lax.stop_gradient(ref[...])`",
)
def derivative_of_what_a_custom_function_closes_over(r, i):
    @jax.custom_vjp
    def scaled(x):
        return x * r[0]

    scaled.defvjp(lambda x: (scaled(x), None), lambda _, g: (g * r[0],))
    refs.grad(lambda r: scaled(2.0))(r)
