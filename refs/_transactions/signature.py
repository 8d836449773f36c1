"""Options that select arguments of a call, static, donated or mapped: JAX's conventions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from refs import _jax
from refs._handles.access import check_ref, describe
from refs._handles.predicates import is_ref, is_view
from refs._handles.view import RefView
from refs._tracing.names import one_name
from refs._tracing.trace import Call
from refs._types import Aval, DType, PyTree, PyTreeDef, RefLike, Value
from refs.errors import RefTypeError, RefValueError


def type_of(array: Any) -> Aval:
    """The type of an argument, which a program depends on. Raises TypeError if it is no array."""
    return array.aval if type(array) is _jax.ArrayImpl else _jax.shaped_abstractify(array)


def are_arrays(leaves: Iterable[Any]) -> bool:
    """Whether JAX takes all of these for arrays; its functions raise their own error if not."""
    try:
        return all(type_of(x) is not None for x in leaves)
    except (TypeError, OverflowError):
        return False


def check_callable(doing: str, fun: Any) -> None:
    """Raises a RefTypeError if `fun` isn't callable, before it is called."""
    if not callable(fun):
        raise RefTypeError(f"Expected a callable value, got {fun!r:.100}, for {doing}")


Restore = Callable[[tuple[Any, ...], dict[str, Any]], Any]
_NAMES = "args", "kwargs"


def _as_given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args, kwargs


def path_of(
    tree: PyTreeDef, k: int, restore: Restore = _as_given, names: tuple[str, str] = _NAMES
) -> str:
    """The path of the `k`-th leaf of `(args, kwargs)`; parameters as those of `check_arrays`."""
    places = [object() for _ in range(tree.num_leaves)]
    given = restore(*tree.unflatten(places))
    [path] = [p for p, x in jax.tree.leaves_with_path(given) if x is places[k]]
    return names[path[0].idx] + jax.tree_util.keystr(path[1:])


def check_arrays(
    doing: str,
    tree: PyTreeDef,
    flat: Sequence[Any],
    chosen: Iterable[int],
    restore: Restore = _as_given,
    names: tuple[str, str] = _NAMES,
    ways: str = "make it a static field",
) -> None:
    """Raises the error about a leaf that is no array and no ref; its path tells it from others.

    Args:
      doing: what is done with the arguments.
      tree, flat: the structure of `(args, kwargs)` and its leaves, among them views.
      chosen: the positions of the leaves that must be arrays or refs.
      restore: gives `(args, kwargs)` as the caller wrote them, if some were taken out.
      names: how the caller names the two.
      ways: what to do with such a leaf.
    """
    for k in chosen:
        if is_ref(flat[k]) or is_view(flat[k]):
            continue
        try:
            type_of(flat[k])
        except TypeError:
            where = path_of(tree, k, restore, names)
            raise RefTypeError(
                f"{doing}: `{where}` is of type {type(flat[k]).__name__}, no array and no ref: "
                f"close over it, {ways}, or pass the tree without it"
            ) from None


def check_call(doing: str, static: Static, call: Call) -> None:
    """Raises the error about a leaf of a call with static arguments that is no array and no ref."""
    ways = "make it a static argument or field"
    check_arrays(doing, call.tree, call.flat, range(len(call.flat)), static.restore, ways=ways)


def dtype_of(aval: Aval) -> DType:
    """The dtype of an array's type; None for a user's own type."""
    return getattr(aval, "dtype", None)


def shape_of(aval: Aval, is_ref: bool = False) -> Any:
    """The `jax.ShapeDtypeStruct` of a result of this type; a user's own type is returned itself."""
    if dtype_of(aval) is None:
        return aval
    weak = not is_ref and aval.weak_type
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak, is_ref=is_ref)


