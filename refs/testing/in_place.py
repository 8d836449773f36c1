"""`refs.testing.assert_in_place`: checks that a compiled function updates its state in place."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jaxlib
import numpy as np

from refs import _jax
from refs._handles.predicates import is_ref
from refs._jit.jit import jit
from refs._jit.stages import Lowered
from refs._origin import Origin, origin_of
from refs.errors import RefTypeError, RefValueError
from refs.testing._hlo import Module, Move

# A copy of less takes no longer than the fence that prevents it, 0.03 to 0.1 µs: of 4 KiB 0.04 µs
# in a loop on a CPU, of 8 KiB 0.08, of 16 KiB 0.15, of 32 KiB 0.6.
SMALL = 2**14


def assert_in_place(
    fun: Callable[..., Any],
    *args: Any,
    loops_only: bool = False,
    smaller_than: int = SMALL,
    like: Any = None,
) -> None:
    """Checks in the compiled program that `fun(*args)` updates refs in place.

    That is so if each ref that it writes keeps its memory, and XLA copies no array of a written
    ref's size, neither in each step of a loop nor once. On several devices, no collective may give
    a device more of a sharded ref than its own part, or exchange the parts. Refs that `fun` makes
    itself aren't looked for. `fun` is compiled, but not run.

    Args:
      fun: a function over refs, compiled or not; or a function of arrays under `jax.jit` that
        donates the arrays that it updates: then the donated arrays are checked.
      *args: its arguments. Arrays may be `jax.ShapeDtypeStruct`s.
      loops_only: whether to allow copies that are made once a call, of an initial value for
        instance.
      smaller_than: in bytes; copies of less are allowed. By default 16 KiB: below that a copy takes
        no longer than what prevents it.
      like: the same program by hand, whose copies are allowed, as many as it has of each size. A
        function of `args` with arrays in the places of refs, compiled or not; or, if `fun` closes
        over refs, what `jax.jit(by_hand, donate_argnums=...).lower(...)` returns.

    Raises:
      AssertionError: if an array is copied, or a ref doesn't keep its memory. The message says how
        much is copied, how often, of which ref, for which line, and what can be done.
      RefValueError: if nothing is updated, or while JAX looks for NaNs or infinities.
      RefTypeError: if `like` is nothing that can be compiled.
      RefStateError: under `jax.disable_jit`.
      Exception: whatever `fun` or `like` raises while it is traced.

    >>> r = refs.new_ref(jnp.arange(10_000.0), name="r")
    >>> def swap(i, j):
    ...     r[i], r[j] = r[j], r[i]
    >>> refs.testing.assert_in_place(swap, 3, 4)

    A true second use of the old value needs a copy, and is found:

    >>> def keeping():
    ...     old = r[...]
    ...     r[0] = 1.0
    ...     return old
    >>> refs.testing.assert_in_place(keeping)
    Traceback (most recent call last):
    AssertionError: keeping is not in place: it copies 10,000 elements of float32, as many as ...
    """
    if _jax.looks_for_nans():
        raise RefValueError(
            f"assert_in_place of {_name(fun)} while JAX looks for NaNs or infinities: nothing is "
            "in place then. Turn `jax_debug_nans` and `jax_debug_infs` off"
        )
    compiles = fun if hasattr(fun, "lower") else jit(fun)
    lowered = compiles.lower(*args)  # type: ignore[union-attr]
    module = Module.parse(lowered.compile().as_text())
    updated = _updated(fun, args, lowered, module)
    wrong = [
        f"{u.name} doesn't keep its memory: its new value has another layout, or is elsewhere"
        for u in updated
        if u.parameter not in module.aliases()
    ]
    allowed = Counter(map(_kind, _moves(_lowered_by_hand(like, args), updated, smaller_than)))
    found: dict[tuple[Any, ...], list[Move]] = {}
    for move in _moves(module, updated, smaller_than):
        if move.in_loop or not loops_only:
            found.setdefault(_kind(move), []).append(move)
    found = {kind: moves for kind, moves in found.items() if len(moves) > allowed[kind]}
    for kind, moves in found.items():
        names = [u.name for u in updated if u.is_moved_by(moves[0])]
        by_hand = f" (by hand {allowed[kind]})" if like is not None else ""
        wrong.append(_describe(moves, names) + by_hand)
    if wrong:
        error = AssertionError(
            f"{_name(fun)} is not in place: {'; '.join(wrong)}. {' '.join(_advice(found))}".strip()
        )
        if not _jax.xla_copies_less:  # pragma: no cover, JAX before 0.11.2
            error.add_note(
                f"If that isn't it, jaxlib {jaxlib.__version__} is: it copies what a branch reads "
                "after it has written it, and where large parts are read. Upgrade to 0.11.2 or "
                "newer."
            )
        raise error


class _Updated(NamedTuple):
    """A ref or array that is updated: a parameter of the module.

    Attributes:
      part: the dtype and number of elements that one device has of it.
      whole: the dtype and number of elements of all of it.
    """

    name: str
    parameter: int
    part: tuple[str, int]
    whole: tuple[str, int]

    def is_moved_by(self, move: Move) -> bool:
        """Whether a copy copies as much, or a collective gives a device more than its own part.

        A collective that gives it as much, such as a sum of gradients, may belong to the program.
        """
        (dtype, part), (_, whole) = self.part, self.whole
        if not move.is_collective:
            return (move.dtype, move.size) == (dtype, part)
        is_more = move.size > part or (move.is_permutation and move.size == part)
        return move.dtype == dtype and part < whole and is_more and move.size <= whole


def _updated(
    fun: Callable[..., Any], args: tuple[Any, ...], lowered: Any, module: Module
) -> list[_Updated]:
    parts = module.parameters()
    types = jax.tree.leaves(lowered.args_info)
    if isinstance(lowered, Lowered) and not lowered.is_plain:
        names = lowered.described(_described(fun, args))
        types = jax.tree.leaves(lowered.of_jax.args_info)
        numbers: Iterable[int] = range(len(names))
    else:
        numbers = [k for k in range(len(parts)) if k in module.aliases()]
        names = [f"donated argument {k}" for k in numbers]
    if not names:
        donates = any(argument.donated for argument in types)
        why = (
            "none of its results takes the memory of what is donated to it"
            if donates
            else "what it isn't donated can't be updated"
        )
        raise RefValueError(
            f"assert_in_place of {_name(fun)}, which updates nothing: it writes no ref but those "
            f"that it makes itself, if any, and {why}"
        )
    # XLA has no parameters for arguments that aren't used.
    is_whole = len(types) == len(parts)
    return [
        _Updated(
            name,
            k,
            parts[k],
            (parts[k][0], int(np.prod(types[k].shape, dtype=int))) if is_whole else parts[k],
        )
        for k, name in zip(numbers, names, strict=True)
    ]


def _described(fun: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    """The distinct refs among the arguments; one without a name by its path, `state['w1']`."""
    try:
        bound = inspect.signature(fun).bind(*args).arguments
    except (TypeError, ValueError):  # Some callables have no signature.
        bound = {"args": args}
    described: dict[int, str] = {}
    for name, arg in bound.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(arg):
            if is_ref(leaf):
                origin = origin_of(_jax.typeof(leaf))
                named = Origin(origin.name or name + jax.tree_util.keystr(path), origin.site)
                described.setdefault(id(leaf), named.describe())
    return [*described.values()]


def _lowered_by_hand(like: Any, args: tuple[Any, ...]) -> Module | None:
    """The compiled program that `like` says."""
    if like is None:
        return None
    if hasattr(like, "as_text"):  # lowered or compiled already
        return Module.parse((like.compile() if hasattr(like, "compile") else like).as_text())
    if not callable(like):
        raise RefTypeError(
            f"assert_in_place with like={like!r}: a function of arrays, or what "
            "`jax.jit(f).lower(...)` returns, is needed"
        )
    values = jax.tree.map(_value_type, args)
    donated = [k for k, arg in enumerate(args) if any(map(is_ref, jax.tree.leaves(arg)))]
    compiles: Any = like if hasattr(like, "lower") else jax.jit(like, donate_argnums=donated)
    return Module.parse(compiles.lower(*values).compile().as_text())


def _value_type(leaf: Any) -> Any:
    """The type of a ref's value, sharded as the ref is; any other leaf itself."""
    if not is_ref(leaf):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _moves(module: Module | None, updated: Sequence[_Updated], smallest: int) -> list[Move]:
    """The copies and collectives of at least `smallest` bytes that move what is updated."""
    moves = [] if module is None else module.moves()
    return [m for m in moves if m.bytes >= smallest and any(u.is_moved_by(m) for u in updated)]


