"""`refs.testing.assert_in_place`: checks that a compiled function updates its state in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

from refs import _jax
from refs._explain.hlo import Module, Move
from refs._explain.moves import (
    ADVICE,
    SMALL,
    Updated,
    dtype_of,
    kind_of,
    moves_of,
    named_arguments,
    updated_by,
)
from refs._handles.abstract import handle_or_abstract
from refs._handles.predicates import is_ref
from refs._jit.jit import compiling
from refs._jit.stages import Lowered
from refs.errors import RefTypeError, RefValueError


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
      *args: its arguments. Arrays may be `jax.ShapeDtypeStruct`s, and refs those with `is_ref`.
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
    compiled, given = compiling("lower", fun, args)
    lowered = compiled.lower(*given)
    module = Module.parse(lowered.compile().as_text())
    arguments = [origin.describe() for _, origin in named_arguments(compiled, given, {})]
    updated = _updated(fun, arguments, lowered, module)
    wrong = [
        f"{u.name} doesn't keep its memory: its new value has another layout, or is elsewhere"
        for u in updated
        if u.parameter not in module.aliases()
    ]
    allowed = Counter(map(kind_of, moves_of(_lowered_by_hand(like, args), updated, smaller_than)))
    found: dict[tuple[Any, ...], list[Move]] = {}
    for move in moves_of(module, updated, smaller_than):
        if move.in_loop or not loops_only:
            found.setdefault(kind_of(move), []).append(move)
    found = {kind: moves for kind, moves in found.items() if len(moves) > allowed[kind]}
    for kind, moves in found.items():
        names = [u.name for u in updated if u.is_moved_by(moves[0])]
        by_hand = f" (by hand {allowed[kind]})" if like is not None else ""
        wrong.append(_describe(moves, names) + by_hand)
    if wrong:
        kinds = {move.is_collective for moves in found.values() for move in moves}
        advice = [text for kind, text in ADVICE.items() if kind in kinds]
        raise AssertionError(
            f"{_name(fun)} is not in place: {'; '.join(wrong)}. {' '.join(advice)}".strip()
        )


def _updated(
    fun: Callable[..., Any], arguments: Sequence[str], lowered: Any, module: Module
) -> list[Updated]:
    updated = updated_by(lowered, module, arguments)
    if not updated:
        stage = lowered.of_jax if isinstance(lowered, Lowered) else lowered
        donates = any(argument.donated for argument in jax.tree.leaves(stage.args_info))
        why = (
            "none of its results takes the memory of what is donated to it"
            if donates
            else "what it isn't donated can't be updated"
        )
        raise RefValueError(
            f"assert_in_place of {_name(fun)}, which updates nothing: it writes no ref but those "
            f"that it makes itself, if any, and {why}"
        )
    return updated


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
    args = jax.tree.map(handle_or_abstract, args)
    values = jax.tree.map(_value_type, args)
    donated = [k for k, arg in enumerate(args) if any(map(is_ref, jax.tree.leaves(arg)))]
    compiles: Any = like if hasattr(like, "lower") else jax.jit(like, donate_argnums=donated)
    return Module.parse(compiles.lower(*values).compile().as_text())


def _value_type(leaf: Any) -> Any:
    """The type of a ref's value, sharded as the ref is; any other leaf itself."""
    if not is_ref(leaf):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _name(fun: Callable[..., Any]) -> str:
    return getattr(fun, "__name__", "the function")


def _describe(moves: Sequence[Move], names: Sequence[str]) -> str:
    first = moves[0]
    times = "once" if len(moves) == 1 else f"{len(moves)} times"
    known = ", ".join(dict.fromkeys(m.line for m in moves if m.line))
    elements = f"{first.size:,} elements of {dtype_of(first.dtype)}"
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
