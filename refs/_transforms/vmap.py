"""`refs.vmap`: a function over refs, for many lanes at once."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from refs import _jax
from refs._callbacks.analysis import calls_host
from refs._discharge.interpreter import Context
from refs._discharge.lanes import Accumulator, Lanes
from refs._discharge.ref_tracer import TouchedError
from refs._handles.access import describe
from refs._handles.predicates import is_ref
from refs._lanes.lane_analysis import Contents, LaneAnalysis
from refs._lanes.streams import Stream, after_a_key
from refs._tracing import derivative_rules
from refs._tracing.discharged import in_lane
from refs._tracing.facts import can_fail
from refs._tracing.touch_analysis import uses_refs
from refs._tracing.trace import Call, ref_type
from refs._transactions.calls import in_transaction
from refs._transactions.signature import check_callable, mapped_call, per_leaf, without_views
from refs._transactions.transaction import Slot, Transaction
from refs._transforms import by_jax
from refs._transforms.own_axes import taken_apart
from refs._types import Aval, ClosedJaxpr, PyTree, RefLike, Value
from refs.errors import RefTypeError, RefValueError

P = ParamSpec("P")
R = TypeVar("R")


def vmap(
    fun: Callable[P, R],
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
    sum_match: bool = False,
) -> Callable[P, R]:
    """Maps a function over refs. Works like `jax.vmap`: it means `for x in xs: fun(x)`.

    A ref for which `in_axes` has an integer gives each lane its slice, to read and to write. A ref
    that is closed over, or for which it has None, is shared: lanes may read it; or accumulate into
    it, `r[...] += x`, and every lane's contribution arrives, at the cost of the contributions (or
    multiply it, or take minima of it, or maxima); or overwrite it with a value that is the same in
    every lane. An update whose result would depend on the order of the lanes is an error.

    Args:
      fun: the function of one lane.
      in_axes: which axis of each argument to map over, as a pytree prefix; None for those that all
        lanes share.
      out_axes: where to put the lanes in the results, as a pytree prefix. A ref that a lane makes
        and returns becomes a ref of all the lanes' contents.
      axis_name: a name for collectives between the lanes.
      axis_size: the number of lanes, if no argument is mapped.
      spmd_axis_name: as in `jax.vmap`.
      sum_match: whether a result that differs between lanes, and has None in `out_axes`, is summed
        over the lanes.

    Returns:
      The mapped function.

    Raises:
      RefTypeError: if `in_axes` is not a pytree of axes; when called, if a view is mapped.
      RefValueError: when called, if no argument is mapped, or the numbers of lanes differ; if a ref
        is both mapped and shared; or if the final contents of a shared ref would depend on the
        order of the lanes.

    >>> counts = refs.new_ref(jnp.zeros(4, jnp.int32), name="counts")
    >>> def lane(x):
    ...     counts[x] += 1
    ...     return counts.size * x
    >>> refs.vmap(lane)(jnp.array([0, 2, 2]))
    Array([0, 8, 8], dtype=int32)
    >>> counts
    Ref([1, 0, 2, 0], dtype=int32, name='counts')
    """

    check_callable("vmap", fun)
    if not (in_axes is None or isinstance(in_axes, tuple | list) or _jax.is_axis(in_axes)):
        raise RefTypeError(
            f"vmap: in_axes is {in_axes!r}: it must be an integer, None, or a tuple with an entry "
            "for each positional argument"
        )
    lane_fun = without_views("a lane of vmap", fun)
    options: dict[str, Any] = {
        "axis_name": axis_name,
        "axis_size": axis_size,
        "spmd_axis_name": spmd_axis_name,
        "sum_match": sum_match,
    }

    @functools.wraps(fun)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        def mapped_by_jax() -> Any:
            of_jax = jax.vmap(by_jax.watched(fun), in_axes, out_axes, **options)
            return of_jax(*args, **kwargs)

        takes_refs = any(map(is_ref, jax.tree.leaves((args, kwargs))))
        may_be_jaxs = not (takes_refs or _jax.is_staging())
        if may_be_jaxs and by_jax.is_known(fun):
            with contextlib.suppress(TouchedError):
                return mapped_by_jax()
        if maps_itself := _found((in_axes, out_axes), _jax.has_its_own_axes):
            with contextlib.suppress(TouchedError):
                if not takes_refs:
                    return mapped_by_jax()
            raise _maps_itself(maps_itself[0])
        if _found((args, kwargs), _jax.is_vmappable):
            lane, lane_axes, args, kwargs = taken_apart(fun, in_axes, args, kwargs)
            return vmap(lane, lane_axes, out_axes, **options)(*args, **kwargs)
        refused = None
        try:
            call, taken = mapped_call("vmap", args, kwargs, _leaf_axes(in_axes, args, kwargs))
            axes = _Axes.of(call, taken, axis_size)
        except (RefTypeError, RefValueError) as error:
            if takes_refs:
                raise
            refused = error
        if refused is not None:  # JAX's own error names the arrays.
            nothing = functools.wraps(fun)(lambda *_, **__: ())
            jax.vmap(nothing, in_axes, axis_size=axis_size)(*args, **kwargs)
            raise refused  # pragma: no cover, JAX has refused it in its own words

        def inside(refs: Sequence[RefLike], leaves: Sequence[Value]) -> Any:
            env = [] if axis_name is None else [(axis_name, axes.size)]
            if axes.mesh_axes is not None:
                _check_as_jax(call, axes, leaves, spmd_axis_name)
            with in_lane(), _jax.lane_axes(spmd_axis_name, axes.mesh_axes):
                t = Transaction.of(
                    lane_fun, refs, axes.leaf_types, call.rebuild, axes.ref_types, env
                )
            may_touch_refs = _may_touch_refs(t.traced.jaxpr)
            by_jax.note(fun, not (may_touch_refs or call.refs or can_fail(t.traced.jaxpr)))
            axis_of = {s: axes.of_slot(s, refs) for s in t.touch_of}
            streams = {
                s: s.origin
                for s in t.written
                if axis_of[s] is None and isinstance(s.origin, Stream)
            }
            axis_of |= dict.fromkeys(streams, 0)
            analysis = _analyse(t, axis_of, axes, axis_name)
            sums = {
                s: touch.method
                for s, touch in t.touch_of.items()
                if axis_of[s] is None and touch.method
            }
            written = [s for s in t.written if s not in sums]

            # `flag` is a scalar of `axes.flags`; the others are one lane's values, without the axis
            # of the lanes.
            def lane(
                flag: Value,
                state: Sequence[Value],
                constants: Sequence[Value],
                leaves: Sequence[Value],
            ) -> Any:
                cells = t.cells(written, state) | t.cells(t.read, constants)
                for (slot, method), ref in zip(sums.items(), t.refs([*sums], refs), strict=True):
                    cells[slot] = Accumulator(ref, slot.origin, method)
                t.aim(cells, [s for s, axis in axis_of.items() if axis is None], refs)
                lanes = Lanes(analysis, flag) if may_touch_refs else None
                _, (arrays, made) = t.run_cells(cells, leaves, Context(lanes=lanes, rules=t.rules))
                return [cells[s].read() for s in written], arrays, made

            state_axes = [axis_of[s] for s in written]
            batched = jax.vmap(
                lane,
                in_axes=(0, state_axes, [axis_of[s] for s in t.read], axes.of_leaves),
                out_axes=(state_axes, *t.per_result(out_axes)),
                **{**options, "axis_size": axes.size},
            )
            before = dict(zip(written, t.values(written, refs), strict=True))
            of_lanes = {s: axes.streams(stream, before[s]) for s, stream in streams.items()}
            state, arrays, made = batched(
                axes.flags if may_touch_refs else None,
                [*(before | of_lanes).values()],
                t.values(t.read, refs),
                leaves,
            )
            after = dict(zip(written, state, strict=True))
            after |= {s: after_a_key(before[s]) for s in streams}
            # With zero lanes nothing is written, though a value that all lanes share is computed.
            kept = [s for s in written if axes.size or axes.of_slot(s, refs) is not None]
            t.commit(kept, refs, [after[s] for s in kept])
            result = t.result(arrays, made, refs)
            if may_touch_refs and (maps_itself := _found(result, _jax.has_its_own_axes)):
                raise _maps_itself(maps_itself[0])
            return result

        try:
            result = in_transaction(inside, call.refs, call.leaves)
        except by_jax.NEEDS_VALUES as error:
            if not may_be_jaxs:
                raise
            try:
                return mapped_by_jax()
            except TouchedError:
                raise error from None
        if _found(result, _jax.has_its_own_axes):
            return jax.vmap(fun, in_axes, out_axes, **options)(*args, **kwargs)
        return result

    return mapped


def _found(tree: PyTree, test: Callable[[Any], bool]) -> list[Any]:
    """The parts of a pytree that pass the test."""
    return [x for x in jax.tree.leaves(tree, is_leaf=test) if test(x)]


def _maps_itself(x: Value) -> RefTypeError:
    return RefTypeError(
        f"vmap over refs, with a {type(x).__name__}, which says itself how it is mapped: let the "
        "lanes take and return arrays, and make it of them inside or outside"
    )


class _Axes(NamedTuple):
    """The mapped axes of a call.

    Attributes:
      size: the number of lanes.
      of_refs: for each distinct ref, the axis that it is mapped over.
      of_leaves: the same for the other mapped leaves.
      ref_types: the types that the refs have in a lane, without the mapped axis.
      leaf_types: the same for the other mapped leaves.
      sharding: the sharding of the axis of lanes, if the arguments' types have one.
    """

    size: int
    of_refs: list[int]
    of_leaves: list[int]
    ref_types: list[Aval]
    leaf_types: list[_jax.AbstractArgument]
    sharding: NamedSharding | None

    @property
    def flags(self) -> jax.Array:
        """An array `[n_lanes]` of True, sharded as the lanes are."""
        flags = jnp.ones(self.size, bool)
        if self.sharding is None:
            return flags
        return jax.sharding.reshard(flags, self.sharding)

    def streams(self, stream: Stream, words: Value) -> Value:
        """The contents `[n_lanes, n_words]` of the lanes' streams, sharded as the lanes are."""
        split = stream.split(words, (self.size,))
        return split if self.sharding is None else jax.sharding.reshard(split, self.sharding)

    @property
    def mesh_axes(self) -> Any:
        """The axes of an explicit mesh that the lanes are sharded over, or None."""
        return None if self.sharding is None else self.sharding.spec[0]

    @staticmethod
    def of(call: Call, axes: Sequence[int], axis_size: int | None) -> _Axes:
        of_refs: dict[int, int] = {}
        of_leaves: list[int] = []
        leaf_types: list[Any] = [_jax.shaped_abstractify(x) for x in call.leaves]
        for place, axis in zip(call.ref_places, axes, strict=True):
            if place is None:
                of_leaves.append(_normal(axis, leaf_types[len(of_leaves)], "an argument"))
                continue
            ref = call.refs[place]
            axis = _normal(axis, ref, describe(ref))
            if of_refs.setdefault(place, axis) != axis:
                raise RefValueError(
                    f"vmap: {describe(ref)} is passed twice, mapped over axes {of_refs[place]} and "
                    f"{axis}: each lane has one view of it"
                )
        ref_axes = [of_refs[k] for k in range(len(call.refs))]
        sizes = {
            x.shape[axis]
            for x, axis in zip((*call.refs, *leaf_types), (*ref_axes, *of_leaves), strict=True)
        }
        sizes |= {axis_size} - {None}
        if len(sizes) != 1:
            raise RefValueError(
                f"vmap over arguments with {' and '.join(map(str, sorted(sizes)))} lanes: they "
                "must have the same number"
                if sizes
                else "vmap over no argument: nothing in `in_axes` is an axis. Give one, or "
                "axis_size"
            )
        [size] = sizes
        types: list[Aval] = [*(ref_type(r).inner_aval for r in call.refs), *leaf_types]
        sharding = next(
            (
                NamedSharding(x.sharding.mesh, jax.P(x.sharding.spec[axis]))
                for x, axis in zip(types, (*ref_axes, *of_leaves), strict=True)
                if _jax.has_explicit_sharding(x)
            ),
            None,
        )
        leaf_types = [
            _jax.AbstractArgument(_jax.mapped_aval(size, axis, x))
            for x, axis in zip(leaf_types, of_leaves, strict=True)
        ]
        ref_types = [
            _jax.mapped_aval(size, axis, ref_type(r))
            for r, axis in zip(call.refs, ref_axes, strict=True)
        ]
        return _Axes(size, ref_axes, of_leaves, ref_types, leaf_types, sharding)

    def of_slot(self, slot: Slot, refs: Sequence[RefLike]) -> int | None:
        """The axis that a slot is mapped over; None if the lanes share it."""
        if slot.argument is None:
            return None
        if slot.outer is not None:
            raise RefValueError(
                f"vmap over {describe(refs[slot.argument])}, which the function also closes over, "
                "or is given with None in `in_axes`: that would be the whole ref, in every lane. "
                "Use the mapped argument only"
            )
        return self.of_refs[slot.argument]


