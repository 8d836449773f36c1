"""The report of a traced function: see `refs.explain`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from refs import _jax
from refs._discharge.program import Program
from refs._explain.accesses import Accesses
from refs._explain.hlo import Module, Move
from refs._explain.moves import (
    ADVICE,
    Updated,
    dtype_of,
    kind_of,
    moves_of,
    named_arguments,
    updated_by,
)
from refs._explain.report import (
    ExplainedCallback,
    ExplainedMemory,
    ExplainedMove,
    ExplainedRef,
    Explanation,
    LineOfRef,
)
from refs._origin import Origin, origin_of
from refs._types import Aval, RefLike

# A ref as the report names it: its origin, the type of its value, and its role.
_Named = tuple[Origin, Aval, str]

_INSTEAD = (
    "Use the old value before it is overwritten, or read the ref again. An argument, or what "
    "another ref holds, is copied into the ref: compute it in the function."
)
_OF_ORDER = "It is XLA's own, and made by hand as well: keep the array in the operation's order."


def explained(
    fun: Callable[..., Any],
    traced: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Explanation:
    """The report of a function that was traced with these arguments."""
    arguments = named_arguments(fun, args, kwargs)
    lowered = traced.lower()
    compiled = lowered.compile()
    module = Module.parse(compiled.as_text())
    updated = updated_by(lowered, module, [origin.describe() for _, origin in arguments])
    program = Program.of(traced.effectful_jaxpr)
    given = [ref for ref, _ in arguments]
    numbers = _numbers(program, given)
    closed_over = [ref for ref in program.refs if numbers[id(ref)] >= len(arguments)]
    names: list[_Named] = [
        (origin, jax.typeof(ref).inner_aval, "argument") for ref, origin in arguments
    ]
    names += [(origin_of(t), t.inner_aval, "closed over") for t in map(jax.typeof, closed_over)]
    inputs = [k if k < len(arguments) else None for k in range(len(program.jaxpr.in_avals))]
    held = {i: numbers[id(program.refs[k])] for i, k in program.position.items()}
    found = Accesses(program.jaxpr, inputs, held, len(names))
    names += [(origin, aval, "made inside") for origin, aval in found.made.values()]
    kept = {} if traced._program.is_plain else _keeping(traced._form, numbers, module)
    described = [origin.describe() for origin, *_ in names]
    copied = () if traced._program.is_plain else traced._program.copied
    return Explanation(
        function=_jax.fun_name(fun),
        platform=jax.default_backend(),
        jax=jax.__version__,
        refs=tuple(_ref(k, name, found, kept.get(k)) for k, name in enumerate(names)),
        moves=tuple(_moves(module, updated, traced)),
        kept=tuple(updated[k].name for k in copied),
        memory=_memory(compiled),
        callbacks=tuple(
            ExplainedCallback(c.what, c.line, c.inside, tuple(described[k] for k in c.refs), c.at)
            for c in found.callbacks
        ),
        loops=tuple(found.spans),
        before=str(traced.effectful_jaxpr),
        after=str(traced.jaxpr),
    )


def _numbers(program: Program, arguments: Sequence[RefLike]) -> dict[int, int]:
    """The number of each ref that a program closes over, by its id: arguments come first."""
    given = {id(ref): k for k, ref in enumerate(arguments)}
    others = itertools.count(len(arguments))
    return {id(r): given[id(r)] if id(r) in given else next(others) for r in program.refs}


def _keeping(t: Any, numbers: dict[int, int], module: Module) -> dict[int, bool]:
    """For each ref that is written, by number: whether its memory is kept."""
    aliased, operands = module.aliases(), t.packing.operands
    return {
        numbers[id(t.outers[s.outer])] if s.argument is None else s.argument: n in aliased
        for s, n in zip(t.written, operands, strict=True)
    }


def _ref(number: int, name: _Named, found: Accesses, keeps: bool | None) -> ExplainedRef:
    origin, aval, role = name
    lines = [a for a in found.accesses if a.ref == number]
    words = dict.fromkeys(word for a in lines for word in a.what.split(", "))
    return ExplainedRef(
        name=origin.name,
        created=None if origin.site is None else str(origin.site),
        dtype=str(aval.dtype),
        shape=tuple(map(int, aval.shape)),
        bytes=int(np.prod(aval.shape, dtype=int)) * aval.dtype.itemsize,
        role=role,
        does=", ".join(words) or "not touched",
        keeps_memory=keeps,
        lines=tuple(LineOfRef(a.what, a.line, a.inside, a.at) for a in lines),
    )


def _moves(module: Module, updated: Sequence[Updated], traced: Any) -> Iterator[ExplainedMove]:
    kinds: dict[tuple[Any, ...], list[Move]] = {}
    for move in moves_of(module, updated):
        kinds.setdefault((*kind_of(move), move.is_of_transpose), []).append(move)
    sizes = {(x.dtype, int(np.prod(x.shape))) for x in jax.tree.leaves(traced.out_info)}
    for (*_, is_collective, is_of_transpose), some in kinds.items():
        first = some[0]
        dtype = dtype_of(first.dtype)
        is_result = not first.in_loop and any((str(d), n) == (dtype, first.size) for d, n in sizes)
        yield ExplainedMove(
            what="collective" if is_collective else "copy",
            dtype=dtype,
            elements=first.size,
            bytes=first.bytes,
            times=len(some),
            in_loop=first.in_loop,
            refs=tuple(u.name for u in updated if u.is_moved_by(first)),
            lines=tuple(dict.fromkeys(m.line for m in some if m.line)),
            why=_why(is_collective, is_of_transpose, is_result),
            instead=ADVICE[True] if is_collective else _OF_ORDER if is_of_transpose else _INSTEAD,
        )


def _why(is_collective: bool, is_of_transpose: bool, is_result: bool) -> str:
    if is_collective:
        return "a device needs more of the ref than its own part"
    if is_of_transpose:
        return "an operation, such as a convolution, takes or gives elements in another order"
    if is_result:
        return "a result is as large as the ref, whose memory its new value has"
    return (
        "two values as large as the ref are needed at once: the old and the new one, or one that "
        "is written and also kept elsewhere"
    )


def _memory(compiled: Any) -> ExplainedMemory | None:
    found = compiled.memory_analysis()
    if found is None:  # pragma: no cover, on a platform that doesn't say
        return None
    return ExplainedMemory(
        found.argument_size_in_bytes,
        found.output_size_in_bytes,
        found.alias_size_in_bytes,
        found.temp_size_in_bytes,
    )
