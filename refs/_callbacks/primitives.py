"""Two primitives: `ref_callback`, as a callback is traced, and `host_callback`, its discharge.

`ref_callback` takes refs. `host_callback` is pure: it takes the arrays that the refs hold and
returns their new values, in the same memory. Only `host_callback` is batched and lowered.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import Primitive

from refs import _jax
from refs._callbacks.failure import passed_on
from refs._callbacks.gpu import on_device
from refs._callbacks.plan import Layer, Plan
from refs._callbacks.spec import CallbackSpec
from refs._types import Aval, Value
from refs.errors import MissingRuleError, RefTypeError, RefValueError

ref_callback_p = Primitive("ref_callback")
host_callback_p = Primitive("host_callback")
ref_callback_p.multiple_results = host_callback_p.multiple_results = True


@_jax.def_effectful_abstract_eval(ref_callback_p)
def _type_of_ref_callback(*avals: Aval, spec: CallbackSpec) -> tuple[list[Aval], set[Any]]:
    """The operands are the distinct refs, then arrays; the results are those of the callback."""
    n = len(spec.origins)
    effects = _jax.read_and_write(range(n))
    types = [_jax.varying_over(t, avals) for t in spec.results]
    return types, {*effects, _jax.io_effect} if spec.is_io and not n else effects


@_jax.def_effectful_abstract_eval(host_callback_p)
def _type_of_host_callback(
    *avals: Aval, plan: Plan, n_kept: int, is_io: bool
) -> tuple[list[Aval], set[Any]]:
    """The operands are the roots, `n_kept` values that are passed through, and the others.

    The results are the roots and the kept values, in the same memory, then the callback's own:
    `[*sizes, *shape]`, with the size of the outermost map first.
    """
    sizes = tuple(layer.size for layer in reversed(plan.layers))
    n_state = plan.n_roots + n_kept
    results = [t.update(shape=(*sizes, *t.shape)) for t in plan.spec.results]
    results = [_jax.varying_over(t, avals) for t in results]
    return [*avals[:n_state], *results], {_jax.io_effect} if is_io else set()


def _discharge(*values: Value, spec: CallbackSpec) -> list[Value]:
    """The rule of JAX's own discharge, outside of this library's transformations."""
    plan = Plan.of(spec, len(spec.origins))
    return host_callback_p.bind(*values, plan=plan, n_kept=0, is_io=spec.is_io)


_jax.register_native_discharge(ref_callback_p, _discharge)


@host_callback_p.def_impl
def _evaluate(*operands: Value, **params: Any) -> list[Value]:
    """Runs the call op by op, on copies of the roots: they aren't donated."""
    spec, key = params["plan"].spec, tuple(params.items())
    if key not in spec.compiled:
        spec.compiled[key] = jax.jit(lambda *args: host_callback_p.bind(*args, **params))
    with jax.disable_jit(False):  # Without jit, `bind` would call this function again.
        return jax.block_until_ready(spec.compiled[key](*operands))


def _refuse_derivatives(plan: Plan, **_: Any) -> NoReturn:
    raise RefTypeError(
        f"{plan.spec.describe()} in a function that is differentiated with respect to what it is "
        "given: what Python does can't be differentiated. Give the function around it a rule "
        "(`jax.custom_vjp`), or pass `jax.lax.stop_gradient(x)`"
    )


_jax.refuse_derivatives(host_callback_p, _refuse_derivatives)


def _batch(
    size: int,
    operands: Sequence[Value],
    axes: Sequence[int | None],
    *,
    plan: Plan,
    n_kept: int,
    is_io: bool,
) -> tuple[list[Value], list[int | None]]:
    """Adds a layer to the plan; batch axes of results come first."""
    spec = plan.spec
    if not plan.by_lane and all(axis is None for axis in axes):
        out = host_callback_p.bind(*operands, plan=plan, n_kept=n_kept, is_io=is_io)
        return out, [None for _ in out]
    if spec.method is None and not spec.is_io:
        raise MissingRuleError(
            f"vmap of {spec.describe()}: say how it is mapped, vmap_method='sequential' (called "
            "for one lane after the other), 'expand_dims' or 'broadcast_all' (once for all)"
        )
    if not plan.is_sequential and not spec.takes_whole_refs:
        raise RefTypeError(
            f"vmap of {spec.describe()}: with vmap_method={spec.method!r} it is called once for "
            "all lanes, and can't be given a part of a ref in each. Pass the ref and the index, or "
            "use 'sequential'"
        )
    # Each lane gets its own value of every root, even if all lanes hold the same until now.
    roots = [
        x if axis is not None else jax.numpy.broadcast_to(x, (size, *x.shape))
        for x, axis in zip(operands[: plan.n_roots], axes, strict=False)
    ]
    root_axes = [0 if axis is None else axis for axis in axes[: plan.n_roots]]
    axes = (*root_axes, *axes[plan.n_roots :])
    plan = plan._replace(layers=(*plan.layers, Layer(size, tuple(axes))), by_lane=False)
    operands = (*roots, *operands[plan.n_roots :])
    out = host_callback_p.bind(*operands, plan=plan, n_kept=n_kept, is_io=is_io)
    return out, [*root_axes, *(0 for _ in spec.results)]


