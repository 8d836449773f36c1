"""Pytrees: prefixes of structures, and the objects that JAX puts in place of unsaved residuals."""

from __future__ import annotations

from typing import Any

import jax
from jax._src import api as _api
from jax._src.api import NotNeeded as NotNeeded
from jax._src.tree_util import broadcast_flattened_prefix_with_treedef, none_leaf_registry

from refs._types import PyTree, PyTreeDef

__all__ = [
    "NotNeeded", "NotSaveable", "broadcast_prefix",
]  # fmt: skip


class _NotSaveable:
    """Stands for a residual that isn't saved. It is an empty pytree, as JAX's own is."""


NotSaveable = getattr(_api, "NotSaveable", _NotSaveable)
jax.tree_util.register_pytree_node(_NotSaveable, lambda x: ((), None), lambda _, __: _NotSaveable())


def broadcast_prefix(prefix: PyTree, tree: PyTreeDef) -> list[Any]:
    """One item of a pytree prefix for each leaf of a structure; None is an item.

    It builds no pytree of the items: a user's class may refuse other contents than its own.

    Raises:
      ValueError: if `prefix` is not a prefix of the structure.
    """
    items, structure = none_leaf_registry.flatten(prefix)
    return broadcast_flattened_prefix_with_treedef(items, structure, tree)
