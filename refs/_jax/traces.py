"""Traces of our own: what JAX asks of one, and how programs come by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax._src import config, core, linear_util, source_info_util
from jax._src.interpreters import partial_eval

from refs._jax.equations import as_closed, new_var, with_equations
from refs._types import Aval, Primitive, Value

__all__ = [
    "Trace", "as_jaxpr", "call_wrapped", "is_staging", "lane_axes", "looks_for_nans",
    "register_tracer", "rewrap", "set_current_trace", "settle_result_tree", "trace_functions",
]  # fmt: skip

Trace = core.Trace


def register_tracer(kind: type) -> None:
    """Makes JAX know the type of a tracer of ours, where it looks it up by its class alone."""
    core.pytype_aval_mappings[kind] = lambda tracer: tracer.aval


set_current_trace = core.set_current_trace


@contextmanager
def lane_axes(spmd_axis_name: Any, mesh_axes: Any) -> Iterator[None]:
    """While one lane is traced: the axes of meshes that the lanes lie over, as in `jax.vmap`."""
    with (
        core.add_spmd_axis_names(_as_names(spmd_axis_name)),
        core.add_explicit_mesh_axis_names(_as_names(mesh_axes)),
    ):
        yield


def _as_names(names: Any) -> Any:
    return names if names is None or isinstance(names, tuple) else (names,)


def is_staging() -> bool:
    """Whether operations are only written down now, so that nothing is known of their results."""
    return isinstance(core.trace_ctx.trace, partial_eval.DynamicJaxprTrace)


def looks_for_nans() -> bool:
    """Whether JAX runs a program once more, op by op, that gives a NaN, or an infinity."""
    return config.debug_nans.value or config.debug_infs.value


def as_jaxpr(primitive: Primitive, avals: Sequence[Aval], params: dict[str, Any]) -> Any:
    """A closed jaxpr that applies a primitive, as it is bound, to values of these types."""
    out, effects = primitive.abstract_eval(*avals, **params)
    invars = [*map(new_var, avals)]
    outvars = [*map(new_var, out if primitive.multiple_results else [out])]
    source = source_info_util.current()
    eqn = core.new_jaxpr_eqn(invars, outvars, primitive, params, effects, source)
    info = core.DebugInfo("refs", primitive.name, None, None)
    return as_closed(core.Jaxpr((), invars, outvars, [eqn], effects, info))


def trace_functions(
    primitive: Primitive,
    funs: Sequence[Any],
    types: Sequence[Aval],
    params: dict[str, Any],
) -> tuple[Any, Callable[[Sequence[Any]], Any]]:
    """What binding a primitive of functions writes down: a closed jaxpr.

    The second result makes of its outputs what binding gives.
    """
    for fun in funs:  # What they have said in an attempt that was broken off doesn't count.
        for store in getattr(fun, "stores", None) or ():
            if store is not None:
                store.reset()
    given: Any = None

    def bind(*args: Any) -> list[Any]:
        nonlocal given
        given = primitive.bind(*args, subfuns=tuple(funs), **params)
        return list(_leaves(given))

    source = source_info_util.current()  # In a trace JAX forgets from where it was begun.
    jaxpr = with_equations(
        jax.make_jaxpr(bind)(*types),
        lambda j: j.replace(eqns=[e.replace(source_info=source) for e in j.eqns]),
    )
    return jaxpr, lambda out: given.update(out) if hasattr(given, "update") else list(out)


def _leaves(given: Any) -> Sequence[Any]:
    return given.vals if hasattr(given, "vals") else given  # `shard_map` gives a tree


def rewrap(fun: Any, run: Callable[..., Any]) -> Any:
    """A function as JAX passes them on, that does `run` instead of `fun`."""
    if isinstance(fun, linear_util.WrappedFun):
        return linear_util.wrap_init(run, debug_info=fun.debug_info)
    return run


def call_wrapped(fun: Any, args: Sequence[Value]) -> Any:
    """Calls a function that JAX passes on."""
    return fun.call_wrapped(*args) if isinstance(fun, linear_util.WrappedFun) else fun(*args)


def settle_result_tree(fun: Any, rule: Any) -> None:
    """After both a custom function and its rule have run: only one may have said its result's tree.

    JAX looks which of them has.
    """

    def has_said(store: Any) -> bool:
        try:
            return store.val is not None
        except linear_util.StoreException:
            return False

    stores = [s for s in fun.stores if s is not None]
    if all(map(has_said, (s for s in rule.stores if s is not None))):
        for store in stores:
            store.reset()
