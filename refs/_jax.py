"""The only door to JAX's private names, and the only place where its versions differ.

Everything that `refs` takes from `jax._src` is imported here under a plain name, and every
difference between the oldest supported JAX (0.10.2) and the newest is decoded here, so that the
rest of the library reads one vocabulary. `tests/test_jax.py` checks each name and each decoded
parameter, and says which one broke.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
from jax._src import ad_util, compute_on, config, core, custom_derivatives, source_info_util
from jax._src import xla_metadata as _xla_metadata
from jax._src.ad_checkpoint import remat_p as remat_p
from jax._src.array import ArrayImpl as ArrayImpl
from jax._src.indexing import Slice as Slice
from jax._src.interpreters import batching, mlir
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.interpreters import pxla as _pxla
from jax._src.lax import lax as _lax
from jax._src.lax.control_flow.conditionals import cond_p as cond_p
from jax._src.lax.control_flow.loops import scan_p as scan_p
from jax._src.lax.control_flow.loops import while_p as while_p
from jax._src.pjit import jit_p as jit_p
from jax._src.shard_map import shard_map_p as shard_map_p
from jax._src.state import primitives as _state
from jax._src.state.discharge import run_state_p as run_state_p
from jax._src.state.indexing import NDIndexer as NDIndexer
from jax._src.state.types import AbstractRef as AbstractRef
from jax._src.state.types import AccumEffect as AccumEffect
from jax._src.state.types import ReshapeTransform as ReshapeTransform
from jax._src.state.types import TransposeTransform as TransposeTransform

# ---------------------------------------------------------------------------------------------
# Primitives

get_p = _state.get_p
swap_p = _state.swap_p
addupdate_p = _state.addupdate_p
new_ref_p = core.ref_p
empty_ref_p = core.empty_ref_p
freeze_p = core.freeze_p
free_ref_p = core.free_ref_p
accum_grad_in_ref_p = core.accum_grad_in_ref_p
custom_jvp_call_p = custom_derivatives.custom_jvp_call_p
custom_vjp_call_p = custom_derivatives.custom_vjp_call_p
# Calls whose jaxpr is run as it stands. On the newest JAX these are one primitive.
inlined_call_primitives = (core.call_p, core.closed_call_p)
# Calls that carry one jaxpr and some metadata; the oldest JAX doesn't have them all.
metadata_call_primitives = tuple(
    getattr(module, name)
    for module, name in (
        (_lax, "composite_p"),
        (compute_on, "compute_on_p"),
        (_xla_metadata, "xla_metadata_call_p"),
    )
    if hasattr(module, name)
)


# ---------------------------------------------------------------------------------------------
# Types, tracers and traces

Jaxpr = core.Jaxpr
# The newest JAX has one class for a jaxpr with and without its constants.
ClosedJaxpr = getattr(core, "ClosedJaxpr", core.Jaxpr)
Literal = core.Literal
Tracer = core.Tracer
NativeRef = core.Ref
aval_method = core.aval_method
aval_property = core.aval_property
typeof = core.typeof
zeros_like_aval = ad_util.zeros_like_aval
shaped_abstractify = core.shaped_abstractify
mapped_aval = core.mapped_aval
new_ref = core.new_ref
freeze = core.freeze
free_ref = core.free_ref


def at_top_level() -> bool:
    """True when nothing is being traced: operations run at once."""
    return core.trace_ctx.is_top_level()


def current_trace() -> Any:
    return core.trace_ctx.trace


def is_jit_disabled() -> bool:
    return bool(config.disable_jit.value)


def trace_context() -> Any:
    """What a trace depends on besides its arguments: x64, default precision, the mesh …"""
    return config.trace_context()


# The lines that jaxprs and HLO point to are the user's, not ours.
source_info_util.register_exclusion(os.path.dirname(os.path.abspath(__file__)) + os.sep)


def var_of(tracer: Any) -> Any:
    """The jaxpr variable that a tracer of a jaxpr trace stands for, or None."""
    var = getattr(tracer, "val", None)
    return var if isinstance(var, core.Var) else None


def retype(ref: Any, wrap: Callable[[Any], Any]) -> Any:
    """Gives a ref that JAX has made in a trace our ref type: `wrap` of the type that it has."""
    if not isinstance(ref, core.Tracer):
        ref._aval = wrap(ref._aval)
        return ref
    if isinstance(ref, _partial_eval.DynamicJaxprTracer):
        ref.val.aval = wrap(ref.aval)
    else:  # Tracers of differentiation and of batching wrap a ref.
        retype(ref.primal if hasattr(ref, "primal") else ref.val, wrap)
    ref.aval = wrap(ref.aval)
    return ref


def varying_like(ref: Any, value: Any) -> Any:
    """`value`, varying over the devices of a `shard_map` as the ref that it is written to does."""
    # The oldest JAX does this itself when it must.
    cast = getattr(_state, "_insert_pvary_for_write", None)
    return value if cast is None else cast(ref, value)


def varying_axes(x: Any) -> frozenset[Any]:
    """The axes of a `shard_map` that a value, what a ref holds or a type says varies over."""
    aval = x if isinstance(x, core.AbstractValue) else typeof(x)
    mat = getattr(getattr(aval, "inner_aval", aval), "mat", None)
    return mat.varying if mat is not None else frozenset()


def is_ref_type(aval: Any) -> bool:
    return isinstance(aval, AbstractRef)


def register_ref_type(ref_type: type, wrap: Callable[[Any, Any], Any]) -> None:
    """Makes `ref_type`, a subclass of AbstractRef, pass wherever JAX looks types up by class.

    `wrap(type, source)` makes one of them of what JAX derives from another, `source`.
    """

    def wrapping(handler: Callable[..., Any]) -> Callable[..., Any]:
        def handle(*args: Any) -> Any:
            [source] = [a for a in args if isinstance(a, ref_type)]
            return wrap(handler(*args), source)

        return handle

    map_ref, unmap_ref = core.aval_mapping_handlers[AbstractRef]
    core.aval_mapping_handlers[ref_type] = (wrapping(map_ref), wrapping(unmap_ref))
    core.shard_aval_handlers[ref_type] = wrapping(core.shard_aval_handlers[AbstractRef])
    core.unshard_aval_handlers[ref_type] = core.unshard_aval_handlers[AbstractRef]
    ad_util.aval_zeros_likers[ref_type] = ad_util.aval_zeros_likers[AbstractRef]


def register_handle(handle: type, buffers_of: Callable[[Sequence[Any]], list[Any]]) -> None:
    """Lets JAX's own jit take `handle`s as arguments."""

    def shard_handles(
        handles: Sequence[Any], shardings: Any, layouts: Any, copy_semantics: Any
    ) -> Any:
        return _pxla.shard_args(shardings, layouts, copy_semantics, buffers_of(handles))

    _pxla.shard_arg_handlers[handle] = shard_handles


