"""What is sharded over a mesh, and what over an explicit one, where an array's type says how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from refs import _jax
from refs._types import RefLike, Sharding, Value


def mesh_sharding(sharding: Sharding | None) -> Any:
    """A sharding as what has it is to keep it, None where there is but one: on a single device."""
    return None if isinstance(sharding, jax.sharding.SingleDeviceSharding) else sharding


def sharded_like(value: Value, x: Value) -> Any:
    """An array of the shape of `x`, or a part of it, sharded as the type of `x` says."""
    sharding = _jax.typeof(x).sharding
    if not _jax.is_on_explicit_mesh(x) or _jax.typeof(value).sharding == sharding:
        return value
    return jax.sharding.reshard(value, sharding)


def sharded_as_part(value: Value, ref: RefLike) -> Any:
    """A value for all of a ref, or for a part of one that isn't sharded, sharded as that is."""
    if not _jax.is_on_explicit_mesh(ref):
        return value
    aval = _jax.typeof(ref).inner_aval
    sharding = aval.sharding
    if not _jax.has_explicit_sharding(aval):
        sharding = sharding.update(spec=jax.P(*[None] * value.ndim))
    return (
        value if _jax.typeof(value).sharding == sharding else jax.sharding.reshard(value, sharding)
    )


def sharded_in_rows(rows: Any, x: Value) -> Any:
    """An array of as many arrays like `x` as there are, each sharded as that is."""
    if not _jax.is_on_explicit_mesh(x):
        return rows
    sharding = _jax.typeof(x).sharding
    return jax.sharding.reshard(rows, sharding.update(spec=jax.P(None, *sharding.spec)))


def automatically(
    f: Callable[..., Any], index: Any, out_sharding: Any, x: Value, *args: Any
) -> Any:
    """`f(index, x, *args)`, sharded as told; XLA finds out how all in between is sharded.

    An index may name any part of an axis that is sharded: only a part's own sharding, which its
    type has to say, can't be known.
    """
    mesh = _jax.typeof(x).sharding.mesh
    if isinstance(out_sharding, jax.sharding.PartitionSpec):
        out_sharding = jax.sharding.NamedSharding(mesh, out_sharding)
    leaves, tree = jax.tree.flatten(index)
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    def run(x: Value, arrays: list[Value], *args: Any) -> Any:
        for k, array in zip(places, arrays, strict=True):
            leaves[k] = array
        return f(jax.tree.unflatten(tree, leaves), x, *args)

    automatic: Any = jax.sharding.auto_axes(run, axes=mesh.explicit_axes, out_sharding=out_sharding)
    return automatic(x, [leaves[k] for k in places], *args)
