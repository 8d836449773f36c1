"""From a Python function over refs to an effectful jaxpr.

`jax.make_jaxpr` does the tracing. This module adds the boundary: the same ref in several places is
one ref, refs may be returned, and errors inside are told in terms of the user's refs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from refs import _jax
from refs._handles import access
from refs._handles.abstract import handle_or_abstract
from refs._handles.predicates import is_concrete, is_ref
from refs._handles.ref import Ref
from refs._handles.ref_type import RefType
from refs._indexing.values import neutral_of, zeros_of
from refs._origin import Origin, origin_of
from refs._tracing.discharged import is_lane, to_be_discharged
from refs._tracing.names import one_name
from refs._tracing.touch import Rules
from refs._types import ClosedJaxpr, PyTree, PyTreeDef, RefLike, Value
from refs.errors import RefError, RefEscapeError, RefTypeError, RefValueError


def ref_type(ref: RefLike) -> RefType:
    """The type that a ref has in this library's traces."""
    if type(ref) is Ref:
        return ref._aval
    aval = jax.typeof(ref)
    return aval if isinstance(aval, RefType) else RefType.of(aval)


def neutral_like(ref: RefLike, method: str) -> Value:
    """The neutral element of an update method, as an array of the type of a ref's value."""
    return neutral_of(ref_type(ref).inner_aval, method)


def zeros_like(ref: RefLike) -> Value:
    """Zeros of the type of a ref's value."""
    return zeros_of(ref_type(ref).inner_aval)


def rules_where(is_differentiated: bool) -> Rules:
    """What derivative rules may do here to a ref that their function is given."""
    if is_lane():
        return Rules.MAY_READ
    return Rules.MAY_WRITE if is_differentiated else Rules.NEVER_RUN


class Unique(NamedTuple):
    """Distinct objects, and which of them stands at each place."""

    items: list[Any]
    places: tuple[int, ...]


def unique(objects: Sequence[Any]) -> Unique:
    """Drops repetitions, by identity."""
    items: list[Any] = []
    position: dict[int, int] = {}
    for x in objects:
        if id(x) not in position:
            position[id(x)] = len(items)
            items.append(x)
    return Unique(items, tuple(position[id(x)] for x in objects))


class ArgumentRef(NamedTuple):
    """A returned ref that is the `position`-th distinct ref argument."""

    position: int


class OuterRef(NamedTuple):
    """A returned ref that the function closes over."""

    ref: RefLike


class NewRef(NamedTuple):
    """A returned ref that the function made: its final value is the `position`-th new one."""

    position: int
    origin: Origin


class Trace(NamedTuple):
    """A traced function.

    `jaxpr` takes one ref for each distinct ref argument, then the other leaves. It returns the
    function's array outputs, then the final values of new refs that are returned. `out_tree` and
    `out_leaves` rebuild the function's result: a leaf is a marker, or None for the next array.
    """

    jaxpr: ClosedJaxpr
    out_tree: PyTreeDef
    out_leaves: tuple[ArgumentRef | OuterRef | NewRef | None, ...]


