"""Arguments of types that say themselves how they are mapped, such as a batched `BCOO`.

JAX makes a lane's part of such an argument; here its arrays are given to the lanes instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from refs import _jax
from refs._types import PyTree


def taken_apart(
    fun: Callable[..., Any], in_axes: PyTree, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
    """`(fun, in_axes, args, kwargs)` of a `vmap` that means the same, over arrays only."""
    in_axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_jax.is_vmappable)
    axes = _jax.broadcast_prefix((in_axes, 0), tree)
    parts: dict[int, Any] = {}  # the structure of a lane's part, by the position of the argument

    for k, x in enumerate(leaves):
        if not _jax.is_vmappable(x):
            continue

        def of_lane(part: Any, k: int = k) -> list[Any]:
            arrays, parts[k] = jax.tree.flatten(part)
            return arrays

        if axes[k] is None:
            leaves[k] = of_lane(x)
        else:
            leaves[k], axes[k] = jax.vmap(of_lane, axes[k])(x), 0

    @functools.wraps(fun)
    def lane(*args: Any, **kwargs: Any) -> Any:
        flat = tree.flatten_up_to((args, kwargs))
        flat = [parts[k].unflatten(x) if k in parts else x for k, x in enumerate(flat)]
        args, kwargs = tree.unflatten(flat)
        return fun(*args, **kwargs)

    new_args, new_kwargs = tree.unflatten(leaves)
    return lane, tree.unflatten(axes)[0], new_args, new_kwargs
