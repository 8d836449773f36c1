"""JAX's private names for programs that call Python: effects, and how a call is lowered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import callback, core, ffi, sharding_impls
from jax._src.interpreters import ad, mlir
from jax._src.state import discharge as _discharge
from jax._src.state import types as _state_types

from refs._types import Aval, DType, Primitive, Value

__all__ = [
    "array_type", "io_effect", "read_and_write", "refuse_derivatives", "register_host_lowering",
    "register_native_discharge", "varying_over",
]  # fmt: skip

# What `io_callback` of JAX has: the call isn't left out, nor repeated.
io_effect = callback._IOEffect

# Handlers that jaxlib has registered: each is given views of XLA's own buffers.
_TARGETS = {
    "cpu": "xla_buffer_python_cpu_callback",
    "cuda": "xla_buffer_python_gpu_callback",
    "rocm": "xla_buffer_python_gpu_callback",
}


def read_and_write(n: int) -> set[Any]:
    """The effects of an equation that reads and writes the refs that are its first operands."""
    kinds = (_state_types.ReadEffect, _state_types.WriteEffect)
    return {kind(k) for k in range(n) for kind in kinds}


def varying_over(aval: Aval, operands: Sequence[Value]) -> Any:
    """The type, varying over the devices of a `shard_map` as any of the operands' types does."""
    operands = [getattr(x, "inner_aval", x) for x in operands]
    varying = [x for x in operands if hasattr(x, "mat") and x.mat.varying]
    if not varying:
        return aval
    axes = frozenset().union(*(x.mat.varying for x in varying))
    everywhere = jax.sharding.PartitionSpec(*[None] * aval.ndim)
    return aval.update(
        sharding=jax.sharding.NamedSharding(varying[0].sharding.mesh, everywhere),
        manual_axis_type=varying[0].mat.update(varying=axes),
    )


def register_native_discharge(primitive: Primitive, discharge: Callable[..., Any]) -> None:
    """How JAX's own transformations discharge a primitive whose first operands are refs.

    `discharge(*values, **params)` gives what the refs hold afterwards, then the results.
    """

    def rule(*args: Any, **params: Any) -> Any:
        # First come the types, (inputs, outputs) in the oldest JAX, one context in the newest.
        is_one = hasattr(args[0], "out_avals")
        out_avals, values = (args[0].out_avals, args[1:]) if is_one else (args[1], args[2:])
        out = discharge(*values, **params)
        n = len(out) - len(out_avals)
        return [*out[:n], *[None] * (len(values) - n)], out[n:]

    _discharge.register_discharge_rule(primitive)(rule)


def array_type(shape: Sequence[int], dtype: DType) -> Any:
    return core.ShapedArray(tuple(shape), np.dtype(dtype))


def refuse_derivatives(primitive: Primitive, refuse: Callable[..., Any]) -> None:
    """Calls `refuse(**params)`, which raises, where a primitive would be differentiated."""

    def rule(*_: Any, **params: Any) -> Any:
        return refuse(**params)

    ad.primitive_jvps[primitive] = rule
    ad.primitive_transposes[primitive] = rule


def register_host_lowering(
    primitive: Primitive,
    on_buffers: Callable[..., tuple[Callable[..., Any], int] | None],
    staged: Callable[..., Any],
    check: Callable[..., Any],
) -> None:
    """Lowers a primitive to a call of Python on XLA's own buffers, where there is such a call.

    Args:
      on_buffers: gives, from the platform, the types of the operands and the parameters, a
        function of a context and of the buffers of all operands and results, and how many of the
        first operands are results as well; None instead where `staged` must do.
      staged: a JAX function of the operands, which does the same by JAX's own callbacks.
      check: called with the number of devices that the program runs on, and the parameters.
    """

    def lower(ctx: Any, *operands: Value, **params: Any) -> Any:
        check(_devices_outside_shard_map(ctx), **params)
        platform, *others = ctx.module_context.platforms
        found = None
        if platform in _TARGETS and not others:
            found = on_buffers(platform, ctx.avals_in, **params)
        if found is None:
            return mlir.lower_fun(staged, multiple_results=True)(ctx, *operands, **params)
        handler, n_aliased = found
        ctx.module_context.add_host_callback(handler)
        # Layouts are left to XLA: with those that JAX would ask for, it copies what the device has
        # written before the call. On CPU there is only one.
        rule = ffi.ffi_lowering(
            _TARGETS[platform],
            has_side_effect=True,
            operand_output_aliases={k: k for k in range(n_aliased)},
            skip_ffi_layout_processing=platform == "cpu",
        )
        index = np.uint64(len(ctx.module_context.host_callbacks) - 1)
        return rule(ctx, *operands, index=index)

    mlir.register_lowering(primitive, lower)


def _devices_outside_shard_map(ctx: Any) -> int:
    """How many devices XLA spreads the operation over; 1 where `shard_map` has."""
    context = ctx.module_context.axis_context
    if isinstance(context, sharding_impls.SPMDAxisContext):
        mesh = context.mesh
        free = [n for name, n in mesh.shape.items() if name not in context.manual_axes]
        return int(np.prod(free, dtype=int))
    if isinstance(context, sharding_impls.ShardingContext):
        return context.num_devices
    return 1
