"""The interface of JAX's traces and tracers, for those of this library (`OpByOp`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax._src.api import _post_hook_state
from jax._src.core import add_explicit_mesh_axis_names, add_spmd_axis_names
from jax._src.interpreters.ad import LinearizeTrace
from jax._src.interpreters.partial_eval import DynamicJaxprTrace
from jax.core import Trace as Trace
from jax.extend import source_info_util
from jax.extend.core import DebugInfo, Jaxpr, new_jaxpr_eqn
from jax.extend.core import set_current_trace as set_current_trace
from jax.interpreters.ad import JVPTrace

from refs._jax.equations import as_closed, new_var, with_equations
from refs._jax.names import current_trace, disable_jit, eval_trace, trace_state
from refs._types import Aval, ClosedJaxpr, Primitive, Value

__all__ = [
    "Trace", "as_jaxpr", "is_differentiating", "is_staging", "is_staging_trace",
    "lane_axes", "looks_for_nans", "new_input", "not_looking_for_nans", "runs_compiled",
    "set_current_trace", "trace_functions",
]  # fmt: skip


@contextmanager
def lane_axes(spmd_axis_name: Any, mesh_axes: Any) -> Iterator[None]:
    """Meanwhile one lane is traced: tells JAX the mesh axes of the lanes, as `jax.vmap` does."""
    with (
        add_spmd_axis_names(_as_names(spmd_axis_name)),
        add_explicit_mesh_axis_names(_as_names(mesh_axes)),
    ):
        yield


def _as_names(names: Any) -> Any:
    return names if names is None or isinstance(names, tuple) else (names,)


def is_staging() -> bool:
    """Whether operations are only recorded in a jaxpr now, so that their results have no values."""
    return is_staging_trace(current_trace())


def is_staging_trace(trace: Any) -> bool:
    """Whether a trace of JAX's records a jaxpr."""
    return isinstance(trace, DynamicJaxprTrace)


def new_input(trace: Any, aval: Aval, name: str) -> Value:
    """One more input of the jaxpr that a trace records, and its name for JAX's errors."""
    frame = trace.frame
    if not isinstance(frame.debug_info.arg_names, list):  # One that grows.
        names = [*(frame.debug_info.arg_names or ())][: len(frame.invars)]
        names += [""] * (len(frame.invars) - len(names))
        frame.debug_info = frame.debug_info._replace(arg_names=names)
    frame.debug_info.arg_names.append(name)
    return trace.new_arg(aval, source_info=source_info_util.current())


def is_differentiating() -> bool:
    """Whether JAX differentiates each operation now, forwards, as it is called."""
    return isinstance(current_trace(), JVPTrace | LinearizeTrace)


def looks_for_nans() -> bool:
    """Whether JAX is configured to rerun a program op by op if it gives a NaN or an infinity."""
    return jax.debug_nans.value or jax.debug_infs.value


@contextmanager
def not_looking_for_nans() -> Iterator[None]:
    """A context in which programs may give NaNs and infinities.

    JAX's own contexts, `jax.debug_nans(False)`, leave a thread without the check where
    `jax.config.update` has turned it on for all: they set the hook, too, and don't restore it.
    """
    if not looks_for_nans():
        yield
        return
    settings = (jax.debug_nans, False), (jax.debug_infs, False), (_post_hook_state, None)
    before = [(state, state.swap_local(value)) for state, value in settings]
    try:
        yield
    finally:
        for state, value in before:
            state.set_local(value)


def runs_compiled() -> bool:
    """Whether operations run at once, each as the program that it was compiled to."""
    # One function, and not one for each question, as each eager write asks all of them.
    return trace_state.value is eval_trace and not (
        disable_jit.value or jax.debug_nans.value or jax.debug_infs.value
    )


def as_jaxpr(primitive: Primitive, avals: Sequence[Aval], params: dict[str, Any]) -> ClosedJaxpr:
    """A closed jaxpr of one equation, which applies a primitive to operands of these types."""
    out, effects = primitive.abstract_eval(*avals, **params)
    invars = [*map(new_var, avals)]
    outvars = [*map(new_var, out if primitive.multiple_results else [out])]
    source = source_info_util.current()
    eqn = new_jaxpr_eqn(invars, outvars, primitive, params, effects, source)
    info = DebugInfo("refs", primitive.name, None, None)
    return as_closed(Jaxpr((), invars, outvars, [eqn], effects, info))


def trace_functions(
    primitive: Primitive,
    funs: Sequence[Any],
    types: Sequence[Aval],
    params: dict[str, Any],
) -> tuple[ClosedJaxpr, Callable[[Sequence[Value]], Any]]:
    """Traces `bind` of a primitive that takes functions to a closed jaxpr.

    The second result is a function from the jaxpr's outputs to the result of `bind`.
    """
    for fun in funs:  # Drop what they stored in an attempt that was broken off.
        for store in getattr(fun, "stores", None) or ():
            if store is not None:
                store.reset()
    given: Any = None

    def bind(*args: Any) -> list[Value]:
        nonlocal given
        given = primitive.bind(*args, subfuns=tuple(funs), **params)
        return list(_leaves(given))

    source = source_info_util.current()  # An inner trace doesn't have the caller's.
    jaxpr = with_equations(
        jax.make_jaxpr(bind)(*types),
        lambda j: j.replace(eqns=[e.replace(source_info=source) for e in j.eqns]),
    )
    return jaxpr, lambda out: given.update(out) if hasattr(given, "update") else list(out)


def _leaves(given: Any) -> Sequence[Any]:
    return given.vals if hasattr(given, "vals") else given  # `shard_map` returns a `FlatTree`
