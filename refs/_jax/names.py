"""JAX's private names: types, tracers, traces and settings."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import jax
from jax._src import (
    ad_util,
    api_util,
    buffer_callback,
    callback,
    config,
    core,
    debugging,
    source_info_util,
    util,
)
from jax._src.array import ArrayImpl as ArrayImpl
from jax._src.indexing import Slice as Slice
from jax._src.interpreters import batching, mlir
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.interpreters import pxla as _pxla
from jax._src.random import prng
from jax._src.state import primitives as _state
from jax._src.state.indexing import NDIndexer as NDIndexer
from jax._src.state.types import AbstractRef as AbstractRef
from jax._src.state.types import AccumEffect as AccumEffect
from jax._src.state.types import BitcastTransform as BitcastTransform
from jax._src.state.types import ReadEffect as ReadEffect
from jax._src.state.types import RefEffect as RefEffect
from jax._src.state.types import ReshapeTransform as ReshapeTransform
from jax._src.state.types import TransposeTransform as TransposeTransform
from jax._src.state.types import WriteEffect as WriteEffect
from jax._src.state.utils import bitcast as bitcast

from refs._jax.primitives import passing_primitives
from refs._types import (
    Atom,
    Aval,
    Buffer,
    DType,
    Primitive,
    RefLike,
    Sharding,
    Value,
)

__all__ = [
    "AbstractRef", "AccumEffect", "ArrayImpl", "BitcastTransform", "DistinctIndexer", "Literal",
    "NDIndexer", "NativeRef", "ReadEffect", "RefEffect", "ReshapeTransform", "Slice", "Tracer",
    "TransposeTransform", "WriteEffect", "at_top_level", "aval_method", "aval_property", "bitcast",
    "can_pin", "context_in_jit", "current_trace", "debug_infs", "debug_nans",
    "def_effectful_abstract_eval", "depends_on", "eval_trace", "free_ref", "freeze", "fun_name",
    "has_explicit_sharding", "is_callback_frame", "is_jit_disabled", "is_key",
    "is_on_explicit_mesh", "is_ref_type", "mapped_aval", "name_arguments", "native_buffer",
    "new_ref", "passed_on", "refuse_placement", "register_batching", "register_handle",
    "register_lowering", "register_ref_type", "register_type_of", "retype", "set_native_buffer",
    "shaped_abstractify", "source_line", "trace_context", "trace_of", "trace_state", "type_in_jit",
    "typeof", "unwrap_keys", "var_of", "varying_axes", "varying_like", "varying_no_more",
    "wrap_keys", "zeros_like_aval",
]  # fmt: skip

# ---------------------------------------------------------------------------------------------
# Types, tracers and traces

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
can_pin = "pin" in inspect.signature(new_ref).parameters
freeze = core.freeze
free_ref = core.free_ref
fun_name = util.fun_name
source_line = api_util.fun_sourceinfo


def at_top_level() -> bool:
    """Whether nothing is being traced, so that operations run at once."""
    return core.trace_ctx.is_top_level()


# `trace_state.value is eval_trace` is the same test in a tenth of the time; each call needs it.
trace_state = core.trace_state_strong_ref
eval_trace = core.eval_trace


def current_trace() -> Any:
    return core.trace_ctx.trace


def name_arguments(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    tracers: Sequence[Value],
) -> dict[int, str]:
    """Makes JAX's errors name a user's function and its arguments while a wrapper is traced.

    `tracers` are the wrapper's arguments, the leaves of `args` and `kwargs` that aren't static. The
    result has the names of all leaves, by their ids.
    """
    trace = current_trace()
    frame = getattr(trace, "frame", None)
    if frame is None or frame.debug_info is None:
        return {}
    if any(getattr(t, "_trace", None) is not trace for t in tracers):
        return {}  # Nothing is traced for the wrapper: it calls the function as it is.
    theirs = api_util.debug_info(frame.debug_info.traced_for, fun, args, kwargs)
    leaves, names = jax.tree.leaves((args, kwargs)), theirs.arg_names or ()
    name_of = {id(x): name for x, name in zip(leaves, names, strict=False)}
    frame.debug_info = frame.debug_info._replace(
        func_src_info=theirs.func_src_info,
        arg_names=tuple(name_of.get(id(tracer), "") for tracer in tracers),
    )
    for tracer in tracers:
        tracer._debug_info = frame.debug_info
    return name_of


def depends_on(trace: Any, argument: str) -> str:
    """JAX's words about a value that isn't known, as it depends on an argument."""
    info = trace.frame.debug_info
    return (
        f"\nThe error occurred while tracing the function {info.func_src_info} for "
        f"{info.traced_for}. This concrete value was not available in Python because it depends on "
        f"the value of the argument {argument}."
    )


def trace_of(tracer: Tracer) -> Any:
    """The trace that a traced value belongs to."""
    return tracer._trace


def native_buffer(ref: RefLike) -> Buffer:
    """The array that one of JAX's own handles holds. Raises if the handle has ended."""
    return ref._refs._buf


