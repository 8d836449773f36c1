"""`refs.pack`: many small refs in one buffer."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from refs import _jax
from refs._buffers.operations import buffer_of
from refs._buffers.stores import Pack, Packed, Place, layout_of
from refs._handles import access
from refs._handles.making import as_array, new_ref, strong_type
from refs._handles.predicates import is_ref
from refs._handles.ref import Ref
from refs._origin import Origin, user_site
from refs._types import PyTree, Value
from refs.errors import RefTypeError

# Taking a buffer from a program and giving it another costs about a microsecond, in which some ten
# kilobytes can be copied.
LARGEST = 2**14


def pack(tree: PyTree, *, larger_than: int = LARGEST, name: str | None = None) -> PyTree:
    """Makes a ref of each leaf of a tree, and lays the small ones side by side in one buffer.

    A call of a compiled function costs about a microsecond for each buffer that goes in and out,
    with refs as by hand. All refs of a pack are one buffer for each dtype: so a call over
    200 small refs costs a tenth of that, and where they all get the same operation, as in an
    optimizer, it is one operation. Each is a `Ref` in every other respect; but threads wait for
    each other where they use different refs of a pack, and callbacks can't use those of one that
    their program updates. Inside a traced function each ref has a buffer of its own.

    Args:
      tree: a pytree of arrays and scalars.
      larger_than: in bytes; larger leaves get buffers of their own, as do PRNG keys, empty arrays
        and those on several devices or in the host's memory. By default 16 KiB: to copy more takes
        longer than to pass a buffer.
      name: what the refs are called in messages: `params` makes `params['w']` of the leaf at `w`,
        which without a name is called `['w']`.

    Returns:
      A tree of the same structure, of refs.

    Raises:
      RefTypeError: if a leaf is a ref, or no array can be made of it.

    >>> params = refs.pack({"w": jnp.ones((2, 2)), "b": jnp.zeros(2)}, name="params")
    >>> params["b"]
    Ref([0., 0.], dtype=float32, name="params['b']")
    >>> @refs.jit
    ... def step(params):
    ...     for p in params.values():
    ...         p[...] += 1
    >>> step(params)
    >>> params["w"]
    Ref([[2., 2.],
         [2., 2.]], dtype=float32, name="params['w']")
    """
    paths, structure = jax.tree.flatten_with_path(tree)
    site = user_site()
    leaves: list[Any] = []
    origins: list[Origin] = []
    for path, leaf in paths:
        if is_ref(leaf):
            raise RefTypeError(
                f"pack of a tree with {access.describe(leaf)}: a ref can't hold a ref. Give its "
                "value, `refs.pack(jax.tree.map(lambda ref: ref[...], tree))`"
            )
        origins.append(Origin((name or "") + jax.tree_util.keystr(path) or None, site))
        try:
            leaves.append(jnp.asarray(as_array(leaf)))
        except (RefTypeError, TypeError):
            place = origins[-1].name or "its root"
            raise RefTypeError(
                f"pack of a tree with a {type(leaf).__name__} at `{place}`: its leaves are arrays "
                "and scalars. Take out what is none"
            ) from None
    kinds = [_kind(leaf, larger_than) for leaf in leaves]
    small = [k for k, kind in enumerate(kinds) if kind is not None]
    made: dict[int, Ref] = {}
    if len(small) > 1:
        made = _packed({k: leaves[k] for k in small}, [kinds[k] for k in small], origins, site)
    return structure.unflatten(
        made[k] if k in made else new_ref(leaf, name=origins[k].name)
        for k, leaf in enumerate(leaves)
    )


def _kind(leaf: Any, larger_than: int) -> Hashable:
    """What small leaves in one buffer have in common; None for a leaf with a buffer of its own."""
    if not _jax.at_top_level() or _jax.is_key(leaf.dtype) or _jax.is_in_host_memory(leaf):
        return None
    if not 0 < leaf.size * leaf.dtype.itemsize <= larger_than:
        return None
    if not isinstance(leaf.sharding, jax.sharding.SingleDeviceSharding):
        return None
    return leaf.dtype, leaf.sharding if leaf.committed else None


def _packed(
    leaves: dict[int, Value], kinds: list[Any], origins: list[Origin], site: Any
) -> dict[int, Ref]:
    """Refs for leaves of these kinds, by the numbers of the leaves."""
    order = {kind: base for base, kind in enumerate(dict.fromkeys(kinds))}
    starts = [0] * len(order)
    places: list[Place] = []
    values: list[list[np.ndarray]] = [[] for _ in order]
    for leaf, kind in zip(leaves.values(), kinds, strict=True):
        base, shape = order[kind], np.shape(leaf)
        places.append(Place(base, starts[base], shape))
        starts[base] += math.prod(shape)
        values[base].append(np.asarray(leaf).reshape(-1))
    bases = [
        _base(np.concatenate(arrays), sharding, len(arrays), site)
        for arrays, (_, sharding) in zip(values, order, strict=True)
    ]
    pack = Pack(layout_of(tuple(places)), bases)
    for number, (k, place) in enumerate(zip(leaves, places, strict=True)):
        base = bases[place.base]
        buffer = buffer_of(base)
        device = buffer.sharding if buffer.committed else None
        at = jax.device_put(np.int32(place.start), device)
        with jax.enable_x64(True):  # 64-bit dtypes stay.
            shape = jax.ShapeDtypeStruct(place.shape, base.dtype, is_ref=True)
            aval = _jax.shaped_abstractify(shape)
        store = base._store.part(Packed(pack, number), base.dtype, at)
        pack.refs.append(Ref._of(strong_type(aval, origins[k]), store))
    return dict(zip(leaves, pack.refs, strict=True))


def _base(value: np.ndarray, sharding: Any, n: int, site: Any) -> Ref:
    origin = Origin(f"pack of {n} refs of dtype {value.dtype}", site)
    with jax.enable_x64(True):
        array = jnp.asarray(value) if sharding is None else jax.device_put(value, sharding)
        base = new_ref(array)
    return Ref._of(strong_type(base._aval, origin), base._store)
