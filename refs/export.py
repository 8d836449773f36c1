"""Programs over refs that are compiled elsewhere, or later: `jax.export` with refs.

An exported program knows no refs: it takes the values of those that it writes and of those that it
reads, and returns the new ones. `export` makes such a program of a `refs.jit` function, with its
state aliased, and `call` makes a function over refs of it again, in another process for instance.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.export import deserialize as deserialize

from refs import _jax
from refs._handles import access
from refs._handles.predicates import is_ref
from refs._jit.jit import jit
from refs._jit.stages import Traced
from refs._types import Aval, PyTree, RefLike, Value
from refs.errors import RefTypeError, RefValueError

__all__ = ["call", "deserialize", "export"]


class _Place:
    """Stands for a ref in the trees of an exported program: a pytree node without leaves.

    Attributes:
      role: "written", "read", or "idle" if the program doesn't touch the ref.
      number: which one of these it is.
    """

    def __init__(self, role: str, number: int):
        self.role, self.number = role, number


jax.tree_util.register_pytree_node(
    _Place, lambda place: ((), (place.role, place.number)), lambda aux, _: _Place(*aux)
)
jax.export.register_pytree_node_serialization(
    _Place,
    serialized_name="refs.export.Place",
    serialize_auxdata=lambda aux: json.dumps(aux).encode(),
    deserialize_auxdata=lambda text: tuple(json.loads(text)),
)


def export(
    fun: Callable[..., Any],
    *,
    platforms: Sequence[str] | None = None,
    disabled_checks: Sequence[jax.export.DisabledSafetyCheck] = (),
) -> Callable[..., jax.export.Exported]:
    """Exports a function over refs for another process or machine; see `jax.export.export`.

    Args:
      fun: a `refs.jit` function that takes all of its refs as arguments.
      platforms: as for `jax.export.export`: "cpu", "cuda", "rocm", "tpu"; by default this
        machine's.
      disabled_checks: as for `jax.export.export`.

    Returns:
      A function of arguments like those of `fun`: refs and arrays, or `jax.ShapeDtypeStruct`s for
      them, `refs.tree.abstract(state)` for instance, also with symbolic shapes. It returns a
      `jax.export.Exported`, with the method `serialize`. That takes `(written, read, args, kwargs)`
      and returns `(new, result)`: lists of the values of the refs that are written and that are
      only read, and the arguments without refs; each value in `written` is aliased to that in
      `new`. PRNG keys among them are arrays of bits. To call it with refs, use `refs.export.call`.

    Raises:
      RefTypeError: when called, if `fun` closes over a ref that it touches, returns a ref that it
        makes, or is given refs of a pack or in the host's memory.

    >>> step = refs.jit(lambda state, x: state["sum"].addupdate(x))
    >>> state = {"sum": refs.new_ref(1.0)}
    >>> blob = refs.export.export(step)(refs.tree.abstract(state), 1.0).serialize()
    >>> refs.export.call(refs.export.deserialize(blob))(state, 2.0)
    >>> state
    {'sum': Ref(3., dtype=float32)}
    """

    def do_export(*args: Any, **kwargs: Any) -> jax.export.Exported:
        traced = fun.trace(*args, **kwargs) if isinstance(fun, jax.stages.Wrapped) else None
        by_jax = jax.export.export
        if not isinstance(traced, Traced) or traced._program.is_plain:
            make = by_jax(fun, platforms=platforms, disabled_checks=disabled_checks)  # pyright: ignore
            return make(*args, **kwargs)
        of_refs, t = traced._program, traced._form
        _check(of_refs.name, t)
        flat = _given(traced)
        given = [flat[k] for k in of_refs.operands.ref_leaves]
        written, read = ([given[s.argument] for s in slots] for slots in (t.written, t.read))
        n_read = len(read)
        # Symbols that occur in the shape of no other argument must come with an argument, too.
        idle = (x for x in given if not any(x is other for other in (*written, *read)))
        read += [x for x in idle if any(map(jax.export.is_symbolic_dim, x.shape))]
        places = {id(x): _Place("written", k) for k, x in enumerate(written)}
        places |= {id(x): _Place("read", k) for k, x in enumerate(read)}
        for k, x in enumerate(given):
            places.setdefault(id(x), _Place("idle", k))

        def pure(
            written: list[Value], read: list[Value], args: PyTree, kwargs: PyTree
        ) -> tuple[list[Value], PyTree]:
            flat = of_refs.in_tree.flatten_up_to((args, kwargs))
            operands = of_refs.operands.of(flat, written, read[:n_read])
            new, rest = of_refs.compiled_undonated(*operands)
            return new, of_refs.result(rest, flat)

        pure.__name__ = pure.__qualname__ = of_refs.name
        program = jax.jit(pure, donate_argnums=0, keep_unused=True)
        args, kwargs = of_refs.in_tree.unflatten([places.get(id(x), x) for x in flat])
        make = by_jax(program, platforms=platforms, disabled_checks=disabled_checks)
        return make([*map(_bits, written)], [*map(_bits, read)], args, kwargs)

    return do_export


def call(exported: jax.export.Exported) -> Callable[..., Any]:
    """Makes a function over refs of an exported one: it updates them in place.

    Args:
      exported: what `refs.export.export` has made, perhaps in another process.

    Returns:
      A `refs.jit` function of the arguments that the original one takes (without static ones), with
      the same refs in several places if it was exported so.

    Raises:
      RefTypeError: if `exported` is none, or a program of arrays; when called, if a ref isn't where
        one is expected.
      RefValueError: when called, if the arguments have another structure, a ref is of another shape
        or dtype, or one stands in the places of two.
    """
    if not isinstance(exported, jax.export.Exported):
        raise RefTypeError(
            f"export.call of a {type(exported).__name__}: it takes a jax.export.Exported. Of what "
            "`serialize` has given, `refs.export.deserialize(blob)` makes one"
        )
    tree = exported.in_tree
    given = tree.unflatten([None] * tree.num_leaves)
    if not _is_ours(given):
        raise RefTypeError(
            f"export.call of `{exported.fun_name}`, a program of arrays: call it itself, "
            "`exported.call(...)`"
        )
    leaves, expected = jax.tree.flatten(given[0][2:], is_leaf=_is_leaf)
    avals = tree.unflatten(exported.in_avals)[0]
    types = {"written": avals[0], "read": avals[1]}

    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            flat = expected.flatten_up_to((args, kwargs))
        except ValueError:
            raise RefValueError(
                f"call of the exported `{exported.fun_name}` with arguments of the structure "
                f"{jax.tree.structure((args, kwargs))}: it was exported for {expected}"
            ) from None
        of: dict[tuple[str, int], RefLike] = {}
        for place, leaf in zip(leaves, flat, strict=True):
            if isinstance(place, _Place):
                _check_ref(exported, place, leaf, of, types)
        written = [of["written", k] for k in range(len(avals[0]))]
        read = [of["read", k] for k in range(len(avals[1]))]
        marked = [p if isinstance(p, _Place) else x for p, x in zip(leaves, flat, strict=True)]
        values = ([_jax.unwrap_keys(ref[...]) for ref in refs] for refs in (written, read))
        new, result = exported.call(*values, *expected.unflatten(marked))
        for ref, value in zip(written, new, strict=True):
            ref[...] = _jax.wrap_keys(value, ref.dtype)
        return jax.tree.map(
            lambda x: of[x.role, x.number] if isinstance(x, _Place) else x, result, is_leaf=_is_leaf
        )

    called.__name__ = called.__qualname__ = exported.fun_name
    return jit(called)


def _is_leaf(x: Any) -> bool:
    return x is None or isinstance(x, _Place)


def _is_ours(given: Any) -> bool:
    """Whether a program takes what one of `export` does."""
    args, _ = given
    return any(isinstance(x, _Place) for x in jax.tree.leaves(args, is_leaf=_is_leaf))


def _check(name: str, t: Any) -> None:
    for slot in (*t.written, *t.read):
        if slot.argument is None:
            raise RefTypeError(
                f"export of `{name}`, which closes over {slot.origin.describe()}: where it "
                "will be called that ref isn't. Pass it as an argument"
            )
    for aval in t.in_avals:
        if getattr(aval, "memory_space", None) == jax.memory.Space.Host:
            raise RefTypeError(
                f"export of `{name}` over a ref in the host's memory, where JAX exports nothing: "
                "export it over refs in the device's, and call it with any refs"
            )
    if t.new_origins:
        raise RefTypeError(
            f"export of `{name}`, which returns {t.new_origins[0].describe()}, a ref that it "
            "makes: return its value, and make the ref where the program is called"
        )
    if t.packing.selections:
        raise RefTypeError(
            f"export of `{name}` over refs of a pack: export it over the refs' types, "
            "`refs.tree.abstract(state)`, and call it with any refs"
        )


def _given(traced: Traced) -> list[jax.ShapeDtypeStruct]:
    """The types of a call's leaves; a ref in two places has the same one in both."""
    of: dict[int, jax.ShapeDtypeStruct] = {}
    found: list[jax.ShapeDtypeStruct] = []
    for number, aval, place in zip(
        traced._program.operands.ref_places,
        traced._told.argument_types,
        traced.placements,
        strict=True,
    ):
        shape = _shape(aval, place)
        found.append(shape if number is None else of.setdefault(number, shape))
    return found


