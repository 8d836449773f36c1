"""Primitives that call a jaxpr: how JAX's transformations treat them, and how they are lowered."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax._src.interpreters.batching import batch_jaxpr_axes, zero_if_mapped
from jax._src.interpreters.partial_eval import convert_constvars_jaxpr, lower_jaxpr2
from jax.interpreters import batching, mlir

from refs._types import ClosedJaxpr, Jaxpr, Primitive, Value

__all__ = [
    "devices_outside_shard_map", "register_call_batching", "register_call_lowering",
    "register_call_to_lojax", "with_inputs", "without_constants",
]  # fmt: skip


def register_call_batching(primitive: Primitive) -> None:
    """Registers batching of a primitive that calls its `jaxpr`: the jaxpr is batched."""

    def batch(axis_data: Any, args: Any, axes: Any, *, jaxpr: ClosedJaxpr) -> Any:
        batched, is_batched = batch_jaxpr_axes(
            jaxpr, axis_data, axes, [zero_if_mapped] * len(jaxpr.out_avals)
        )
        out = primitive.bind(*batched.consts, *args, jaxpr=without_constants(batched))
        return out, [0 if b else None for b in is_batched]

    batching.fancy_primitive_batchers[primitive] = batch


def devices_outside_shard_map(ctx: Any) -> int:
    """The number of devices that XLA spreads an operation over; 1 where `shard_map` does it."""
    context = ctx.module_context.axis_context
    if isinstance(context, mlir.SPMDAxisContext):
        mesh = context.mesh
        free = [n for name, n in mesh.shape.items() if name not in context.manual_axes]
        return int(np.prod(free, dtype=int))
    return getattr(context, "num_devices", 1)  # `pmap`'s context has no such number.


def register_call_lowering(
    primitive: Primitive, rewrite: Callable[[Jaxpr, bool, bool], Jaxpr]
) -> None:
    """Lowers a primitive with a `jaxpr` to a call of `rewrite(jaxpr, on_cpu, on_several)`.

    `on_several`: whether XLA is to divide the program over several devices.
    """

    def lower(ctx: Any, *args: Any, jaxpr: ClosedJaxpr) -> Any:
        on_cpu = set(ctx.module_context.platforms) == {"cpu"}
        new = rewrite(jaxpr.jaxpr, on_cpu, devices_outside_shard_map(ctx) > 1)
        closed = jaxpr if new is jaxpr.jaxpr else jaxpr.replace(jaxpr=new)
        return mlir.core_call_lowering(ctx, *args, name=primitive.name, call_jaxpr=closed)

    mlir.register_lowering(primitive, lower)


def register_call_to_lojax(primitive: Primitive) -> None:
    """Registers how JAX lowers the "hi" primitives and types in the `jaxpr` of a primitive."""

    def to_lojax(*args: Any, jaxpr: ClosedJaxpr) -> list[Value]:
        lowered = lower_jaxpr2(jaxpr)
        low_args = [
            x for aval, arg in zip(jaxpr.in_avals, args, strict=True) for x in aval.lower_val(arg)
        ]
        out = iter(primitive.bind(*lowered.consts, *low_args, jaxpr=without_constants(lowered)))
        return [t.raise_val(*itertools.islice(out, len(t.lo_ty()))) for t in jaxpr.out_avals]

    primitive.to_lojax = to_lojax


def with_inputs(closed: ClosedJaxpr, inputs: Sequence[Any]) -> ClosedJaxpr:
    """A closed jaxpr with its inputs in another order."""
    jaxpr = closed.jaxpr
    names = dict(zip(jaxpr.invars, jaxpr.debug_info.arg_names or (), strict=False))
    info = jaxpr.debug_info._replace(arg_names=tuple(names.get(v, "") for v in inputs))
    return closed.replace(jaxpr=jaxpr.replace(invars=[*inputs], debug_info=info))


def without_constants(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A closed jaxpr with its constants as its first inputs."""
    return closed.replace(jaxpr=convert_constvars_jaxpr(closed.jaxpr), consts=())