def register_abstract_argument(spec: type, aval_of: Callable[[Any], Any]) -> None:
    """Lets `jax.make_jaxpr` take `spec`s as arguments of the type `aval_of(spec)`."""
    core.pytype_aval_mappings[spec] = aval_of


def def_effectful_abstract_eval(primitive: Any) -> Callable[..., Any]:
    """Registers the types of a primitive's outputs, and the effects that it has."""
    return primitive.def_effectful_abstract_eval


def register_batching(primitive: Any, rule: Callable[..., Any]) -> None:
    """Registers how `jax.vmap` batches a primitive: `rule(axis size, operands, axes, **params)`."""

    def batch(axis_data: Any, args: Any, axes: Any, **params: Any) -> Any:
        return rule(axis_data.size, args, axes, **params)

    batching.fancy_primitive_batchers[primitive] = batch


def register_lowering(primitive: Any, fun: Callable[..., Any]) -> None:
    """Gives a primitive the meaning of a JAX function, run op by op and compiled."""
    primitive.def_impl(fun)
    mlir.register_lowering(primitive, mlir.lower_fun(fun, multiple_results=False))


# ---------------------------------------------------------------------------------------------
# Jaxprs and equations


def as_closed(jaxpr: Any) -> Any:
    """A jaxpr with its constants."""
    if ClosedJaxpr is Jaxpr or isinstance(jaxpr, ClosedJaxpr):
        return jaxpr
    return core.ClosedJaxpr(jaxpr, ())


def jaxprs_in(params: dict[str, Any]) -> Iterator[Any]:
    """The closed jaxprs among an equation's parameters."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, Jaxpr | ClosedJaxpr):
                yield as_closed(item)


def replace_jaxpr(params: dict[str, Any], new: Any, more_outputs: int) -> dict[str, Any]:
    """The parameters of a one-jaxpr call with that jaxpr replaced by one with more outputs."""
    [key] = [k for k, v in params.items() if isinstance(v, Jaxpr | ClosedJaxpr)]
    params = {**params, key: new}
    if "out_memory_spaces" in params:
        params["out_memory_spaces"] += (jax.memory.Space.Device,) * more_outputs
    return params


def bind_eqn(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluates an equation as it is."""
    return bind(eqn.primitive, args, eqn.params)


