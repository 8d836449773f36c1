"""Errors about the places where a ref can't go. See `test_errors.py`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import refs
from refs import errors
from tests.errors.case import X, raises


def local():
    return refs.new_ref(X, name="local")


def outlived(use):
    return raises(
        errors.RefEscapeError,
        f"{use} (created at FILE:N) outside the traced function that it belongs to: there it "
        "stands for a value that isn't known yet. Return its value, `ref[...]`, or return the ref "
        "itself from `refs.jit`",
    )


@outlived("set of ref `local`")
def traced_ref_that_outlived_its_trace(r, i):
    kept = []
    refs.jit(lambda: kept.append(local()))()
    kept[0][0] = 1


@outlived("call of ref `r`")
def traced_argument_that_outlived_its_trace(r, i):
    kept = []
    refs.jit(kept.append)(r)
    refs.jit(lambda q: q[0])(kept[0])


@outlived("use of ref `r`")
def traced_argument_used_in_another_trace(r, i):
    kept = []
    refs.jit(kept.append)(r)
    refs.jit(lambda: kept[0][0])()


@outlived("use of ref `r`")
def traced_argument_used_in_a_derivative(r, i):
    kept = []
    refs.jit(kept.append)(r)
    refs.grad(lambda x: kept[0][0] * x)(1.0)


@outlived("get of ref `r`")
def argument_of_a_jaxpr_used_in_a_derivative(r, i):
    kept = []
    refs.make_jaxpr(kept.append)(r)
    refs.grad(lambda x: kept[0][0] * x)(1.0)


@outlived("use of ref `r`")
def traced_argument_used_in_lanes(r, i):
    kept = []
    refs.jit(kept.append)(r)
    refs.vmap(lambda x: kept[0][0] * x)(np.ones(2))


@raises(
    errors.RefEscapeError,
    "function <lambda> at FILE:N traced for scan returned a mutable array reference of type"
    " Ref{float32[3]}, ref `r` (created at FILE:N) at output tree path result[1], but "
    "mutable array references cannot be returned.\n\n"
    "the body of a loop, a branch or an inner `jax.jit` can use refs, but not return them: "
    "return the value, `ref[...]`, or use the ref where it is in scope",
)
def returned_from_a_scan_body(r, i):
    refs.jit(lambda r: lax.scan(lambda c, _: (c, r), 0, length=2))(r)


@raises(
    errors.RefEscapeError,
    "function local at FILE:N traced for cond returned a mutable array reference of type"
    " Ref{float32[3]}, ref `local` (created at FILE:N), but mutable array references cannot"
    " be returned.\n\n"
    "the body of a loop, a branch or an inner `jax.jit` can use refs, but not return them: "
    "return the value, `ref[...]`, or use the ref where it is in scope",
)
def returned_from_a_branch(r, i):
    refs.jit(lambda: lax.cond(True, local, local))()


@raises(
    errors.RefEscapeError,
    "function <lambda> at FILE:N traced for jit returned a mutable array reference of type "
    "Ref{float32[3]}, ref `r` (created at FILE:N), but mutable array references cannot be "
    "returned.\n\n"
    "the body of a loop, a branch or an inner `jax.jit` can use refs, but not return them: "
    "return the value, `ref[...]`, or use the ref where it is in scope",
)
def returned_from_an_inner_jit(r, i):
    refs.jit(lambda r: (r.at[0].add(1), jax.jit(lambda q: q)(r)))(r)


@raises(
    errors.RefEscapeError,
    "only one reference to a mutable array may be passed as an argument to a function, but "
    "when tracing <lambda> at FILE:N for jit the mutable array reference of type "
    "Ref{float32[3]}, ref `r` (created at FILE:N) appeared at both a and b.\n\n"
    "JAX's own functions take each ref once, either as an argument or closed over: close "
    "over the ref, or use `refs.jit` or `refs.checkpoint`, which take it often. A loop over the "
    "rows of a ref that it uses besides can run over indices, and read `ref[i]`",
)
def passed_twice_to_an_inner_jit(r, i):
    refs.jit(lambda r: jax.jit(lambda a, b: a[0] + b[0])(r, r))(r)


@raises(
    errors.RefTypeError,
    "static argument 0 holds ref `r` (created at FILE:N): a static argument is part of the "
    "compiled program, and a ref changes. Pass it as an ordinary argument",
)
def static_argument(r, i):
    refs.jit(lambda q, x: x, static_argnums=0)(r, 1)


@raises(
    errors.RefTypeError,
    "static argument 'q' holds ref `r` (created at FILE:N): a static argument is part of "
    "the compiled program, and a ref changes. Pass it as an ordinary argument",
)
def static_argument_by_name(r, i):
    refs.jit(lambda *, q: 1, static_argnames="q")(q=(1, r))


@raises(
    errors.RefValueError,
    "Non-hashable static arguments are not supported: argument 1 is of type list: make it "
    "hashable, a tuple for instance, or don't make it static",
)
def static_argument_without_a_hash(r, i):
    refs.jit(lambda q, x: x, static_argnums=1)(r, [1])


@raises(
    errors.RefStateError,
    "trace of `step` under `jax.disable_jit`, where a function is run as it is: trace, lower or "
    "compile it outside",
)
def lowering_without_jit(r, i):
    def step():
        r[0] = 1.0

    with jax.disable_jit():
        refs.jit(step).lower()


@raises(errors.RefTypeError, "Expected a callable value, got 3, for jit")
def jit_of_no_function(r, i):
    refs.jit(3)


@raises(
    errors.RefTypeError,
    "a compiled function was called with arguments of other types, or other aliases among its "
    "refs, than it was compiled for, or with static ones, which it has already:\n"
    "Argument args[0] compiled with Ref{float32[3]} and called with Ref{int8[3]}\n"
    "Argument kwargs['k'][1] compiled with ~float32[] and called with ~int32[]",
)
def compiled_for_others(r, i):
    refs.jit(lambda q, k: q[0]).lower(r, k=(1, 2.0)).compile()(i, k=(1, 2))


@raises(
    errors.RefTypeError,
    "a jax.ShapeDtypeStruct with is_ref stands for no ref in particular: pass a ref, "
    "`refs.empty_ref(...)` for instance. `trace`, `lower` and `eval_shape` of a `refs.jit` "
    "function take it",
)
def abstract_ref(r, i):
    refs.jit(lambda q: q[0])(jax.ShapeDtypeStruct((3,), jnp.float32, is_ref=True))


@raises(
    errors.RefTypeError,
    "Found a JAX Tracer object passed as an argument to a custom_vjp function in a position "
    "indicated by nondiff_argnums as non-differentiable. Tracers cannot be passed as "
    "non-differentiable arguments to custom_vjp functions; instead, nondiff_argnums should only be "
    "used for arguments that can't be or contain JAX tracers, e.g. function-valued arguments. In "
    "particular, array-valued arguments should typically not be indicated as nondiff_argnums."
    "\n\n\n"
    "a ref that is an argument of the traced function, of `refs.jit` for instance, is such a "
    "tracer: let the custom function take it as an ordinary argument, whose rules may read and "
    "write it all the same, or close over the ref",
)
def traced_ref_in_nondiff_argnums(r, i):
    f = jax.custom_vjp(lambda r, x: x, nondiff_argnums=(0,))
    f.defvjp(lambda r, x: (x, None), lambda r, _, g: (g,))
    refs.jit(refs.grad(f, 1))(r, 1.0)


@raises(
    errors.RefTypeError,
    "pack of a tree with ref `r` (created at FILE:N): a ref can't hold a ref. Give its value, "
    "`refs.pack(jax.tree.map(lambda ref: ref[...], tree))`",
)
def pack_of_a_ref(r, i):
    refs.pack({"a": 1.0, "b": r})


@raises(
    errors.RefTypeError,
    "pack of a tree with a str at `p['b']`: its leaves are arrays and scalars. Take out what is "
    "none",
)
def pack_of_a_string(r, i):
    refs.pack({"a": 1.0, "b": "x"}, name="p")
