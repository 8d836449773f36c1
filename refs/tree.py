"""The functions of a ref over trees of refs: of parameters, optimizer moments, caches.

Each takes any pytree and leaves what is no ref (or, to make one, no array) as it is. A ref that
stands at several places of a tree is treated as one. Outside of traced functions `get`, `set` and
`swap` are one atomic operation on the whole tree.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from refs import _jax
from refs._buffers import several
from refs._handles import access, ending, making, resharding
from refs._handles.predicates import is_concrete, is_ref, is_view
from refs._handles.resharding import along, go_along, placement_of
from refs._indexing.values import fit
from refs._types import Placement, PyTree, RefLike, Value
from refs.errors import RefTypeError, RefValueError

__all__ = [
    "abstract", "borrow", "copy", "empty_ref", "free_ref", "freeze", "get", "new_ref", "reshard",
    "set", "swap",
]  # fmt: skip


def new_ref(tree: PyTree, *, sharding: PyTree = None, name: str | None = None) -> PyTree:
    """Makes a ref of each array of a tree, named after its place.

    Args:
      tree: a pytree. Arrays of JAX and NumPy become refs; other leaves, such as functions and
        Python numbers, stay as they are.
      sharding: where the refs are to lie, as for `refs.new_ref`: a sharding or device for all, or a
        tree of them, of the structure of `tree` or of an upper part of it.
      name: what the refs are called in messages: `params` makes `params['w']` of the leaf at `w`,
        which without a name is called `['w']`.

    Raises:
      RefTypeError: if a leaf is a ref.

    >>> refs.tree.new_ref({"w": jnp.ones(2), "act": "relu"}, name="params")
    {'act': 'relu', 'w': Ref([1., 1.], dtype=float32, name="params['w']")}
    """

    def make(leaf: Any, sharding: Placement | None, name: str | None) -> Any:
        return making.new_ref(leaf, sharding=sharding, name=name) if _is_array(leaf) else leaf

    return _made("new_ref", make, tree, sharding, name)


def empty_ref(tree: PyTree, *, sharding: PyTree = None, name: str | None = None) -> PyTree:
    """Makes a ref, filled with zeros, of each array type of a tree: state to be restored, say.

    Args:
      tree: a pytree of arrays or `jax.ShapeDtypeStruct`s, such as `jax.eval_shape` gives. Other
        leaves stay as they are.
      sharding: as for `new_ref`.
      name: as for `new_ref`.

    Raises:
      RefTypeError: if a leaf is a ref.

    >>> refs.tree.empty_ref(jax.eval_shape(lambda: {"w": jnp.ones(2)}))
    {'w': Ref([0., 0.], dtype=float32, name="['w']")}
    """

    def make(leaf: Any, sharding: Placement | None, name: str | None) -> Any:
        if not _is_array(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        return making.empty_ref(leaf, sharding=sharding, name=name)

    return _made("empty_ref", make, tree, sharding, name)


def reshard(tree: PyTree, sharding: PyTree) -> None:
    """Moves every ref of a tree, one after the other; see `refs.reshard`.

    Args:
      tree: a pytree of refs; other leaves are passed over.
      sharding: a sharding or device for all, or a tree of them, as for `new_ref`. Where it has
        None, refs stay where they are.
    """

    def move(leaf: Any, sharding: Placement | None) -> None:
        if is_ref(leaf) and sharding is not None:
            resharding.reshard(leaf, sharding)

    jax.tree.map(move, tree, _everywhere(sharding, tree))


def abstract(tree: PyTree, *, sharding: PyTree = None) -> PyTree:
    """The shapes, dtypes and shardings of a tree, to compile a program without its state.

    They also say to a checkpoint library what to restore, and where to.

    Args:
      tree: a pytree of refs, arrays and other leaves, which stay as they are.
      sharding: other shardings, as for `new_ref`. By default each leaf has its own. One that nobody
        has placed, such as a counter, goes along with the others; if nobody has placed any of them,
        they have none.

    Returns:
      The tree with a `jax.ShapeDtypeStruct` for each ref, with `is_ref`, and each array.

    >>> state = refs.tree.new_ref({"w": jnp.ones(2)})
    >>> step = refs.jit(lambda state: state["w"].addupdate(1))
    >>> compiled = step.lower(refs.tree.abstract(state)).compile()
    >>> compiled(state)
    >>> state["w"][...]
    Array([2., 2.], dtype=float32)
    """

    leaves = [x for x in jax.tree.leaves(tree) if is_ref(x) or _is_array(x)]
    shared = along(map(placement_of, leaves)) if _are_here([*filter(is_ref, leaves)]) else None

    def describe(leaf: Any, sharding: Placement | None) -> Any:
        if not is_ref(leaf) and not _is_array(leaf):
            return leaf
        place = sharding or placement_of(leaf) or shared
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place, is_ref=is_ref(leaf))

    return jax.tree.map(describe, tree, _everywhere(sharding, tree))


def get(tree: PyTree) -> PyTree:
    """Reads every ref of a tree: the tree with arrays in the places of refs.

    >>> refs.tree.get({"w": refs.new_ref(1.5), "act": "relu"})
    {'act': 'relu', 'w': Array(1.5, dtype=float32)}
    """
    return _each_once(tree, _values, "get")


def set(tree: PyTree, values: PyTree) -> None:
    """Writes a tree of values into the refs of a tree: into all of them or, at an error, into none.

    The refs keep their memory and their shardings. That is how a checkpoint is restored.

    Args:
      tree: a pytree of refs; other leaves are passed over.
      values: a pytree of the same structure, of arrays and numbers, on any devices.

    Raises:
      RefValueError: if the structures differ, a shape doesn't fit, or a number or array is new
        where the tree has no ref.
      RefTypeError: if a ref can't hold a value's dtype.

    >>> state = {"w": refs.new_ref(jnp.ones(2)), "steps": refs.new_ref(3)}
    >>> saved = refs.tree.get(state)
    >>> state["w"][...] = 0
    >>> refs.tree.set(state, saved)
    >>> state["w"][...]
    Array([1., 1.], dtype=float32)
    """
    found, given = _with_values(tree, values, "set")
    if _are_here(found):
        several.replace(found, given)
    else:
        for ref, value in zip(found, given, strict=True):
            access.set(ref, ..., value)


def swap(tree: PyTree, values: PyTree) -> PyTree:
    """Writes a tree of values, as `set`, and returns the old ones.

    Raises:
      RefValueError, RefTypeError: as `set`.
    """
    found, given = _with_values(tree, values, "swap")
    if _are_here(found):
        old = several.swapped(found, given)
    else:
        old = [access.swap(ref, ..., x) for ref, x in zip(found, given, strict=True)]
    return _filled(tree, found, old)


def freeze(tree: PyTree) -> PyTree:
    """Ends every ref of a tree and returns the tree of their arrays, without copies.

    Raises:
      RefStateError: if one has ended already: then all the others stay.
    """
    return _each_once(tree, lambda refs: [*map(ending.freeze, refs)], "freeze")


def free_ref(tree: PyTree) -> None:
    """Ends every ref of a tree and frees the memory.

    Raises:
      RefStateError: if one has ended already: then all the others stay.
    """
    _each_once(tree, lambda refs: [*map(ending.free_ref, refs)], "free_ref")


def copy(tree: PyTree) -> PyTree:
    """Makes new refs with the values of those in a tree, on the same devices.

    >>> a = {"w": refs.new_ref(1.0)}
    >>> b = refs.tree.copy(a)
    >>> a["w"][...] = 2
    >>> b["w"]
    Ref(1., dtype=float32)
    """

    def copied(refs: Sequence[RefLike]) -> list[RefLike]:
        return [making.like(ref, x) for ref, x in zip(refs, _values(refs), strict=True)]

    return _each_once(tree, copied, "copy")


@contextmanager
def borrow(tree: PyTree) -> Iterator[PyTree]:
    """Lends the arrays that the refs of a tree hold, without copies, as long as a block lasts.

    Inside the block other threads' writes to the refs wait, and the block's own are errors. After
    it the arrays must not be used: the next write deletes them. A checkpoint library thus saves
    state without a second copy of it on the device; if it saves in the background, it has what it
    needs when its `save` returns. A ref that nobody has placed goes along with the others first.
    (Packed refs are copied.)

    Raises:
      RefTypeError: inside of a traced function, where refs have no memory yet.

    >>> import io
    >>> state = {"w": refs.new_ref(jnp.ones(2))}
    >>> with refs.tree.borrow(state) as arrays:
    ...     np.savez(io.BytesIO(), **arrays)
    """
    found = _refs_of(tree, "borrow")
    if not _are_here(found):
        raise RefTypeError(
            "tree.borrow inside a traced function, where refs have no memory to lend: read the "
            "values, `refs.tree.get(tree)`, or borrow outside"
        )
    go_along(found, [])
    with several.lent(found) as arrays:
        yield _filled(tree, found, arrays)


def _made(
    doing: str, make: Callable[..., Any], tree: PyTree, sharding: PyTree, name: str | None
) -> PyTree:
    def make_at(path: Any, leaf: Any, sharding: Placement | None) -> Any:
        if is_ref(leaf):
            raise RefTypeError(
                f"tree.{doing} of a tree with {access.describe(leaf)}: a ref can't hold a ref. "
                "Copy the refs, `refs.tree.copy(tree)`"
            )
        place = (name or "") + jax.tree_util.keystr(path) or None
        try:
            return make(leaf, sharding, place)
        except (TypeError, ValueError) as error:
            error.add_note(f"tree.{doing}: at `{place or 'the root'}`")
            raise

    return jax.tree_util.tree_map_with_path(make_at, tree, _everywhere(sharding, tree))


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def _everywhere(sharding: PyTree, tree: PyTree) -> PyTree:
    """A sharding, or None, for each leaf of a tree."""
    whole = jax.tree.broadcast(sharding, tree, is_leaf=lambda x: x is None)
    one = jax.sharding.SingleDeviceSharding
    return jax.tree.map(lambda x: one(x) if isinstance(x, jax.Device) else x, whole)


def _refs_of(tree: PyTree, doing: str) -> list[RefLike]:
    """The distinct refs of a tree, after a check that each can be used."""
    leaves = jax.tree.leaves(tree, is_leaf=is_view)
    for view in filter(is_view, leaves):
        raise RefTypeError(
            f"tree.{doing} of a tree with a part of {access.describe(view.ref)}: it takes whole "
            "refs. Put the ref in the place of `ref.at[i]`, or use the view by itself, `view[...]`"
        )
    found = {id(x): x for x in leaves if is_ref(x)}
    for ref in found.values():
        access.check_ref(ref, f"tree.{doing}")
    return [*found.values()]


def _are_here(refs: Sequence[RefLike]) -> bool:
    """Whether they hold arrays: outside of traced functions."""
    return _jax.at_top_level() and all(map(is_concrete, refs))


def _values(refs: Sequence[RefLike]) -> list[Value]:
    return several.values_of(refs) if _are_here(refs) else [*map(access.get, refs)]


def _filled(tree: PyTree, refs: Sequence[RefLike], found: Sequence[Any]) -> PyTree:
    """The tree with what was found for each ref in its place."""
    of = dict(zip(map(id, refs), found, strict=True))
    return jax.tree.map(lambda leaf: of.get(id(leaf), leaf), tree)


def _each_once(tree: PyTree, call: Callable[[Sequence[RefLike]], list[Any]], doing: str) -> PyTree:
    refs = _refs_of(tree, doing)
    return _filled(tree, refs, call(refs))


def _with_values(tree: PyTree, values: PyTree, doing: str) -> tuple[list[RefLike], list[Value]]:
    """The distinct refs of a tree, and for each the value that it is to get, where it lies."""
    found = _refs_of(tree, doing)
    leaves, structure = jax.tree.flatten(tree)
    try:
        given = structure.flatten_up_to(values)
    except ValueError:
        raise RefValueError(
            f"tree.{doing} of values whose tree isn't that of the refs: "
            f"{_difference(tree, values)}. Give a tree like that of `refs.tree.get(tree)`"
        ) from None
    paths = jax.tree.leaves_with_path(tree)
    for (path, leaf), value in zip(paths, given, strict=True):
        if not is_ref(leaf) and not _is_same(leaf, value):
            raise RefValueError(
                f"tree.{doing} of another value at `{jax.tree_util.keystr(path) or 'its root'}`, "
                "where the tree has no ref: it would be lost. Make it a ref; of a Python number "
                "`refs.tree.new_ref` makes none, so begin with an array, `jnp.asarray(...)`"
            )
    # The last value for a ref wins, as if they were written one after the other.
    of = {id(leaf): x for leaf, x in zip(leaves, given, strict=True) if is_ref(leaf)}
    go_along(found, jax.tree.leaves(given))
    return found, [_fitted(ref, of[id(ref)], doing) for ref in found]


def _is_same(leaf: Any, value: Any) -> bool:
    """Whether a leaf that is no ref is what is to be written there, as far as numbers go."""
    is_number = isinstance(value, jax.Array | np.ndarray | numbers.Number)
    if leaf is value or not is_number:
        return True
    if isinstance(leaf, _jax.Tracer) or isinstance(value, _jax.Tracer):
        return False
    return isinstance(leaf, jax.Array | np.ndarray | numbers.Number) and bool(
        np.array_equal(np.asarray(leaf), np.asarray(value))
    )


def _difference(tree: PyTree, values: PyTree) -> str:
    here, there = (
        [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(x)]
        for x in (tree, values)
    )
    for said, some, others in (("has nothing at", here, there), ("has also", there, here)):
        if only := [path for path in some if path not in others]:
            return f"it {said} `{only[0] or 'its root'}`"
    return "some containers are of other types"


def _fitted(ref: RefLike, value: Value, doing: str) -> Value:
    place = access.place_of_values(ref) if _are_here([ref]) else None
    with access.blames(f"tree.{doing}", ref):
        value = fit(value, ref.shape, ref.dtype, place)
    return value if place is None else _jax.place(value, place, copy=False)