def set_native_buffer(ref: RefLike, buffer: Buffer) -> None:
    ref._refs._buf = buffer


def is_jit_disabled() -> bool:
    return bool(config.disable_jit.value)


debug_nans = config.debug_nans
debug_infs = config.debug_infs


def trace_context() -> tuple[Any, ...]:
    """The settings that a trace depends on besides its arguments: x64, precision, the mesh …"""
    return config.trace_context()


def context_in_jit() -> list[Any]:
    """`trace_context`, without the mesh that JAX's jit itself sets when it traces."""
    meshes = (jax.sharding.AbstractMesh, jax.sharding.Mesh)
    context = [x for x in config.trace_context() if not isinstance(x, meshes)]
    # A module that is imported meanwhile, such as Pallas' interpreter, adds settings at the end.
    while context and context[-1] in (None, False):
        context.pop()
    return context


class TypeInJit(NamedTuple):
    shape: tuple[int, ...]
    dtype: DType
    weak_type: bool | None
    sharding: Sharding | None
    memory_space: Any


def type_in_jit(x: Value) -> TypeInJit | Aval:
    """The type of an argument of JAX's jit, with the sharding if that is part of the type."""
    aval: Aval = core.shaped_abstractify(x)
    # A type of the user's; or that of a ref, in the place of an array: it has a shape and a dtype.
    if aval.is_high or is_ref_type(aval):
        return aval
    explicit = aval.sharding if is_on_explicit_mesh(aval) else None
    return TypeInJit(aval.shape, aval.dtype, aval.weak_type, explicit, aval.memory_space)


# The lines that jaxprs and HLO point to are the user's, not ours.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
source_info_util.register_exclusion(_PACKAGE + os.sep)


def is_callback_frame(frame: FrameType) -> bool:
    """Whether a frame of the stack is that of JAX calling back from a running program."""
    code = frame.f_code
    return code.co_name.endswith(_CALLBACKS.get(code.co_filename, ()))


# The functions that call users' functions: how their names end, by file.
_CALLBACKS = {
    callback.__file__: ("_callback_impl",),
    debugging.__file__: ("_callback_impl",),
    buffer_callback.__file__: ("wrapped_callback",),
}


def is_key(dtype: DType) -> bool:
    return isinstance(dtype, prng.KeyTy)


def unwrap_keys(x: Value) -> Value:
    """The bits of an array of PRNG keys, `[*x.shape, *key_shape]`, the same object; else `x`.

    Compiled calls return bits, because Python code makes an array of keys and takes it apart.
    """
    if not is_key(getattr(x, "dtype", None)):
        return x
    return x._base_array if isinstance(x, prng.PRNGKeyArray) else prng.random_unwrap(x)


def wrap_keys(x: Value, dtype: DType) -> Value:
    """The inverse of `unwrap_keys`."""
    return prng.random_wrap(x, impl=dtype._impl) if is_key(dtype) else x


def var_of(tracer: Tracer) -> Atom | None:
    """The variable or literal of a jaxpr that a tracer of its trace stands for, or None."""
    var = getattr(tracer, "val", None)
    return var if isinstance(var, core.Var | Literal) else None


def passed_on(ref: RefLike) -> RefLike:
    """The ref that `passing_primitives` took and returned as `ref`; `ref` itself if none did."""
    while (eqn := getattr(ref, "parent", None)) is not None and (
        eqn.primitive in passing_primitives
    ):
        # A handle that is closed over is a constant of the trace.
        ref = core.get_referent(eqn.in_tracers[0])
    return ref