def _normal(axis: Any, x: Value, what: str) -> int:
    """An axis of `x`, counted from the front."""
    if type(axis) is not int:
        raise RefTypeError(
            f"vmap: in_axes has a {type(axis).__name__} for {what}: it takes integers and None"
        )
    if not -x.ndim <= axis < x.ndim:
        raise RefValueError(
            f"vmap over axis {axis} of {what} of shape {x.shape}, which has no such axis"
        )
    return axis % x.ndim


def _leaf_axes(in_axes: PyTree, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The axis of each leaf of a call. Keyword arguments are mapped over their first axis."""
    in_axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes
    try:
        axes, of_views = per_leaf((in_axes, 0), (args, kwargs))
    except ValueError as error:
        raise RefValueError(
            f"vmap: in_axes={in_axes} doesn't fit the {len(args)} positional arguments: it must be "
            "an integer, None, or a tuple with an entry for each, of which every one is a prefix "
            "of the argument's structure"
        ) from error
    for view, axis in of_views:
        if axis is not None:
            raise RefTypeError(
                f"vmap over a view of {describe(view.ref)}: map over the ref, or an index, and "
                "take the view inside"
            )
    return axes


def _may_touch_refs(closed: ClosedJaxpr) -> bool:
    """Whether a lane touches refs, calls the host, or has derivative rules that may touch refs."""
    return uses_refs(closed) or calls_host(closed) or derivative_rules.is_open_in(closed.jaxpr)


def _check_as_jax(call: Call, axes: _Axes, leaves: Sequence[Value], spmd_axis_name: Any) -> None:
    """Raises the errors of `jax.vmap` about arguments on an explicit mesh, before a trace."""
    shared = [x for x in call.kept.values() if isinstance(x, jax.Array)]
    check = jax.vmap(
        lambda mapped, shared: (),
        in_axes=(axes.of_leaves, None),
        axis_size=axes.size,
        spmd_axis_name=spmd_axis_name,
    )
    check(leaves, shared)


def _analyse(
    t: Transaction, axis_of: dict[Slot, int | None], axes: _Axes, axis_name: Any
) -> LaneAnalysis:
    contents = {
        s: Contents(s.origin, False, touch) if axis_of[s] is None else Contents(s.origin, True)
        for s, touch in t.touch_of.items()
    }
    of_argument = {s.argument: c for s, c in contents.items()}
    of_outer = {s.outer: c for s, c in contents.items()}
    refs = t.program.by_identity([of_outer[k] for k in range(len(t.program.refs))])
    analysis = LaneAnalysis(axes.size, axis_name)
    analysis.run(
        t.traced.jaxpr,
        refs,
        [
            *(of_argument[i] for i in range(len(axes.of_refs))),
            *([True] * len(axes.of_leaves)),
        ],
    )
    return analysis
