"""Primitives with rules of their own: linear maps, functions with inverses, opaque ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src.core import no_axis_name
from jax._src.dispatch import apply_primitive
from jax._src.interpreters.partial_eval import custom_staging_rules
from jax.interpreters import ad, batching, mlir

from refs._jax.calls import devices_outside_shard_map
from refs._types import Aval, Primitive, Value

__all__ = [
    "register_by_devices",
    "register_inlined",
    "register_linear_map",
    "register_opaque",
    "register_staging",
]


def register_linear_map(primitive: Primitive) -> None:
    """Registers all rules of a primitive with one parameter, `linear`.

    Its operands are `linear.n_fixed` values and then those that it is linear in. `linear` has the
    methods `along(fixed, values)`, the map; `back(fixed, cotangents)`, its transpose; `types`, the
    types of the map's results; and `batched(size, name, axes, operands)`, the same map over a
    batch, whose axis has a name or None.
    """

    def run(*operands: Value, linear: Any) -> list[Value]:
        n = linear.n_fixed
        return list(linear.along(operands[:n], operands[n:]))

    primitive.def_impl(run)
    primitive.def_abstract_eval(lambda *avals, linear: list(linear.types))
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True))

    def jvp(primals: Sequence[Value], tangents: Sequence[Any], *, linear: Any) -> Any:
        out = primitive.bind(*primals, linear=linear)
        n = linear.n_fixed
        if all(type(t) is ad.Zero for t in tangents[:n]):
            along = [ad.instantiate_zeros(t) for t in tangents[n:]]
            return out, primitive.bind(*primals[:n], *along, linear=linear)
        tangents = tuple(map(ad.instantiate_zeros, tangents))
        return jax.jvp(lambda *xs: run(*xs, linear=linear), tuple(primals), tangents)

    ad.primitive_jvps[primitive] = jvp

    def transpose(cts: Sequence[Any], *operands: Any, linear: Any) -> list[Any]:
        n = linear.n_fixed
        return [None] * n + list(linear.back(operands[:n], cts))

    ad.primitive_transposes[primitive] = transpose

    def batch(axis_data: Any, operands: Any, axes: Any, *, linear: Any) -> Any:
        if all(axis is None for axis in axes):
            out = primitive.bind(*operands, linear=linear)
            return out, [None] * len(out)
        name = None if axis_data.name is no_axis_name else axis_data.name
        new = linear.batched(axis_data.size, name, axes, operands)
        out = primitive.bind(*operands, linear=new)
        return out, [0] * len(out)

    batching.fancy_primitive_batchers[primitive] = batch


def register_by_devices(primitive: Primitive, fun: Callable[..., Value]) -> None:
    """Defines a primitive with one result by `fun(*operands, on_cpu, on_several, **params)`.

    `on_cpu`: whether it is compiled for CPUs only. `on_several`: whether XLA is to divide the
    operation over several devices.
    """
    primitive.def_impl(functools.partial(apply_primitive, primitive))

    def lower(ctx: Any, *args: Any, **params: Any) -> Any:
        on_cpu = set(ctx.module_context.platforms) == {"cpu"}
        run = functools.partial(fun, on_cpu=on_cpu, on_several=devices_outside_shard_map(ctx) > 1)
        lower = mlir.lower_fun(run, multiple_results=False)
        if ctx.module_context.shape_poly_state.uses_dim_vars:
            return lower(ctx, *args, **params)  # Symbolic sizes are of the types enabled now.
        # What the operation is doesn't depend on which types are enabled where it is lowered.
        with jax.enable_x64(True):
            return lower(ctx, *args, **params)

    mlir.register_lowering(primitive, lower)


def register_staging(
    primitive: Primitive, other: Primitive, is_other: Callable[[Sequence[Aval]], bool]
) -> None:
    """Where `is_other(types of operands)`, a jaxpr gets `other` in the place of a primitive."""

    def stage(trace: Any, source_info: Any, *operands: Value, **params: Any) -> Any:
        chosen = other if is_other([x.aval for x in operands]) else primitive
        return trace.default_process_primitive(chosen, operands, params, source_info)

    custom_staging_rules[primitive] = stage


def register_inlined(
    primitive: Primitive,
    run: Callable[..., list[Value]],
    batched: Callable[..., dict[str, Any]],
) -> None:
    """Registers a primitive that is `run(*operands, **params)`, and its derivative that of `run`.

    `batched(size, operands, axes, **params)` gives the parameters of the same operation over a
    batch; its results are batched along their first axis.
    """
    primitive.def_impl(run)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True))

    def jvp(primals: Sequence[Value], tangents: Sequence[Any], **params: Any) -> Any:
        tangents = tuple(map(ad.instantiate_zeros, tangents))
        return jax.jvp(lambda *xs: run(*xs, **params), tuple(primals), tangents)

    ad.primitive_jvps[primitive] = jvp
    _register_batcher(primitive, batched)


def register_opaque(
    primitive: Primitive,
    run: Callable[..., list[Value]],
    derived: Callable[..., list[Value]],
    batched: Callable[..., dict[str, Any]],
) -> None:
    """Registers a primitive that no transformation takes apart: it is compiled as a whole.

    It is `run(*operands, **params)`; its derivative is that of `derived`, which computes the same.
    `batched` is as in `register_inlined`.
    """
    primitive.def_impl(functools.partial(apply_primitive, primitive))
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True))

    def jvp(primals: Sequence[Value], tangents: Sequence[Any], **params: Any) -> Any:
        out = primitive.bind(*primals, **params)
        tangents = tuple(map(ad.instantiate_zeros, tangents))
        _, along = jax.jvp(lambda *xs: derived(*xs, **params), tuple(primals), tangents)
        return out, along

    ad.primitive_jvps[primitive] = jvp
    _register_batcher(primitive, batched)


def _register_batcher(primitive: Primitive, batched: Callable[..., dict[str, Any]]) -> None:
    def batch(axis_data: Any, operands: Any, axes: Any, **params: Any) -> Any:
        if all(axis is None for axis in axes):
            out = primitive.bind(*operands, **params)
            return out, [None] * len(out)
        out = primitive.bind(*operands, **batched(axis_data.size, operands, axes, **params))
        return out, [0] * len(out)

    batching.fancy_primitive_batchers[primitive] = batch