class Choice(NamedTuple):
    """A choice of arguments, by position and by name."""

    nums: tuple[int, ...]
    names: frozenset[str]

    @staticmethod
    def of(
        fun: Callable[..., Any],
        nums: int | Sequence[int] | None,
        names: str | Iterable[str] | None,
    ) -> Choice:
        """As `jax.jit` does: if only one of the two is given, the signature gives the other."""
        given_nums = (nums,) if isinstance(nums, int) else tuple(nums or ())
        given_names = frozenset((names,) if isinstance(names, str) else names or ())
        try:
            parameters = list(inspect.signature(fun).parameters.values())
        except (TypeError, ValueError):
            return Choice(given_nums, given_names)
        by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if names is None:
            by_name = [p.name for p in by_place if p.kind == p.POSITIONAL_OR_KEYWORD]
            offset = len(by_place) - len(by_name)
            given_names = frozenset(
                by_place[k].name
                for k in (n % len(by_place) for n in given_nums if by_place)
                if k >= offset
            )
        elif nums is None:
            given_nums = tuple(k for k, p in enumerate(by_place) if p.name in given_names)
        return Choice(given_nums, given_names)

    def positions(self, args: Sequence[Value]) -> frozenset[int]:
        """The chosen positions among `args`."""
        n = len(args)
        return frozenset([k % n for k in self.nums if -n <= k < n])

    def without_first(self) -> Choice:
        """The same arguments, for a function whose first one is given already."""
        return Choice(tuple([k - 1 if k > 0 else k for k in self.nums if k]), self.names)

    def keywords(self, kind: str) -> dict[str, Any]:
        """The same choice as keywords of `jax.jit`."""
        if not (self.nums or self.names):
            return {}
        return {f"{kind}_argnums": self.nums, f"{kind}_argnames": tuple(sorted(self.names))}

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Split:
        """Splits the arguments of a call: the chosen ones, as static arguments, and the rest."""
        return self.splitter()(args, kwargs)

    def splitter(self) -> Callable[[tuple[Any, ...], dict[str, Any]], Split]:
        """`split` as a function for many calls: most have the same static arguments."""
        # The number of positional arguments, the names of the others, the static arguments, and the
        # positions of the rest. Read and set at once: threads may have others.
        last: tuple[int, frozenset[str], Static, list[int]] = -1, frozenset(), NO_STATIC, []

        def split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Split:
            nonlocal last
            n, names, static, rest = last
            is_same = len(args) == n and kwargs.keys() == names
            if is_same:
                for k, value in static.positional:
                    is_same = is_same and args[k] is value
                for name, value in static.named:
                    is_same = is_same and kwargs[name] is value
            if not is_same:
                static = self._chosen(args, kwargs)
                chosen = {k for k, _ in static.positional}
                rest = [k for k in range(len(args)) if k not in chosen]
                last = len(args), frozenset(kwargs), static, rest
            if static.positional:
                args = tuple([args[k] for k in rest])
            if static.named:
                kwargs = kwargs.copy()
                for name, _ in static.named:
                    del kwargs[name]
            return static, args, kwargs

        return split

    def _chosen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Static:
        by_position = tuple([(k, args[k]) for k in sorted(self.positions(args))])
        by_name = tuple([(name, kwargs[name]) for name in sorted(self.names) if name in kwargs])
        types = tuple([type(value) for _, value in by_position + by_name])
        return Static(by_position, by_name, types)


