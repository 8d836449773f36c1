"""Pytrees: their structures, and what JAX puts in the places of leaves."""

from __future__ import annotations

from typing import Any

from jax._src import api as _api
from jax._src import tree_util

from refs._types import PyTree, PyTreeDef

__all__ = [
    "NotNeeded", "NotSaveable", "broadcast_prefix",
]  # fmt: skip


class _NotSaveable:
    """Stands for a residual that isn't saved. It is an empty pytree, as JAX's own is."""


NotNeeded = _api.NotNeeded
NotSaveable = getattr(_api, "NotSaveable", _NotSaveable)
tree_util.register_pytree_node(_NotSaveable, lambda x: ((), None), lambda _, __: _NotSaveable())


def broadcast_prefix(prefix: PyTree, tree: PyTreeDef) -> list[Any]:
    """One item of a pytree prefix for each leaf of a structure; None is an item.

    No pytree is made: a user's class may refuse what isn't its contents.

    Raises:
      ValueError: if it is no prefix of the structure.
    """
    items, structure = tree_util.none_leaf_registry.flatten(prefix)
    return tree_util.broadcast_flattened_prefix_with_treedef(items, structure, tree)
