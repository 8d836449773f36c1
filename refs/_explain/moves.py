"""Which arrays of a compiled program are the refs that it updates, and what moves them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from refs._explain.hlo import Module, Move
from refs._handles.abstract import handle_or_abstract
from refs._handles.predicates import is_ref
from refs._origin import Origin, origin_of
from refs._types import RefLike

# A copy of less takes no longer than the fence that prevents it, 0.03 to 0.1 µs: of 4 KiB 0.04 µs
# in a loop on a CPU, of 8 KiB 0.08, of 16 KiB 0.15, of 32 KiB 0.6.
SMALL = 2**14

ADVICE = {
    False: "A value that is used again after it has been overwritten has to be copied: use it "
    "before, or read the ref again. So has a ref that is returned as a whole, or overwritten by "
    "what needs memory of its own, such as a sort.",
    True: "A block of more than a sixteenth of a ref, whose start isn't known, is brought "
    "together: take fewer rows, or shard another axis.",
}  # by `Move.is_collective`: what to write instead


class Updated(NamedTuple):
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


def updated_by(lowered: Any, module: Module, arguments: Sequence[str]) -> list[Updated]:
    """What a program updates: refs that it writes, or donated arrays whose memory a result takes.

    `arguments` are the names of the distinct refs among the arguments.
    """
    parts = module.parameters()
    types = jax.tree.leaves(lowered.args_info)
    if not getattr(lowered, "is_plain", True):  # It is ours, and no stage of JAX's.
        names = lowered.described(arguments)
        types = jax.tree.leaves(lowered.of_jax.args_info)
        numbers: Iterable[int] = range(len(names))
    else:
        numbers = [k for k in range(len(parts)) if k in module.aliases()]
        names = [f"donated argument {k}" for k in numbers]
    # XLA has no parameters for arguments that aren't used.
    is_whole = len(types) == len(parts)
    return [
        Updated(
            name,
            k,
            parts[k],
            (parts[k][0], int(np.prod(types[k].shape, dtype=int))) if is_whole else parts[k],
        )
        for k, name in zip(numbers, names, strict=True)
    ]


def named_arguments(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[RefLike, Origin]]:
    """The distinct refs among arguments; one without a name is named by its path, `state['w1']`.

    So is one of a tree without a name, whose own name, `['w1']`, is only its place in that tree.
    The order is that of the leaves of `(args, kwargs)`, as in the program. Each `ShapeDtypeStruct`
    that stands for a ref stands for another one.
    """
    try:
        positional = inspect.signature(fun).bind_partial(*args).arguments
    except (TypeError, ValueError):  # Some callables have no signature.
        positional = {"args": args}
    found: dict[int, tuple[RefLike, Origin]] = {}
    for name, arg in (*positional.items(), *sorted(kwargs.items())):
        for path, leaf in jax.tree_util.tree_leaves_with_path(arg):
            ref = handle_or_abstract(leaf)
            if is_ref(ref):
                origin = origin_of(jax.typeof(ref))
                own, place = origin.name or "", name + jax.tree_util.keystr(path)
                named = place if own.startswith(("[", ".")) else own or place
                found.setdefault(id(ref), (ref, Origin(named, origin.site)))
    return [*found.values()]


def moves_of(
    module: Module | None, updated: Sequence[Updated], smallest: int = SMALL
) -> list[Move]:
    """The copies and collectives of at least `smallest` bytes that move what is updated."""
    moves = [] if module is None else module.moves()
    return [m for m in moves if m.bytes >= smallest and any(u.is_moved_by(m) for u in updated)]


def kind_of(move: Move) -> tuple[Any, ...]:
    """Moves of one kind are told together."""
    return move.dtype, move.size, move.in_loop, move.is_collective


def dtype_of(hlo: str) -> str:
    """`float32` for HLO's `f32`."""
    kinds = {"bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}
    letters = hlo.rstrip("0123456789")
    return "bool" if hlo == "pred" else kinds.get(letters, letters) + hlo[len(letters) :]
