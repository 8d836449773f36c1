"""`refs.io_callback` and `refs.pure_callback`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from refs import _jax
from refs._buffers.stores import store_of
from refs._callbacks.eager import call_now
from refs._callbacks.plan import Plan
from refs._callbacks.primitives import host_callback_p, ref_callback_p
from refs._callbacks.spec import CallbackSpec, Part
from refs._handles.access import check_ref, describe
from refs._handles.making import new_ref
from refs._handles.predicates import is_ref, is_view
from refs._handles.ref import Ref
from refs._handles.view import RefView
from refs._origin import user_site
from refs._tracing.names import one_name
from refs._tracing.trace import ref_type, unique
from refs._types import Aval, DType, PyTree, RefLike, Sharding, Value
from refs.errors import RefTypeError, RefValueError


def io_callback(
    callback: Callable[..., Any],
    result_shape_dtypes: PyTree,
    *args: Any,
    sharding: None = None,
    ordered: bool = False,
    keep_old: bool | None = None,
    device: str | None = None,
    **kwargs: Any,
) -> PyTree:
    """Calls a Python function, which may do anything, with refs among its arguments.

    Works like `jax.experimental.io_callback`. A ref, anywhere in the arguments, arrives as a
    writable NumPy array in the ref's own memory, without a copy; a view, `r.at[i]`, as that part of
    it; any other array as a read-only one. The callback may use these arrays until it returns.

    The callback runs each time the program reaches the call: at top level, under `refs.jit`, in
    loops and branches, in each lane of `refs.vmap`, and on each device of `refs.shard_map`. Calls
    that touch one ref are made in the program's order; others in any order, unless they are
    `ordered`.

    On a GPU or TPU, memory is copied to the host and back by JAX's own callback; see `device`.

    Args:
      callback: the function. It is called with NumPy arrays and returns the results.
      result_shape_dtypes: a pytree of objects with a shape and a dtype, such as
        `jax.ShapeDtypeStruct`; None for no results.
      *args: pytrees of refs, views and arrays.
      sharding: must be None: each device of `refs.shard_map` makes a call of its own.
      ordered: whether the call is made after all ordered ones before it, and before all after it.
      keep_old: whether the refs get their old values back if the callback raises, for which a call
        needs a copy of them. None: if they have at most 64 KiB together. Without a copy, refs that
        the callback was given keep what it has written to them.
      device: "gpu" if the callback takes arrays on a GPU (with `__cuda_array_interface__`,
        `__dlpack__` and `stream`) instead of NumPy's. Such a callback has no results: it writes to
        refs.
      **kwargs: more arguments.

    Returns:
      The results: arrays of the shapes and dtypes asked for.

    Raises:
      CallbackError: if the callback raises an exception, which becomes its cause.
        KeyboardInterrupt and the like are raised themselves.
      RefEscapeError: if the callback keeps an array that it was given.
      RefTypeError, RefValueError: if the results don't match `result_shape_dtypes`; if an argument
        has a dtype of less than a byte, or is an array of PRNG keys; if a ref is spread over
        devices.

    >>> seen = refs.new_ref(jnp.zeros(3))
    >>> def read_sensor(seen, k):
    ...     seen[k] = 20.5
    >>> @refs.jit
    ... def step(k):
    ...     refs.io_callback(read_sensor, None, seen, k)
    >>> step(1)
    >>> seen
    Ref([ 0. , 20.5,  0. ], dtype=float32)
    """
    if ordered:
        if jax.sharding.get_abstract_mesh().manual_axes:
            raise RefValueError(
                "io_callback with ordered=True inside `shard_map`: the devices run side by side. "
                "Calls that touch one ref are made in order on each device"
            )
        callback, args = _after(callback), (_order(), *args)
    options = _Options("io_callback", sharding, None, keep_old, device)
    return _call(callback, result_shape_dtypes, args, kwargs, options)


def pure_callback(
    callback: Callable[..., Any],
    result_shape_dtypes: PyTree,
    *args: Any,
    sharding: None = None,
    vmap_method: str | None = None,
    keep_old: bool | None = None,
    device: str | None = None,
    **kwargs: Any,
) -> PyTree:
    """Calls a Python function whose only effect is on the refs that it is given.

    Works like `jax.pure_callback`, and like `refs.io_callback`; but the callback may run more often
    than the program reaches the call, under `refs.checkpoint` for instance, or not at all if
    nothing uses its results and what it writes.

    Args:
      callback: the function. It is called with NumPy arrays and returns the results.
      result_shape_dtypes: a pytree of objects with a shape and a dtype; None for no results.
      *args: pytrees of refs, views and arrays.
      sharding: must be None: each device of `refs.shard_map` makes a call of its own.
      vmap_method: how `vmap` maps the call. "sequential": a call in each lane, one after the other.
        "expand_dims": one call, whose arrays have an axis in front, of size 1 where lanes share
        them. "broadcast_all": the same, but they all have the lanes' size. The other methods of
        `jax.pure_callback` do what they do there. Without a method, an error.
      keep_old: as `io_callback`'s.
      device: as `io_callback`'s.
      **kwargs: more arguments.

    Returns:
      The results: arrays of the shapes and dtypes asked for.

    Raises:
      CallbackError, RefEscapeError, RefTypeError, RefValueError: as `io_callback`.
      MissingRuleError: in a lane of `vmap`, if there is no `vmap_method`.

    >>> table = refs.new_ref(jnp.arange(4.0))
    >>> def halve(table):
    ...     table /= 2
    ...     return table.sum()
    >>> refs.pure_callback(halve, jax.ShapeDtypeStruct((), "float32"), table)
    Array(3., dtype=float32)
    >>> table
    Ref([0. , 0.5, 1. , 1.5], dtype=float32)
    """
    if vmap_method not in _METHODS:
        raise RefValueError(
            f"pure_callback with vmap_method={vmap_method!r}: it is one of "
            f"{', '.join(map(repr, _METHODS))}"
        )
    options = _Options("pure_callback", sharding, vmap_method, keep_old, device)
    return _call(callback, result_shape_dtypes, args, kwargs, options)


_METHODS = (
    None,
    "sequential",
    "sequential_unrolled",
    "expand_dims",
    "broadcast_all",
    "legacy_vectorized",
)


class _Options(NamedTuple):
    what: str  # "io_callback" or "pure_callback"
    sharding: Sharding | None
    method: str | None
    keep_old: bool | None
    device: str | None


def _call(
    callback: Callable[..., Any],
    result_shape_dtypes: PyTree,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: _Options,
) -> PyTree:
    name = _checked_name(callback, options)
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_view)
    views = [x if is_view(x) else RefView(x, _WHOLE) if is_ref(x) else None for x in leaves]
    refs, numbers = unique([one_name(view.ref) for view in views if view is not None])
    for ref in refs:
        check_ref(ref, name)
    arrays = [_array(x) for x, view in zip(leaves, views, strict=True) if view is None]
    for x in (*refs, *arrays):
        _on_host(x.dtype, name)
    in_indices = [_array(i) for view in views if view is not None for i in view._arrays]
    rest = iter(numbers)
    parts = tuple(None if view is None else _part(view, next(rest)) for view in views)
    types, out_tree = jax.tree.flatten(result_shape_dtypes)
    spec = CallbackSpec(
        options.what,
        callback,
        tree,
        parts,
        _results(types, name, options.device),
        tuple(ref_type(r).origin for r in refs),
        options.method,
        user_site(),
        options.keep_old,
        options.device,
    )
    return jax.tree.unflatten(out_tree, _bind(spec, name, refs, [*in_indices, *arrays]))


def _bind(spec: CallbackSpec, name: str, refs: list[RefLike], operands: list[Value]) -> list[Value]:
    """Makes the call at top level, or traces it; returns the leaves of its results."""
    if not _jax.at_top_level():
        if refs:
            return ref_callback_p.bind(*refs, *operands, spec=spec)
        return host_callback_p.bind(*operands, plan=Plan.of(spec, 0), n_kept=0, is_io=spec.is_io)
    if spec.device is not None:
        raise RefTypeError(f"{name} with device='gpu' at top level: call it under `refs.jit`")
    for ref in refs:
        if store_of(ref).sharding is not None:
            raise RefValueError(
                f"{name} on {describe(ref)}, which is spread over devices: each has only a part of "
                "the memory. Put it in `refs.shard_map`, where every device calls with its own part"
            )
    return call_now(spec, refs, operands)


def _checked_name(callback: Any, options: _Options) -> str:
    if not callable(callback):
        raise RefTypeError(f"{options.what} of a {type(callback).__name__}: it calls a function")
    name = f"{options.what} of `{getattr(callback, '__name__', type(callback).__name__)}`"
    if options.sharding is not None:
        raise RefTypeError(
            f"{name} with a sharding: put it in `refs.shard_map`, where every device calls with "
            "its own part"
        )
    if options.device not in (None, "gpu"):
        raise RefValueError(f"{name} with device={options.device!r}: it is None or 'gpu'")
    return name


def _results(types: list[Aval], name: str, device: str | None) -> tuple[Aval, ...]:
    """The results' types as JAX has them."""
    if device == "gpu" and types:
        raise RefTypeError(f"{name} with device='gpu' and results: write them to refs")
    for t in types:
        if not (hasattr(t, "shape") and hasattr(t, "dtype")):
            raise RefTypeError(
                f"{name}: result_shape_dtypes has a {type(t).__name__}, which has no shape and "
                "dtype. Give a `jax.ShapeDtypeStruct(shape, dtype)` for each result, or None for "
                "no results"
            )
    return tuple(_jax.array_type(t.shape, _on_host(t.dtype, name)) for t in types)