def _kind(move: Move) -> tuple[Any, ...]:
    """Moves of one kind are told together."""
    return move.dtype, move.size, move.in_loop, move.is_collective


def _name(fun: Callable[..., Any]) -> str:
    return getattr(fun, "__name__", "the function")


def _describe(moves: Sequence[Move], names: Sequence[str]) -> str:
    first = moves[0]
    times = "once" if len(moves) == 1 else f"{len(moves)} times"
    known = ", ".join(dict.fromkeys(m.line for m in moves if m.line))
    elements = f"{first.size:,} elements of {_dtype(first.dtype)}"
    have = "has" if len(names) == 1 else "have"
    what = (
        f"brings {elements} of {' or '.join(names)} to each device from others"
        if first.is_collective
        else f"copies {elements}, as many as {' and '.join(names)} {have}"
    )
    return (
        f"it {what}, {times} {'each step of a loop' if first.in_loop else 'a call'}"
        f"{known and f', for {known}'}"
    )


def _advice(found: dict[tuple[Any, ...], list[Move]]) -> list[str]:
    """What to write instead of what was found."""
    kinds = {move.is_collective for moves in found.values() for move in moves}
    advice = {
        False: "A value that is used again after it has been overwritten has to be copied: use it "
        "before, or read the ref again.",
        True: "A block of more than a sixteenth of a ref, whose start isn't known, is brought "
        "together: take fewer rows, or shard another axis.",
    }
    return [text for kind, text in advice.items() if kind in kinds]


def _dtype(hlo: str) -> str:
    """`float32` for HLO's `f32`."""
    kinds = {"bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}
    letters = hlo.rstrip("0123456789")
    return "bool" if hlo == "pred" else kinds.get(letters, letters) + hlo[len(letters) :]
