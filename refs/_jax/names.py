"""JAX's private names: types, tracers, traces and settings."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import jax
from jax._src.ad_util import aval_zeros_likers
from jax._src.array import ArrayImpl as ArrayImpl
from jax._src.config import disable_jit
from jax._src.config import trace_context as trace_context
from jax._src.core import (
    aval_mapping_handlers,
    pytype_aval_mappings,
    shard_aval_handlers,
    trace_ctx,
    unshard_aval_handlers,
)
from jax._src.core import eval_trace as eval_trace
from jax._src.core import trace_state_strong_ref as trace_state
from jax._src.indexing import Slice as Slice
from jax._src.interpreters.pxla import global_result_handlers, shard_arg_handlers, shard_args
from jax._src.random.prng import KeyTy, PRNGKeyArray
from jax._src.state.indexing import NDIndexer as NDIndexer
from jax._src.state.types import AccumEffect as AccumEffect
from jax._src.state.types import BitcastTransform as BitcastTransform
from jax._src.state.types import ReadEffect as ReadEffect
from jax._src.state.types import RefEffect as RefEffect
from jax._src.state.types import ReshapeTransform as ReshapeTransform
from jax._src.state.types import TransposeTransform as TransposeTransform
from jax._src.state.types import WriteEffect as WriteEffect
from jax._src.state.utils import bitcast as bitcast
from jax._src.util import fun_name as fun_name
from jax.core import AbstractValue
from jax.core import Tracer as Tracer
from jax.experimental import buffer_callback
from jax.experimental.hijax import aval_method as aval_method
from jax.experimental.hijax import aval_property as aval_property
from jax.extend import source_info_util
from jax.extend.core import Literal as Literal
from jax.extend.core import Var
from jax.extend.core import mapped_aval as mapped_aval
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as _partial_eval
from jax.ref import AbstractRef as AbstractRef
from jax.ref import Ref as NativeRef

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
    "AbstractArgument", "AbstractRef", "AccumEffect", "ArrayImpl", "BitcastTransform",
    "DistinctIndexer", "Literal", "NDIndexer", "NativeRef", "ReadEffect", "RefEffect",
    "ReshapeTransform", "Slice", "Tracer", "TransposeTransform", "WriteEffect", "at_top_level",
    "aval_method", "aval_property", "axes_beyond", "bitcast", "can_pin", "context_in_jit",
    "current_trace", "def_effectful_abstract_eval", "depends_on", "eval_trace", "fun_name",
    "has_explicit_sharding", "is_callback_frame", "is_jit_disabled", "is_key",
    "is_on_explicit_mesh", "is_ref_type", "mapped_aval", "name_arguments", "native_buffer",
    "of_shape", "refuse_placement", "register_batching", "register_handle", "register_lowering",
    "register_ref_type", "register_type_of", "retype", "set_native_buffer", "shaped_abstractify",
    "source_line", "trace_context", "trace_of", "trace_state", "type_in_jit", "unwrap_keys",
    "var_of", "vary_as", "vary_over", "varying_axes", "varying_no_more", "wrap_keys",
    "zeros_like_aval",
]  # fmt: skip

zeros_like_aval = ad.zeros_like_aval
shaped_abstractify = jax.api_util.shaped_abstractify
can_pin = "pin" in inspect.signature(jax.new_ref).parameters


def source_line(fun: Callable[..., Any]) -> str:
    """The name and the place of a user's function, for messages."""
    return jax.api_util.debug_info("refs", fun, (), {}).func_src_info


def at_top_level() -> bool:
    """Whether nothing is being traced, so that operations run at once.

    `trace_state.value is eval_trace` is the same test in a tenth of the time; each call needs it.
    """
    return trace_ctx.is_top_level()


def current_trace() -> Any:
    return trace_ctx.trace


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
    theirs = jax.api_util.debug_info(frame.debug_info.traced_for, fun, args, kwargs)
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
    return bool(disable_jit.value)


def context_in_jit() -> list[Any]:
    """`trace_context`, without the mesh that JAX's jit itself sets when it traces."""
    meshes = (jax.sharding.AbstractMesh, jax.sharding.Mesh)
    context = [x for x in trace_context() if not isinstance(x, meshes)]
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
    aval: Aval = shaped_abstractify(x)
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


def _file_of(fun: Callable[..., Any]) -> str:
    return inspect.unwrap(fun).__code__.co_filename


# The functions that call users' functions: how their names end, by file.
_CALLBACKS = {
    _file_of(jax.pure_callback): ("_callback_impl",),
    _file_of(jax.debug.callback): ("_callback_impl",),
    _file_of(buffer_callback.buffer_callback): ("wrapped_callback",),
}


