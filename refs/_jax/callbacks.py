"""JAX's private names for programs that call Python: effects, and how a call is lowered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

# The effect of JAX's `io_callback`: JAX and XLA neither drop nor repeat a call that has it.
from jax._src.callback import _IOEffect as io_effect
from jax._src.dispatch import runtime_tokens
from jax._src.state.discharge import register_discharge_rule
from jax._src.state.types import ReadEffect, WriteEffect
from jax.core import ShapedArray
from jax.ffi import ffi_lowering
from jax.interpreters import ad, mlir

from refs._jax.calls import devices_outside_shard_map
from refs._types import Aval, DType, Primitive, Value

__all__ = [
    "array_type", "callbacks_so_far", "finish", "finished", "io_effect", "only_read",
    "read_and_write", "refuse_derivatives", "register_host_lowering",
    "register_native_discharge", "varying_over",
]  # fmt: skip

# The custom-call handlers that jaxlib registers: each gets views of XLA's own buffers.
_TARGETS = {
    "cpu": "xla_buffer_python_cpu_callback",
    "cuda": "xla_buffer_python_gpu_callback",
    "rocm": "xla_buffer_python_gpu_callback",
}


def _tokens() -> tuple[dict[Any, Any], dict[Any, Any]]:
    """This thread's tokens, of its last program with callbacks on each device and of each order."""
    return runtime_tokens.output_runtime_tokens, runtime_tokens.current_tokens


def callbacks_so_far() -> list[dict[Any, Any]]:
    """What tells this thread's programs with callbacks from later ones, for `finish`."""
    return [*map(dict, _tokens())]


def finish(results: Any, before: Sequence[dict[Any, Any]]) -> None:
    """Waits for results, and for the programs with callbacks that this thread has started since.

    `before` is what `callbacks_so_far` returned then. The error of a callback is raised here, and
    not by JAX a second time, at a later `jax.effects_barrier`.
    """
    started = [
        (tokens, key)
        for tokens, known in zip(_tokens(), before, strict=True)
        for key, token in tokens.items()
        if token is not known.get(key)
    ]
    errors = []
    for values, key in (*started, ({"results": results}, "results")):
        try:
            jax.block_until_ready(values[key])
        except Exception as error:
            del values[key]
            errors.append(error)
    if errors:
        raise errors[0]


def finished(call: Callable[[], Any]) -> Any:
    """What `call` returns, when that and the programs with callbacks that it starts are done."""
    before = callbacks_so_far()
    results = call()
    finish(results, before)
    return results


def read_and_write(places: Iterable[int]) -> set[Any]:
    """The effects of an equation that reads and writes the operands at `places`, which are refs."""
    kinds = (ReadEffect, WriteEffect)
    return {kind(k) for k in places for kind in kinds}


def only_read(places: Iterable[int]) -> set[Any]:
    """The effects of an equation that only reads the operands at `places`, which are refs."""
    return {*map(ReadEffect, places)}


def varying_over(aval: Aval, operands: Sequence[Aval]) -> Aval:
    """`aval`, varying over each axis of a `shard_map` that an operand's type varies over."""
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
    """Registers how JAX's own transformations discharge a primitive whose first operands are refs.

    `discharge(*values, **params)` returns the refs' new contents, then the results.
    """

    def rule(*args: Any, **params: Any) -> Any:
        # The types come first: (inputs, outputs) in the oldest JAX, one context in the newest.
        is_one = hasattr(args[0], "out_avals")
        out_avals, values = (args[0].out_avals, args[1:]) if is_one else (args[1], args[2:])
        out = discharge(*values, **params)
        n = len(out) - len(out_avals)
        return [*out[:n], *[None] * (len(values) - n)], out[n:]

    register_discharge_rule(primitive)(rule)


def array_type(shape: Sequence[int], dtype: DType) -> Aval:
    return ShapedArray(tuple(shape), np.dtype(dtype))


def refuse_derivatives(primitive: Primitive, refuse: Callable[..., Any]) -> None:
    """Makes JAX call `refuse(**params)`, which raises, where it would differentiate a primitive."""

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
    """Registers a lowering to a call of Python on XLA's own buffers, on platforms that have one.

    Args:
      on_buffers: called with the platform, the operands' types and, as keywords, the parameters. It
        returns a function of a context and the buffers of all operands and results, and the number
        of first operands whose memory the first results share; or None, to use `staged`.
      staged: a JAX function of the operands that does the same through JAX's own callbacks.
      check: called with the number of devices that XLA spreads the operation over, and the
        parameters. It may raise.
    """

    def lower(ctx: Any, *operands: Value, **params: Any) -> Any:
        check(devices_outside_shard_map(ctx), **params)
        platform, *others = ctx.module_context.platforms
        found = None
        if platform in _TARGETS and not others:
            found = on_buffers(platform, ctx.avals_in, **params)
        if found is None:
            return mlir.lower_fun(staged, multiple_results=True)(ctx, *operands, **params)
        handler, n_aliased = found
        ctx.module_context.add_host_callback(handler)
        # On CPU, where there is only one layout, none is given: with those that JAX would ask for,
        # XLA copies what the device has written before the call.
        rule = ffi_lowering(
            _TARGETS[platform],
            has_side_effect=True,
            operand_output_aliases={k: k for k in range(n_aliased)},
            skip_ffi_layout_processing=platform == "cpu",
        )
        index = np.uint64(len(ctx.module_context.host_callbacks) - 1)
        return rule(ctx, *operands, index=index)

    mlir.register_lowering(primitive, lower)
