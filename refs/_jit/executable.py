"""The pure function that is compiled: its operands and results, and which are donated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from refs import _jax
from refs._buffers.handles import sharding_of
from refs._buffers.signals import without_interrupts
from refs._inplace import run_in_place
from refs._jit.arguments import Arguments
from refs._jit.staged import Staged
from refs._tracing.trace import Call
from refs._transactions.signature import shardings_of_arguments, shardings_of_result
from refs._transactions.transaction import of_leaves
from refs._types import PyTree, Value


class Options(NamedTuple):
    """The keywords of `refs.jit`, except those that select arguments."""

    in_shardings: PyTree
    out_shardings: PyTree
    keep_unused: bool
    device: Any
    backend: str | None
    inline: Any
    compiler_options: dict[str, Any] | None


class TypesDiffer(Exception):
    """A compiled function was called with types that its program wasn't traced for."""


class _BeforePython(threading.local):
    """What this thread's calls do, the outermost first, before JAX's Python code runs a program."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []


before_python = _BeforePython()


def _before_python() -> None:
    before_python.calls[-1]()


def donated_operands(arguments: Arguments, is_debugging: bool = False) -> tuple[int, ...]:
    """The positions of the donated operands in `(state, constants, undonated, donated)`.

    The state is the buffers of written refs, and of packs with written refs in them (`packing`).
    The last operand is the arrays that the user donates with `donate_argnums` and
    `donate_argnames`. While JAX looks for NaNs (`is_debugging`) nothing is donated: JAX then runs a
    program that has made some a second time.

    This is for `refs.jit`. Kernels of eager operations donate their buffer (`_buffers.kernels`),
    loops at top level theirs (`_transactions.calls`), and callbacks there (`_callbacks.eager`).
    """
    if is_debugging:
        return ()
    return (0,) if arguments.is_bare else (0, 3)


class Executable:
    """A traced function under `jax.jit`.

    It takes `(state, constants, undonated, donated)`, sequences of arrays: the buffers that are
    written, those that are only read, and the other arguments; the state only, if the arguments are
    bare. It returns `(new state, rest)`: state comes first, since XLA gives an alias
    to the first output that fits. Arrays of PRNG keys go in and out as bits.

    Attributes:
      compiled: the function. With operands of other types than at first it raises TypesDiffer. If
        JAX's Python code is to run it, signals wait; or, if it can fail, the last one of
        `before_python.calls` is called: callbacks are to be interruptible.
      compiled_undonated: the same, donating nothing.
    """

    def __init__(
        self,
        t: Staged,
        name: str,
        arguments: Arguments,
        call: Call,
        options: Options,
        is_direct: bool,
        can_fail: bool,
    ):
        """`is_direct`: whether `rest` is to be the function's result as it is."""
        expected: list[Any] = []
        order = {k: j for j, k in enumerate([*arguments.undonated, *arguments.donated])}
        arrays = sorted(order)

        # It doesn't close over the entry, which holds it: the cycle would keep the refs alive.
        def pure(
            state: Sequence[Value],
            constants: Sequence[Value] = (),
            undonated: Sequence[Value] = (),
            donated: Sequence[Value] = (),
        ) -> tuple[list[Value], PyTree]:
            flat, tree = jax.tree.flatten((state, constants, undonated, donated))
            # The value of one of JAX's own handles may be weakly typed now, and strongly later.
            n = len(state) + len(constants)
            strong = [_jax.type_in_jit(x)._replace(weak_type=None) for x in flat[:n]]
            types = (tree, strong, [*map(_jax.type_in_jit, flat[n:])], _jax.context_in_jit())
            if not expected:
                expected.append(types)
            if expected[0] != types or _jax.is_jit_disabled():
                raise TypesDiffer
            given = [*undonated, *donated]
            leaves = [given[order[k]] for k in arrays]
            out = run_in_place(t.closed, [*state, *constants, *leaves])
            new, rest = out[: t.n_new], out[t.n_new :]
            return new, t.out_tree.unflatten(rest) if is_direct else t.split_results(rest)

        pure.__name__ = pure.__qualname__ = name
        keywords = {
            "device": options.device,
            "backend": options.backend,
            "compiler_options": options.compiler_options,
            **_shardings(t, arguments, call, options),
        }
        self._arguments = arguments
        compiled, self.compiled_undonated = (
            jax.jit(
                pure,
                donate_argnums=donated_operands(arguments, is_debugging),
                keep_unused=True,
                **keywords,
            )
            for is_debugging in (False, True)
        )
        self.compiled = (
            _jax.before_python(compiled, _before_python)
            if can_fail
            else without_interrupts(compiled)
        )

    def operands(
        self, flat: list[Any], state: list[Value], constants: list[Value]
    ) -> tuple[Any, ...]:
        """The operands of the compiled function, for a call with these leaves."""
        a = self._arguments
        if a.is_bare:
            return (state,)
        return state, constants if a.reads else (), a.undonated_of(flat), a.donated_of(flat)


def _shardings(t: Staged, arguments: Arguments, call: Call, options: Options) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if options.in_shardings is not None:
        flat = shardings_of_arguments(options.in_shardings, call.tree)
        if not arguments.is_bare:
            of_arrays = arguments.undonated_of(flat), arguments.donated_of(flat)
            found["in_shardings"] = (None, None, *of_arrays)
    packing = arguments.packing
    of_slots = [sharding_of(r) for r in t.refs(t.written, call.refs)]
    state = packing.per_operand([None] * len(packing.bases), of_slots)
    shardings = state if any(s is not None for s in state) else None
    if options.out_shardings is not None:
        flat = shardings_of_result(options.out_shardings, t.out_tree)
        found["out_shardings"] = (shardings, of_leaves(flat, t.out_leaves))
    elif shardings is not None:
        found["out_shardings"] = (shardings, None)
    return found