class Static(NamedTuple):
    """The static arguments of a call, hashable, as a part of cache keys."""

    positional: tuple[tuple[int, Any], ...]
    named: tuple[tuple[str, Any], ...]
    types: tuple[type, ...]  # 1, 1.0 and True are equal

    def restore(
        self, args: Sequence[Value], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Puts the static arguments back among the others."""
        merged = list(args)
        for k, value in self.positional:
            merged.insert(k, value)
        return tuple(merged), {**kwargs, **dict(self.named)}

    def checked(self) -> Static:
        """The arguments themselves, if they can be static.

        Raises:
          RefTypeError: if a static argument is or holds a ref.
          RefValueError: if one can't be hashed.
        """
        for place, value in (*self.positional, *self.named):
            for leaf in jax.tree.leaves(value):
                if is_ref(leaf):
                    raise RefTypeError(
                        f"static argument {place!r} holds {describe(leaf)}: a static argument is "
                        "part of the compiled program, and a ref changes. Pass it as an ordinary "
                        "argument"
                    )
            try:
                hash(value)
            except TypeError:
                raise RefValueError(
                    "Non-hashable static arguments are not supported: argument "
                    f"{place!r} is of type {type(value).__name__}: "
                    "make it hashable, a tuple for instance, or don't make it static"
                ) from None
        return self


NO_STATIC = Static((), (), ())
Split = tuple[Static, tuple[Any, ...], dict[str, Any]]


def shardings_of_arguments(in_shardings: PyTree, tree: PyTreeDef) -> list[Any]:
    """`in_shardings` for each leaf of the structure of `(args, kwargs)`: None for keywords."""
    args, kwargs = tree.children()
    prefix = tuple(in_shardings) if isinstance(in_shardings, list) else in_shardings
    flat = _shardings("in_shardings", prefix, "the positional arguments", args)
    return [*flat, *[None] * kwargs.num_leaves]


def shardings_of_result(out_shardings: PyTree, tree: PyTreeDef) -> list[Any]:
    """`out_shardings` for each leaf of the structure of a result."""
    return _shardings("out_shardings", out_shardings, "the result", tree)


def _shardings(keyword: str, prefix: PyTree, of: str, tree: PyTreeDef) -> list[Any]:
    try:
        return _jax.broadcast_prefix(prefix, tree)
    except ValueError:
        given = jax.tree.structure(prefix, is_leaf=lambda x: x is None)
        raise RefValueError(
            f"{keyword} is no pytree prefix of {of}: {given} is given for {tree}. It is one "
            "sharding for all, or has the same containers as far down as it goes"
        ) from None


def per_leaf(prefix: PyTree, tree: PyTree) -> tuple[list[Any], list[tuple[RefView, Any]]]:
    """One item of a pytree prefix for each leaf of a tree; the tree's views with their items."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_view)
    items: list[Any] = []
    of_views: list[tuple[RefView, Any]] = []
    for leaf, item in zip(leaves, _jax.broadcast_prefix(prefix, structure), strict=True):
        if is_view(leaf):
            of_views.append((leaf, item))
        items += [item] * (len(jax.tree.leaves(leaf)) if is_view(leaf) else 1)
    return items, of_views


def flags(doing: str, name: str, prefix: PyTree, tree: PyTreeDef) -> list[bool]:
    """A flag for each leaf, from a prefix of bools, in which the kinds of containers may differ.

    Raises:
      RefValueError: if `prefix` is no such prefix.
    """
    if isinstance(prefix, bool):
        return [prefix] * tree.num_leaves
    given = jax.tree.leaves(prefix, is_leaf=lambda x: x is not prefix)
    parts = tree.children()
    is_leaf = jax.tree_util.treedef_is_leaf(tree) and tree.num_leaves == 1
    if jax.tree_util.all_leaves([prefix]) or is_leaf or len(given) != len(parts):
        what = f"a value of structure {tree}" if is_leaf else f"{len(parts)} values"
        raise RefValueError(
            f"{doing}: {name} has {prefix!r} for {what}: it takes a bool, or a tuple with one for "
            "each"
        )
    return [
        x for one, part in zip(given, parts, strict=True) for x in flags(doing, name, one, part)
    ]


def mapped_call(
    doing: str, args: tuple[Any, ...], kwargs: dict[str, Any], items: Sequence[Any]
) -> tuple[Call, list[Any]]:
    """A call with an axis or a spec for each leaf, and those of the leaves that are taken.

    A leaf with None is kept: the function has it as it is, whatever is done with others.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    taken = {k: item for k, item in enumerate(items) if item is not None}
    if any(map(is_ref, leaves)):  # Otherwise JAX's own error is told.
        check_arrays(doing, tree, leaves, taken)
    kept = {k: _shared(x) for k, x in enumerate(leaves) if k not in taken}
    return Call.of(args, kwargs, kept=kept), [*taken.values()]


def _shared(x: Value | RefLike) -> Value | RefLike:
    if not is_ref(x):
        return x
    ref = one_name(x)
    check_ref(ref, "call")
    return ref


def mirrored(tree: PyTreeDef, items: Iterable[Any]) -> PyTree:
    """A tree with `items` as leaves. Tuples replace containers whose class might refuse them."""
    rest = iter(items)
    if (node := tree.node_data()) is None:
        return next(rest)
    kind, keys = node
    parts = [mirrored(part, rest) for part in tree.children()]
    if kind is dict:
        return dict(zip(keys, parts, strict=True))
    return None if kind is type(None) else parts if kind is list else tuple(parts)


def without_views(where: str, fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, which mustn't return a view: one of a part of a ref would become one of the whole."""

    @functools.wraps(fun)
    def checked(*args: Any, **kwargs: Any) -> Any:
        result = fun(*args, **kwargs)
        for x in jax.tree.leaves(result, is_leaf=is_view):
            if is_view(x):
                raise RefValueError(
                    f"{where} returns a view of {describe(x.ref)}: return its value, `view[...]`, "
                    "or the ref"
                )
        return result

    return checked
