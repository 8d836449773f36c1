"""Shardings over a mesh; with an explicit mesh, an array's type contains its sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from refs import _jax
from refs._types import Aval, PyTree, RefLike, Sharding, Value


def mesh_sharding(sharding: Sharding | None) -> Sharding | None:
    """A sharding that a ref must keep; None for a single device."""
    return None if isinstance(sharding, jax.sharding.SingleDeviceSharding) else sharding


def over_mesh_of(ref: RefLike, sharding: Any) -> Any:
    """A spec as a sharding over the mesh of a ref; JAX takes a spec only where a mesh is set."""
    if not isinstance(sharding, jax.sharding.PartitionSpec) or not _jax.is_on_explicit_mesh(ref):
        return sharding
    is_handle = not isinstance(ref, _jax.Tracer)
    of_ref: Any = ref.sharding if is_handle else jax.typeof(ref).inner_aval.sharding
    return jax.sharding.NamedSharding(of_ref.mesh, sharding)


def sharded_as(value: Value, aval: Aval) -> Value:
    """`value`, an array of the shape of a type, sharded as the type says."""
    if not _jax.is_on_explicit_mesh(aval) or jax.typeof(value).sharding == aval.sharding:
        return value
    return jax.sharding.reshard(value, aval.sharding)


def sharded_as_part(value: Value, ref: RefLike) -> Value:
    """A value to write to a ref, sharded as the ref is. A part mustn't divide sharded axes."""
    if not _jax.is_on_explicit_mesh(ref):
        return value
    aval = jax.typeof(ref).inner_aval
    sharding = aval.sharding
    if not _jax.has_explicit_sharding(aval):
        sharding = sharding.update(spec=jax.P(*[None] * value.ndim))
    if jax.typeof(value).sharding == sharding:
        return value
    # Operation by operation, JAX needs the devices: a handle has them, and its type hasn't.
    return jax.sharding.reshard(value, over_mesh_of(ref, sharding.spec))


def sharded_in_rows(rows: Value, x: Value) -> Value:
    """`rows`, `[n_rows, *x.shape]`, with each row sharded as `x` is."""
    if not _jax.is_on_explicit_mesh(x):
        return rows
    sharding = jax.typeof(x).sharding
    return jax.sharding.reshard(rows, sharding.update(spec=jax.P(None, *sharding.spec)))


def automatically(
    f: Callable[..., Value],
    index: PyTree,
    out_sharding: Sharding,
    x: Value,
    *args: Any,
) -> Value:
    """`f(index, x, *args)`, sharded as `out_sharding`; XLA chooses the shardings in between.

    An index may name any part of a sharded axis. But the part's sharding, which its type must
    contain, doesn't follow from that: it has to be given.
    """
    mesh = jax.typeof(x).sharding.mesh
    leaves, tree = jax.tree.flatten(index)
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    def run(x: Value, arrays: list[Value], *args: Any) -> Value:
        for k, array in zip(places, arrays, strict=True):
            leaves[k] = array
        return f(jax.tree.unflatten(tree, leaves), x, *args)

    automatic: Any = jax.sharding.auto_axes(run, axes=mesh.explicit_axes, out_sharding=out_sharding)
    return automatic(x, [leaves[k] for k in places], *args)