def bind(primitive: Any, args: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Evaluates a primitive, given its parameters as they stand in an equation."""
    out = primitive.bind(*args, **primitive.get_bind_params(params))
    return list(out) if primitive.multiple_results else [out]


def eval_jaxpr(closed: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr as it is, with other constants than its own."""
    return core.eval_jaxpr(closed.jaxpr, consts, *args)


@contextmanager
def at_source_of(eqn: Any) -> Iterator[None]:
    """Restores the user's line, name scope and context managers of an equation."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with (
        source_info_util.user_context(eqn.source_info.traceback, name_stack=stack),
        eqn.ctx.manager,
    ):
        yield


def user_line(eqn: Any) -> str:
    """`file.py:12` of the user's code that made the equation."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    return f"{os.path.basename(frame.file_name)}:{frame.start_line}" if frame else "an unknown line"


def can_fail(closed: Any) -> bool:
    """True where running the jaxpr may raise: it calls back into Python, or out of XLA."""
    return any(
        "callback" in eqn.primitive.name
        or eqn.primitive.name in ("debug_print", "ffi_call")
        or any(can_fail(inner) for inner in jaxprs_in(eqn.params))
        for eqn in closed.jaxpr.eqns
    )


def strong(x: Any) -> Any:
    """`x` as an array that is not weakly typed."""
    x = jax.numpy.asarray(x)
    weak = getattr(x, "weak_type", False)  # PRNG keys don't say.
    return jax.lax.convert_element_type(x, x.dtype) if weak else x


def commit(x: Any) -> Any:
    """The same buffer, committed to its device as a ref's must be (the newest JAX checks)."""
    return x if x.committed else jax.device_put(x, x.sharding)


# ---------------------------------------------------------------------------------------------
# Parameters whose spelling depends on the version


class ScanParams(NamedTuple):
    jaxpr: Any
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int


def scan_params(params: dict[str, Any]) -> ScanParams:
    if "ft_in" in params:
        num_consts, num_carry, _ = (len(part) for part in params["ft_in"].unpack())
    else:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    return ScanParams(
        as_closed(params["jaxpr"]),
        num_consts,
        num_carry,
        params["length"],
        params["reverse"],
        params["unroll"],
    )


class JitParams(NamedTuple):
    jaxpr: Any
    name: str
    inline: Any
    keep_unused: bool
    in_shardings: tuple[Any, ...]
    out_shardings: tuple[Any, ...]
    compiler_options: dict[str, Any]


def jit_params(params: dict[str, Any]) -> JitParams:
    return JitParams(
        as_closed(params["jaxpr"]),
        params["name"],
        params["inline"],
        params["keep_unused"],
        params["in_shardings"],
        params["out_shardings"],
        dict(params["compiler_options_kvs"]),
    )


def is_unspecified(sharding: Any) -> bool:
    return type(sharding).__name__ == "UnspecifiedValue"


class JvpRule(NamedTuple):
    """A user's JVP rule as jaxprs: `trace(zeros) -> (closed jaxpr, which output tangents are 0)`.

    Inputs of the jaxpr are the primals after the first `num_consts`, then the tangents that are
    not symbolically zero; outputs are the primals, then the tangents not zero.
    """

    num_consts: int
    symbolic_zeros: bool
    trace: Callable[[Sequence[bool]], tuple[Any, Sequence[Any], Sequence[bool]]]


def jvp_rule(params: dict[str, Any]) -> JvpRule:
    return JvpRule(
        params["num_consts"],
        params["symbolic_zeros"],
        lambda zeros: params["jvp_jaxpr_fun"].call_wrapped(*zeros),
    )


class VjpRule(NamedTuple):
    """A user's VJP rule: `fwd(nonzeros) -> (jaxpr, consts)` and `bwd(residuals, cotangents)`.

    The forward jaxpr takes the primals after the first `num_consts` and returns the residuals that
    are not inputs, then the primal outputs. `residual_forwards`, to be called after `fwd`, says
    for each residual which primal it is, or None. `bwd` returns a cotangent, or a symbolic zero
    (`is_symbolic_zero`), for each primal after the first `num_consts`.
    """

    num_consts: int
    symbolic_zeros: bool
    fwd: Callable[[Sequence[bool]], tuple[Any, Sequence[Any]]]
    residual_forwards: Callable[[], Sequence[int | None]]
    bwd: Callable[[Sequence[Any], Sequence[Any]], list[Any]]


def vjp_rule(params: dict[str, Any]) -> VjpRule:
    def bwd(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        out = params["bwd"].call_wrapped(*residuals, *cotangents)
        # The newest JAX returns (cotangents, logs); the logs belong to `f_vjp.with_logs`.
        return list(out[0] if isinstance(out, tuple) and len(out) == 2 else out)

    return VjpRule(
        params["num_consts"],
        params["symbolic_zeros"],
        lambda nonzeros: params["fwd_jaxpr_thunk"].call_wrapped(*nonzeros),
        lambda: params["out_trees"]()[2],
        bwd,
    )


# The oldest JAX's backward pass can't accumulate into a ref where a slice was read.
can_accumulate_gradients = jax.__version_info__ >= (0, 12)


def is_symbolic_zero(x: Any) -> bool:
    return isinstance(x, ad_util.Zero | ad_util.SymbolicZero)


def instantiate(x: Any) -> Any:
    """The array that a symbolic zero stands for; anything else as it is."""
    return zeros_like_aval(x.aval) if is_symbolic_zero(x) else x