def _array(x: Value) -> Value:
    if isinstance(x, jax.Array):
        return x
    if isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "biufc" and _jax.at_top_level():
        # Converting it to a JAX array and back takes as long as the rest of the call.
        return np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype))[...]
    return jnp.asarray(x)


def _part(view: RefView, number: int) -> Part:
    frozen = view.tree_flatten()[1]
    is_whole = frozen == _WHOLE
    shape = view.ref.shape if is_whole else view.shape
    return Part(number, frozen, len(view._arrays), shape, is_whole)


_WHOLE = ((...,),)  # the path of `ref.at[...]`, a view of all of the ref


def _on_host(dtype: DType, name: str) -> DType:
    """The dtype as JAX canonicalizes it.

    Raises:
      RefTypeError: if NumPy and XLA don't store it in the same form.
    """
    dtype, why_not = _host_dtype(dtype, jax.config.read("jax_enable_x64"))
    if why_not is not None:
        raise RefTypeError(f"{name} with an array of {why_not}")
    return dtype


@functools.lru_cache
def _host_dtype(dtype: DType, _: bool) -> tuple[DType, str | None]:
    """The canonical dtype, and why the host can't share its memory, or None.

    The flag, `jax_enable_x64`, is part of the cache's key.
    """
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return dtype, "PRNG keys: NumPy has none. Pass `jax.random.key_data(keys)`"
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    if jnp.issubdtype(dtype, jnp.number) and info(dtype).bits < 8:
        return dtype, (
            f"dtype {dtype}: XLA packs several elements into a byte, and NumPy can't. Convert it "
            "before, `x.astype('int8')` for instance"
        )
    return dtype, None


# --- Order ----------------------------------------------------------------------------------------


def _order() -> Ref:
    """The ref that all ordered callbacks are given: calls that touch one ref keep their order."""
    if not _made:
        with _jax.set_current_trace(_jax.eval_trace):  # Else `new_ref` might be traced.
            _made.append(new_ref(_NOTHING, name="the order of callbacks"))
    return _made[0]  # Two threads, or a signal handler, may have made one each.


_NOTHING = np.zeros((), np.uint8)
_made: list[Ref] = []


def _after(callback: Callable[..., Any]) -> Callable[..., Any]:
    """The callback, to be called with the array of `_order` first, which it doesn't get."""

    @functools.wraps(callback)
    def called(_: Any, *args: Any, **kwargs: Any) -> Any:
        return callback(*args, **kwargs)

    return called