def retype(ref: RefLike, wrap: Callable[[Aval], Aval]) -> RefLike:
    """Gives a ref that JAX made in a trace this library's ref type: `wrap` of its present type."""
    if not isinstance(ref, core.Tracer):
        ref._aval = wrap(ref._aval)
        return ref
    if isinstance(ref, _partial_eval.DynamicJaxprTracer):
        ref.val.aval = wrap(ref.aval)
    for name in ("primal", "val"):  # Tracers of differentiation and of batching wrap a ref.
        if isinstance(inner := getattr(ref, name, None), core.Ref):
            retype(inner, wrap)
    ref.aval = wrap(ref.aval)
    return ref


def varying_like(ref: RefLike, value: Value) -> Value:
    """`value`, varying over the devices of a `shard_map` as the ref that it is written to does."""
    # The oldest JAX does this itself when it must.
    cast = getattr(_state, "_insert_pvary_for_write", None)
    return value if cast is None else cast(ref, value)


def varying_axes(x: Value) -> frozenset[Any]:
    """The axes of a `shard_map` that a value, a ref's contents or a type varies over."""
    aval = x if isinstance(x, core.AbstractValue) else typeof(x)
    mat = getattr(getattr(aval, "inner_aval", aval), "mat", None)
    return mat.varying if mat is not None else frozenset()


def varying_no_more(ct: Value, aval: Aval) -> Value:
    """The cotangent of a value of a type, summed over devices that the value doesn't vary over."""
    extra = tuple(varying_axes(ct) - varying_axes(aval))
    return jax.lax.psum(ct, extra) if extra else ct


def has_explicit_sharding(aval: Aval) -> bool:
    """Whether the type itself says how the array is sharded over a mesh."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None:
        return False
    spec = sharding.spec
    parts = (*spec.partitions, *spec.unreduced, *spec.reduced)
    return any(axes is not None for axes in parts)


def is_on_explicit_mesh(x: Value) -> bool:
    """Whether the type of an array, or of a ref's contents, names a mesh with explicit axes."""
    aval = x if isinstance(x, core.AbstractValue) else typeof(x)
    sharding = getattr(getattr(aval, "inner_aval", aval), "sharding", None)
    return sharding is not None and jax.sharding.AxisType.Explicit in sharding.mesh.axis_types


def is_ref_type(aval: Aval) -> bool:
    return isinstance(aval, AbstractRef)


def register_ref_type(ref_type: type, wrap: Callable[[Aval, Aval], Aval]) -> None:
    """Registers `ref_type`, a subclass of AbstractRef, wherever JAX looks types up by class.

    JAX derives a type from `source`, a `ref_type`: `wrap(type, source)` makes a `ref_type` of it.
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


def refuse_placement(ref_type: type, refuse: Callable[[Aval], Any]) -> None:
    """Makes JAX call `refuse(type)`, which raises, where it would place a handle on a device."""
    _pxla.global_result_handlers[ref_type] = lambda aval, *_: refuse(aval)


def register_type_of(kind: type, aval_of: Callable[[Any], Aval]) -> None:
    """Makes `jax.typeof(x)` return `aval_of(x)` for objects of the class `kind`."""
    core.pytype_aval_mappings[kind] = aval_of


@jax.tree_util.register_pytree_node_class
class DistinctIndexer(NDIndexer):
    """JAX's indexer, if its constants show that it names no element twice."""

    __slots__ = ()


def def_effectful_abstract_eval(primitive: Primitive) -> Callable[..., Any]:
    """A decorator: registers a function that returns a primitive's output types and effects."""
    return primitive.def_effectful_abstract_eval


def register_batching(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Registers how `jax.vmap` batches a primitive: `rule(axis size, operands, axes, **params)`."""

    def batch(axis_data: Any, args: Any, axes: Any, **params: Any) -> Any:
        return rule(axis_data.size, args, axes, **params)

    batching.fancy_primitive_batchers[primitive] = batch


def register_lowering(primitive: Primitive, fun: Callable[..., Any]) -> None:
    """Defines a primitive with one result by a JAX function, both op by op and compiled."""
    primitive.def_impl(fun)
    mlir.register_lowering(primitive, mlir.lower_fun(fun, multiple_results=False))