def flattened(
    fun: Callable[..., Any],
    rebuild: Callable[[Sequence[Any], Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]],
) -> tuple[Callable[..., tuple[list[Value], list[Value]]], list[Any]]:
    """`fun` as `(refs, leaves) -> (arrays, values of new refs)`; and what a trace of it fills.

    That is the structure of `fun`'s result, and a marker for each of its leaves.
    """
    out: list[Any] = []

    def flat(refs: Sequence[RefLike], leaves: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        args, kwargs = rebuild(refs, leaves)
        _jax.name_arguments(fun, args, kwargs, [*refs, *leaves])
        result, out_tree = flatten_result(fun, fun(*args, **kwargs))
        arrays, markers, new = strip_refs(result, refs)
        out[:] = [out_tree, markers]
        return arrays, new

    flat.__name__ = flat.__qualname__ = getattr(fun, "__name__", "function")
    return flat, out


def trace(
    fun: Callable[..., Any],
    ref_types: Sequence[RefType],
    leaves: Sequence[Value],
    rebuild: Callable[[Sequence[Any], Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]],
    axis_env: Sequence[tuple[Any, int]] = (),
) -> Trace:
    """Traces `fun(*args, **kwargs)` with `args, kwargs = rebuild(refs, leaves)`.

    `axis_env` has the names and sizes of axes that `fun` may use collectives over.

    Raises whatever `fun` raises; no ref has changed then.
    """
    flat, out = flattened(fun, rebuild)
    # With jit disabled, JAX's loops first evaluate their predicates, which fails on tracers, and
    # then trace them after all: what a predicate writes would be in the jaxpr twice.
    with jax.disable_jit(False), to_be_discharged():
        make_jaxpr = advised(jax.make_jaxpr(flat, axis_env=list(axis_env)))
        jaxpr = make_jaxpr([_jax.AbstractArgument(t) for t in ref_types], list(leaves))
    out_tree, markers = out
    return Trace(jaxpr, out_tree, tuple(markers))


@jax.tree_util.register_pytree_node_class
class PartlyKnown:
    """A result of a traced function, whose leaves that aren't traced stay what they are.

    As a pytree it has the traced leaves only. The others are part of its structure, and no outputs
    of the trace: they needn't be arrays. Unflattening it gives the result itself.
    """

    def __init__(self, result: PyTree):
        leaves, tree = jax.tree.flatten(result)
        known = {
            k: x for k, x in enumerate(leaves) if not (isinstance(x, _jax.Tracer) or is_ref(x))
        }
        self.traced = [x for k, x in enumerate(leaves) if k not in known]
        self.structure = _Structure(tree, known)

    def tree_flatten(self) -> tuple[list[Value], _Structure]:
        return self.traced, self.structure

    @classmethod
    def tree_unflatten(cls, structure: _Structure, traced: Sequence[Value]) -> PyTree:
        rest, known = iter(traced), structure.known
        places = range(structure.tree.num_leaves)
        return structure.tree.unflatten([known[k] if k in known else next(rest) for k in places])


class _Structure:
    """A pytree structure and the known leaves by position; equal to itself only, for any leaves."""

    __slots__ = ("known", "tree")

    def __init__(self, tree: PyTreeDef, known: dict[int, Any]):
        self.tree, self.known = tree, known


def flatten_result(fun: Callable[..., Any], result: PyTree) -> tuple[list[Value], PyTreeDef]:
    """The leaves and the structure of what `fun` has returned.

    Raises:
      TypeError: if JAX can't trace a leaf. JAX's own error would name a wrapper's results.
    """
    leaves, tree = jax.tree.flatten(result)
    for k, x in enumerate(leaves):
        try:
            jax.typeof(x)
        except TypeError:
            path, _ = jax.tree.leaves_with_path(result)[k]
            where = f" at output component {jax.tree_util.keystr(path)}" if path else ""
            raise TypeError(
                f"function {_jax.source_line(fun)} returned a value of type {type(x)}{where}, "
                "which is not a valid JAX type"
            ) from None
    return leaves, tree


def strip_refs(
    result: Sequence[Any], arguments: Sequence[RefLike]
) -> tuple[list[Value], list[ArgumentRef | OuterRef | NewRef | None], list[Value]]:
    """Splits outputs into arrays, one marker a leaf, and the final values of new refs."""
    arrays: list[Value] = []
    markers: list[ArgumentRef | OuterRef | NewRef | None] = []
    new: dict[int, tuple[NewRef, Value]] = {}
    position = {id(a): k for k, a in enumerate(arguments)}
    for x in result:
        x = _jax.passed_on(x) if is_ref(x) else x
        if not is_ref(x):
            arrays.append(x)
            markers.append(None)
        elif id(x) in position:
            markers.append(ArgumentRef(position[id(x)]))
        elif is_concrete(x) or not _made_here(x):
            markers.append(OuterRef(x))
        else:
            if id(x) not in new:
                marker = NewRef(len(new), origin_of(jax.typeof(x)))
                new[id(x)] = (marker, access.get(x))
            markers.append(new[id(x)][0])
    return arrays, markers, [value for _, value in new.values()]


def new_origins(markers: Sequence[ArgumentRef | OuterRef | NewRef | None]) -> list[Origin]:
    """The origins of the new refs among the results that `strip_refs` has marked."""
    found = {x.position: x.origin for x in markers if isinstance(x, NewRef)}
    return [found[k] for k in range(len(found))]


def _made_here(ref: RefLike) -> bool:
    return _jax.trace_of(ref) is _jax.current_trace()


def advised(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, which traces: errors of JAX about refs also say what to do instead."""

    @_jax.within_whole_tracebacks
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return fun(*args, **kwargs)
        except RefError:
            raise
        except Exception as error:
            if (found := _ADVICE.get(_jax.what_is_said(error))) is None:
                raise
            kind, advice = found
            raise kind(advice.format(said=error)) from error

    return called


_GRADIENT = (
    "`jax.grad` can't differentiate with respect to a ref: `refs.grad` can, and the gradient is an "
    "array"
)
_ARRAYS_ONLY = (
    "a function of JAX's that takes arrays only, such as `jax.device_put`, under `jax.grad` a "
    "solver (`cg`, `gmres`), or in lanes of `refs.vmap` on jax 0.10 `custom_vmap`, was given a "
    "ref, or a function that closes over one: read the ref before, `ref[...]`, and use the value. "
    "For solvers `refs.grad` and `refs.jit` around it all will do"
)
_IN_SHARD_MAP = (
    "a backward rule inside of shard_map touches a ref from outside, which can't be written after "
    "the forward pass: return what it writes as a cotangent, or apply shard_map inside"
)
_NONDIFFERENTIATED = (
    "{said}\n\na ref that is an argument of the traced function, of `refs.jit` for instance, is "
    "such a tracer: let the custom function take it as an ordinary argument, whose rules may read "
    "and write it all the same, or close over the ref"
)
# JAX's errors about refs in its own loops and transformations (see `_jax.words`) -> what to do.
_ADVICE: dict[str | None, tuple[type[Exception], str]] = {
    "a returned ref": (
        RefEscapeError,
        "{said}\n\nthe body of a loop, a branch or an inner `jax.jit` can use refs, but not "
        "return them: return the value, `ref[...]`, or use the ref where it is in scope",
    ),
    "a ref taken twice": (
        RefEscapeError,
        "{said}\n\nJAX's own functions take each ref once, either as an argument or closed over: "
        "close over the ref, or use `refs.jit` or `refs.checkpoint`, which take it often. A loop "
        "over the rows of a ref that it uses besides can run over indices, and read `ref[i]`",
    ),
    "a mapped branch": (
        RefValueError,
        "`jax.vmap` can't map a branch that touches a ref: `refs.vmap` can, and `refs.map` in the "
        "place of `jax.lax.map` in batches",
    ),
    "a mapped value": (
        RefValueError,
        "{said}\n\n`jax.vmap` doesn't map what loops and inner jits do to a ref: `refs.vmap` can, "
        "and `refs.map` in the place of `jax.lax.map` in batches",
    ),
    "arrays only": (RefTypeError, _ARRAYS_ONLY),
    "a tracer that isn't differentiated": (RefTypeError, _NONDIFFERENTIATED),
    "a differentiated ref": (RefTypeError, _GRADIENT),
    "a ref in a shard_map that is differentiated": (RefEscapeError, _IN_SHARD_MAP),
}


class Call(NamedTuple):
    """The arguments of a call, flattened: distinct refs apart from the other leaves.

    Attributes:
      tree: the structure of `(args, kwargs)`.
      refs: the distinct refs.
      ref_places: for each leaf that is taken: which distinct ref it is, or None.
      leaves: the others.
      flat: all leaves that are taken.
      kept: leaves that stay what they are, by their positions in the tree: all others are taken.
    """

    tree: PyTreeDef
    refs: list[RefLike]
    ref_places: tuple[int | None, ...]
    leaves: list[Value]
    flat: list[Any]
    kept: Mapping[int, Any] = MappingProxyType({})

    @staticmethod
    def of(
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        runs: bool = True,
        kept: Mapping[int, Any] = MappingProxyType({}),
    ) -> Call:
        """`runs` is False where nothing is run: then a `ShapeDtypeStruct` may stand for a ref."""
        flat, tree = jax.tree.flatten((args, kwargs))
        if kept:
            flat = [x for k, x in enumerate(flat) if k not in kept]
        flat = flat if runs else [*map(handle_or_abstract, flat)]
        in_trace = not _jax.at_top_level()  # where a ref may have two names
        refs: dict[int, tuple[int, RefLike]] = {}
        places: list[int | None] = []
        leaves: list[Value] = []
        for x in flat:
            if is_ref(x):
                x = one_name(x) if in_trace else x
                places.append(refs.setdefault(id(x), (len(refs), x))[0])
            else:
                places.append(None)
                leaves.append(_array_like(x))
        items = [ref for _, ref in refs.values()]
        for ref in items:
            access.check_ref(ref, "call")
        return Call(tree, items, tuple(places), leaves, flat, kept)

    def rebuild(
        self, refs: Sequence[RefLike], leaves: Sequence[Value]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rest = iter(leaves)
        flat = [next(rest) if k is None else refs[k] for k in self.ref_places]
        if self.kept:
            taken, places = iter(flat), range(self.tree.num_leaves)
            flat = [self.kept[k] if k in self.kept else next(taken) for k in places]
        return jax.tree.unflatten(self.tree, flat)


def _array_like(leaf: Any) -> Value:
    if type(leaf) is jax.ShapeDtypeStruct and leaf.is_ref:
        raise RefTypeError(
            "a jax.ShapeDtypeStruct with is_ref stands for no ref in particular: pass a ref, "
            "`refs.empty_ref(...)` for instance. `trace`, `lower` and `eval_shape` of a `refs.jit` "
            "function take it"
        )
    return leaf


def result_of(
    out_tree: PyTreeDef,
    out_leaves: Sequence[ArgumentRef | OuterRef | NewRef | None],
    arrays: Sequence[Value],
    arguments: Sequence[RefLike],
    new: Sequence[RefLike],
) -> PyTree:
    """Rebuilds a function's result from its arrays, its ref arguments and its new refs."""
    rest = iter(arrays)
    leaves = []
    for leaf in out_leaves:
        if leaf is None:
            leaves.append(next(rest))
        elif isinstance(leaf, ArgumentRef):
            leaves.append(arguments[leaf.position])
        else:
            leaves.append(leaf.ref if isinstance(leaf, OuterRef) else new[leaf.position])
    return jax.tree.unflatten(out_tree, leaves)