def is_key(dtype: DType) -> bool:
    return isinstance(dtype, KeyTy)


def unwrap_keys(x: Value) -> Value:
    """The bits of an array of PRNG keys, `[*x.shape, *key_shape]`, the same object; else `x`.

    Compiled calls return bits, because Python code makes an array of keys and takes it apart.
    """
    if not is_key(getattr(x, "dtype", None)):
        return x
    return x._base_array if isinstance(x, PRNGKeyArray) else jax.random.key_data(x)


def wrap_keys(x: Value, dtype: DType) -> Value:
    """The inverse of `unwrap_keys`."""
    return jax.random.wrap_key_data(x, impl=dtype._impl) if is_key(dtype) else x


def var_of(tracer: Tracer) -> Atom | None:
    """The variable or literal of a jaxpr that a tracer of its trace stands for, or None."""
    var = getattr(tracer, "val", None)
    return var if isinstance(var, Var | Literal) else None


def retype(ref: RefLike, wrap: Callable[[Aval], Aval]) -> RefLike:
    """Gives a ref that JAX made in a trace this library's ref type: `wrap` of its present type."""
    if not isinstance(ref, Tracer):
        ref._aval = wrap(ref._aval)
        return ref
    if isinstance(ref, _partial_eval.DynamicJaxprTracer):
        ref.val.aval = wrap(ref.aval)
    for name in ("primal", "val"):  # Tracers of differentiation and of batching wrap a ref.
        if isinstance(inner := getattr(ref, name, None), NativeRef):
            retype(inner, wrap)
    ref.aval = wrap(ref.aval)
    return ref


def vary_as(x: Value, example: Value) -> Value:
    """`x`, varying over all devices of a `shard_map` that `example` varies over, too."""
    return vary_over(x, varying_axes(example))


def vary_over(x: Value, axes: frozenset[Any]) -> Value:
    """`x`, varying over these axes of a `shard_map`, too."""
    missing = tuple(axes - varying_axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def of_shape(aval: Aval, shape: Sequence[Any]) -> Aval:
    """The type of an array like those of a type, in another shape, not weakly typed or sharded."""
    sharding = aval.sharding.update(spec=jax.P(*[None] * len(shape)))
    return aval.update(shape=tuple(shape), weak_type=False, sharding=sharding)


def varying_axes(x: Value) -> frozenset[Any]:
    """The axes of a `shard_map` that a value, a ref's contents or a type varies over."""
    aval = x if isinstance(x, AbstractValue) else jax.typeof(x)
    mat = getattr(getattr(aval, "inner_aval", aval), "mat", None)
    return mat.varying if mat is not None else frozenset()


def axes_beyond(x: Value, held: Value) -> str:
    """The axes, for a message, that `x` varies over and `held` doesn't; empty if there are none."""
    return ", ".join(map(repr, sorted(varying_axes(x) - varying_axes(held), key=str)))


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
    aval = x if isinstance(x, AbstractValue) else jax.typeof(x)
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

    map_ref, unmap_ref = aval_mapping_handlers[AbstractRef]
    aval_mapping_handlers[ref_type] = (wrapping(map_ref), wrapping(unmap_ref))
    shard_aval_handlers[ref_type] = wrapping(shard_aval_handlers[AbstractRef])
    unshard_aval_handlers[ref_type] = unshard_aval_handlers[AbstractRef]
    aval_zeros_likers[ref_type] = aval_zeros_likers[AbstractRef]


def register_handle(handle: type, buffers_of: Callable[[Sequence[Any]], list[Any]]) -> None:
    """Lets JAX's own jit take `handle`s as arguments."""

    def shard_handles(
        handles: Sequence[Any], shardings: Any, layouts: Any, copy_semantics: Any
    ) -> Any:
        return shard_args(shardings, layouts, copy_semantics, buffers_of(handles))

    shard_arg_handlers[handle] = shard_handles


def refuse_placement(ref_type: type, refuse: Callable[[Aval], Any]) -> None:
    """Makes JAX call `refuse(type)`, which raises, where it would place a handle on a device."""
    global_result_handlers[ref_type] = lambda aval, *_: refuse(aval)


def register_type_of(kind: type, aval_of: Callable[[Any], Aval]) -> None:
    """Makes `jax.typeof(x)` return `aval_of(x)` for objects of the class `kind`."""
    pytype_aval_mappings[kind] = aval_of


class AbstractArgument:
    """Stands for a ref or an array of a given type in the arguments of a trace."""

    def __init__(self, aval: Aval):
        self.aval = aval


register_type_of(AbstractArgument, lambda spec: spec.aval)


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
