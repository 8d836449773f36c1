"""`refs.shard_map`: a function over refs, called on each device's shards of them."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
from jax.sharding import PartitionSpec

from refs import _jax
from refs._buffers.devices import devices_told
from refs._handles.access import describe
from refs._handles.predicates import is_ref
from refs._handles.ref_type import RefType
from refs._handles.resharding import placement_of, reshard
from refs._tracing.trace import Call, ref_type
from refs._transactions.calls import in_transaction
from refs._transactions.signature import check_callable, mapped_call, per_leaf, without_views
from refs._transactions.transaction import Slot, Transaction
from refs._types import PyTree, RefLike, Value
from refs.errors import RefTypeError, RefValueError

# JAX's marker for absent specs doesn't have a public name in every version.
INFER = inspect.signature(jax.shard_map).parameters["in_specs"].default


def shard_map(
    f: Callable[..., Any] | None = None,
    /,
    *,
    out_specs: PyTree,
    in_specs: PyTree = INFER,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    axis_names: Set[Any] = frozenset(),
    check_vma: bool = True,
) -> Callable[..., Any]:
    """Maps a function over the shards of refs and arrays. Works like `jax.shard_map`.

    A ref for which `in_specs` has a `PartitionSpec` is, inside, the device's shard of it, to read
    and to write. A ref that is closed over is whole on every device (its spec is `P()`): a value
    written to it must be the same on every device, the result of `jax.lax.psum` for instance.

    Args:
      f: the function of one device's shards. Without it, `shard_map` is a decorator.
      out_specs: how the results are put together, as a pytree prefix. A ref that `f` makes and
        returns becomes a ref of all the devices' contents.
      in_specs: how the arguments are split, as a pytree prefix. Without it, they are split as they
        are already sharded, on a mesh with only `Explicit` axes. Arguments for which it has None go
        to `f` unchanged.
      mesh: the devices; without it, the mesh of `jax.set_mesh`.
      axis_names: the axes of the mesh that `f` is mapped over, if not all.
      check_vma: whether to check that values are the same on every device where `out_specs` or a
        ref requires it.

    Returns:
      The mapped function. At top level JAX runs it operation by operation, which is slow: put a
      `refs.jit` around it.

    Raises:
      RefTypeError: when called, if a ref's spec is not a `PartitionSpec`, or a view is split.
      RefValueError: when called, if `in_specs` doesn't fit the arguments; if a ref has two specs,
        or is split and closed over; if a value written to a ref varies over axes that the ref's
        spec doesn't name; or if somebody has put a ref on other devices than those of the mesh.

    >>> mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> P = jax.sharding.PartitionSpec
    >>> x, total = refs.new_ref(jnp.arange(4.0)), refs.new_ref(jnp.zeros(()))
    >>> @refs.shard_map(mesh=mesh, in_specs=P("d"), out_specs=None)
    ... def step(x):
    ...     x[...] *= 2
    ...     total[...] += jax.lax.psum(x[...].sum(), "d")
    >>> step(x)
    >>> x, total
    (Ref([0., 2., 4., 6.], dtype=float32), Ref(12., dtype=float32))
    """
    options: dict[str, Any] = {"mesh": mesh, "axis_names": axis_names, "check_vma": check_vma}
    if f is None:
        return functools.partial(shard_map, out_specs=out_specs, in_specs=in_specs, **options)

    check_callable("shard_map", f)
    shard_fun = without_views("a function under shard_map", f)

    @functools.wraps(f)
    def mapped(*args: Any) -> Any:
        is_inferred = in_specs is INFER
        specs = _leaf_specs(PartitionSpec() if is_inferred else in_specs, args)
        call, taken = mapped_call("shard_map", args, {}, specs)
        of_refs, of_leaves = _split(call, None if is_inferred else taken)

        def sharded(
            body: Callable[..., Any], out_specs: PyTree, *in_specs: PyTree
        ) -> Callable[..., Any]:
            in_specs = INFER if is_inferred else in_specs

            def named(*given: Any) -> Any:
                return body(*given)

            named.__name__ = _jax.fun_name(f)  # JAX's errors name the user's function.
            return jax.shard_map(named, in_specs=in_specs, out_specs=out_specs, **options)

        touched = [*call.refs]

        def inside(refs: Sequence[RefLike], leaves: Sequence[Value]) -> Any:
            # The state and its specs depend on the refs that `f` touches and closes over. A first
            # trace of `f`, on the types of the shards, finds them.
            found: list[Transaction] = []

            def probe(refs_inside: Sequence[Value], leaves: Sequence[Value]) -> None:
                types = [
                    RefType.of(_jax.AbstractRef(jax.typeof(x)), ref_type(r).origin)
                    for x, r in zip(refs_inside, refs, strict=True)
                ]
                found.append(Transaction.of(shard_fun, refs, leaves, call.rebuild, types))

            jax.eval_shape(
                sharded(probe, None, of_refs, of_leaves), [_array_type(r) for r in refs], leaves
            )
            [t] = found
            touched.extend(t.program.refs)
            spec_of = {s: _slot_spec(s, of_refs, refs) for s in t.touch_of}
            state_specs = [spec_of[s] for s in t.written]
            run = sharded(
                t.run,
                (state_specs, t.per_result(out_specs)),
                state_specs,
                [spec_of[s] for s in t.read],
                of_leaves,
            )
            arrays, made = t.update(refs, lambda *held: run(*held, leaves))
            return t.result(arrays, made, refs)

        _go_to_mesh(mesh, call, of_refs)
        with devices_told(f"shard_map of `{getattr(f, '__name__', f)}`", touched):
            return in_transaction(inside, call.refs, call.leaves)

    return mapped


def _go_to_mesh(
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None,
    call: Call,
    specs: Sequence[PartitionSpec],
) -> None:
    """Divides refs over the mesh as they are used there, if nobody has placed any argument."""
    if not call.refs or not _jax.at_top_level():
        return
    mesh = jax.sharding.get_mesh() if mesh is None else mesh
    is_known = isinstance(mesh, jax.sharding.Mesh) and not mesh.empty
    if not is_known or any(placement_of(x) is not None for x in call.flat):
        return
    for ref, spec in zip(call.refs, specs, strict=True):
        with contextlib.suppress(ValueError):  # It can't be divided so: JAX says why.
            reshard(ref, jax.NamedSharding(mesh, spec))


def _leaf_specs(in_specs: PyTree, args: tuple[Any, ...]) -> list[Any]:
    """The spec of each leaf of a call."""
    try:
        specs, of_views = per_leaf(in_specs, args)
    except ValueError as error:
        raise RefValueError(
            f"shard_map: in_specs={in_specs} doesn't fit the {len(args)} arguments: it must be a "
            "PartitionSpec, or a tuple with an entry for each, of which every one is a prefix of "
            "the argument's structure"
        ) from error
    for view, spec in of_views:
        if spec != PartitionSpec():
            raise RefTypeError(
                f"shard_map: in_specs has {spec} for a view of {describe(view.ref)}: pass the ref, "
                "and take the view of a shard inside"
            )
    for x, spec in zip(jax.tree.leaves(args), specs, strict=True):
        if is_ref(x) and not isinstance(spec, PartitionSpec):
            raise RefTypeError(
                f"shard_map: in_specs has {spec!r} for {describe(x)}: it takes a PartitionSpec"
            )
    return specs


def _split(call: Call, specs: Sequence[Any] | None) -> tuple[list[PartitionSpec], list[Any]]:
    """The specs of a call's distinct refs, and of its other leaves: none, if they are inferred."""
    if specs is None:
        return [ref_type(r).sharding.spec for r in call.refs], []
    of_refs: dict[int, PartitionSpec] = {}
    of_leaves: list[Any] = []
    for place, spec in zip(call.ref_places, specs, strict=True):
        if place is None:
            of_leaves.append(spec)
            continue
        ref = call.refs[place]
        if of_refs.setdefault(place, spec) != spec:
            raise RefValueError(
                f"shard_map: {describe(ref)} is passed twice, with specs {of_refs[place]} and "
                f"{spec}: each device has one shard of it"
            )
    return [of_refs[k] for k in range(len(call.refs))], of_leaves


def _slot_spec(
    slot: Slot, of_refs: Sequence[PartitionSpec], refs: Sequence[RefLike]
) -> PartitionSpec:
    """The spec of a slot's value: `P()` for a ref that is only closed over."""
    if slot.argument is None:
        return PartitionSpec()
    spec = of_refs[slot.argument]
    if slot.outer is not None and any(axis is not None for axis in spec):
        raise RefValueError(
            f"shard_map over {describe(refs[slot.argument])}, which the function also closes over: "
            "that would be the whole ref, on every device. Use the argument only"
        )
    return spec


def _array_type(ref: RefLike) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(ref.shape, ref.dtype, sharding=ref_type(ref).sharding)
