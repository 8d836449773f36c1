"""`refs.testing.assert_in_place`: checks that a compiled function updates its state in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jaxlib

from refs import _jax
from refs._inplace import SMALLEST
from refs._jit.jit import jit
from refs._jit.stages import Lowered
from refs.errors import RefValueError
from refs.testing._hlo import Module


def assert_in_place(fun: Callable[..., Any], *args: Any, loops_only: bool = False) -> None:
    """Checks in the compiled program that `fun(*args)` updates refs in place.

    That is so if each ref that it writes keeps its memory, and XLA copies no array of a written
    ref's size, neither in each step of a loop nor once. `fun` is compiled, but not run.

    Args:
      fun: a function over refs, compiled or not; or a function of arrays under `jax.jit` that
        donates the arrays that it updates: then the donated arrays are checked.
      *args: its arguments. Arrays may be `jax.ShapeDtypeStruct`s.
      loops_only: whether to allow copies that are made once a call, of an initial value for
        instance.

    Raises:
      AssertionError: if an array is copied, or a ref doesn't keep its memory. The message says how
        much is copied, how often, of which ref, for which line, and what can be done.
      RefValueError: if nothing is updated, or while JAX looks for NaNs or infinities.
      RefStateError: under `jax.disable_jit`.
      Exception: whatever `fun` raises while it is traced.

    >>> r = refs.new_ref(jnp.arange(1000.0), name="r")
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
    AssertionError: keeping is not in place: it copies 1,000 elements of float32, as many as ...
    """
    if _jax.looks_for_nans():
        raise RefValueError(
            f"assert_in_place of {_name(fun)} while JAX looks for NaNs or infinities: nothing is "
            "in place then. Turn `jax_debug_nans` and `jax_debug_infs` off"
        )
    compiles = fun if hasattr(fun, "lower") else jit(fun)
    lowered = compiles.lower(*args)  # type: ignore[union-attr]
    module = Module.parse(lowered.compile().as_text())
    arrays = module.parameters()
    if isinstance(lowered, Lowered):
        names = [origin.describe() for origin in lowered.written]
    else:
        names = [
            f"donated argument {k}" if k in module.aliases() else "" for k in range(len(arrays))
        ]
    updated = {k: name for k, name in enumerate(names) if name}
    if not updated:
        donates = any(argument.donated for argument in jax.tree.leaves(lowered.args_info))
        why = (
            "none of its results takes the memory of what is donated to it"
            if donates
            else "what it isn't donated can't be updated"
        )
        raise RefValueError(
            f"assert_in_place of {_name(fun)}, which updates nothing: it writes no ref, and {why}"
        )
    wrong = [
        f"{name} doesn't keep its memory: its new value has another layout, or is elsewhere"
        for k, name in updated.items()
        if k not in module.aliases()
    ]
    of_size: dict[tuple[str, int], list[str]] = {}
    for k, name in updated.items():
        of_size.setdefault(arrays[k], []).append(name)
    copies: dict[tuple[str, int, bool], list[str | None]] = {}
    for c in module.copies(SMALLEST):
        if (c.dtype, c.size) in of_size and (c.in_loop or not loops_only):
            copies.setdefault((c.dtype, c.size, c.in_loop), []).append(c.line)
    for (dtype, n, in_loop), lines in copies.items():
        wrong.append(_describe(dtype, n, in_loop, lines, of_size[dtype, n]))
    if wrong:
        error = AssertionError(
            f"{_name(fun)} is not in place: {'; '.join(wrong)}. A value that is used again after "
            "it has been overwritten has to be copied: use it before, or read the ref again"
        )
        if not _jax.xla_copies_less:  # pragma: no cover, JAX before 0.11.2
            error.add_note(
                f"If that isn't it, jaxlib {jaxlib.__version__} is: it copies what a branch reads "
                "after it has written it, and where large parts are read. Upgrade to 0.11.2 or "
                "newer."
            )
        raise error


def _name(fun: Callable[..., Any]) -> str:
    return getattr(fun, "__name__", "the function")


def _describe(
    dtype: str, size: int, in_loop: bool, lines: Sequence[str | None], names: Sequence[str]
) -> str:
    times = "once" if len(lines) == 1 else f"{len(lines)} times"
    known = ", ".join(dict.fromkeys(line for line in lines if line))
    return (
        f"it copies {size:,} elements of {_dtype(dtype)}, as many as {' and '.join(names)} "
        f"{'has' if len(names) == 1 else 'have'}, {times} "
        f"{'each step of a loop' if in_loop else 'a call'}{known and f', for {known}'}"
    )


def _dtype(hlo: str) -> str:
    """`float32` for HLO's `f32`."""
    kinds = {"bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}
    letters = hlo.rstrip("0123456789")
    return "bool" if hlo == "pred" else kinds.get(letters, letters) + hlo[len(letters) :]