def _shape(aval: Aval, place: Any) -> jax.ShapeDtypeStruct:
    array = getattr(aval, "inner_aval", aval)
    weak = getattr(array, "weak_type", False)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place, weak_type=weak)


def _bits(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(_jax.unwrap_keys, x) if _jax.is_key(x.dtype) else x


def _check_ref(
    exported: jax.export.Exported,
    place: _Place,
    ref: Any,
    of: dict[tuple[str, int], RefLike],
    types: dict[str, Sequence[Aval]],
) -> None:
    """Notes a ref of a call under its place, after a check that it fits there."""
    doing = f"call of the exported `{exported.fun_name}`"
    if not is_ref(ref):
        raise RefTypeError(
            f"{doing} with an array where a ref is expected: make one with `refs.new_ref`"
        )
    key = place.role, place.number
    known = next((k for k, other in of.items() if other is ref), key)
    if known != key or of.setdefault(key, ref) is not ref:
        raise RefValueError(
            f"{doing} with {access.describe(ref)}, and with other aliases among its refs than it "
            "was exported with: the same ref stands where two do, or two where one does"
        )
    if place.role == "idle":
        return
    aval = types[place.role][place.number]
    has = _bits(jax.ShapeDtypeStruct(ref.shape, ref.dtype))
    fits = aval.ndim == has.ndim and all(
        n == m or not isinstance(n, int) for n, m in zip(aval.shape, has.shape, strict=True)
    )
    if not fits or aval.dtype != has.dtype:
        raise RefValueError(
            f"{doing} with {access.describe(ref)}, of shape {has.shape} and dtype {has.dtype}: "
            f"{aval.str_short()} is expected there"
        )