_jax.register_batching(host_callback_p, _batch)


# --- Lowering -------------------------------------------------------------------------------------


def _on_buffers(
    platform: str, types: Sequence[Aval], *, plan: Plan, n_kept: int, is_io: bool
) -> tuple[Callable[..., Any], int] | None:
    """The handler on XLA's buffers, and how many operands alias results; None for `_staged`.

    The buffers are those of the operands, then those of the results (see `_type_of_host_callback`).
    """
    n_operands, n_state = len(types), plan.n_roots + n_kept
    if platform != "cpu":
        given = [*types[: plan.n_roots], *types[n_state:]]
        return (on_device(plan, given, n_kept), n_state) if plan.spec.device == "gpu" else None
    if plan.spec.device == "gpu":
        raise RefTypeError(
            f"{plan.spec.describe()} with device='gpu', in a program for the CPU: there its arrays "
            "are NumPy's. Leave `device` out"
        )

    run, n_roots = plan.runner(), plan.n_roots

    def handler(_: Any, *buffers: Any) -> tuple[()]:
        roots = [*map(_memory_of, buffers[n_operands : n_operands + n_roots])]
        operands = [*roots, *map(_memory_of, buffers[n_state:n_operands])]
        results = [*map(_memory_of, buffers[n_operands + n_state :])]
        try:
            run(operands, results)
        except BaseException as error:
            raise passed_on(error, plan, roots) from error
        return ()

    return handler, n_state


def _memory_of(buffer: Any) -> np.ndarray:
    """An array on the memory of one of XLA's buffers.

    The owner of jaxlib's own array is an object on the stack, which ends with the call. If a
    callback kept that array, a later buffer at the same stack address would be taken for its owner.
    """
    x = np.asarray(buffer)
    address, _ = x.__array_interface__["data"]
    memory: Any = (ctypes.c_char * x.nbytes).from_address(address)
    return np.ndarray(x.shape, x.dtype, memory)


def _staged(*operands: Value, plan: Plan, n_kept: int, is_io: bool) -> list[Value]:
    """The call through copies on the host, for devices whose memory the host can't use."""
    n_state = plan.n_roots + n_kept
    kept = operands[plan.n_roots : n_state]
    given = [*operands[: plan.n_roots], *operands[n_state:]]
    sizes = tuple(layer.size for layer in reversed(plan.layers))
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given[: plan.n_roots]]
    like += [jax.ShapeDtypeStruct((*sizes, *t.shape), t.dtype) for t in plan.spec.results]

    def call(*arrays: Value) -> list[np.ndarray]:
        operands = [np.array(x) for x in arrays]
        results = [np.empty(t.shape, t.dtype) for t in like[plan.n_roots :]]
        roots = operands[: plan.n_roots]
        try:
            plan.runner()(operands, results)
        except BaseException as error:
            raise passed_on(error, plan, roots) from error
        return [*roots, *results]

    out = io_callback(call, like, *given)
    return [*out[: plan.n_roots], *kept, *out[plan.n_roots :]]


def _check_devices(n: int, *, plan: Plan, **_: Any) -> None:
    if n > 1:
        raise RefValueError(
            f"{plan.spec.describe()} in a program that XLA spreads over {n} devices: each has only "
            "a part of the memory. Put it in `refs.shard_map`, where every device calls with its "
            "own part"
        )


_jax.register_host_lowering(host_callback_p, _on_buffers, _staged, _check_devices)
