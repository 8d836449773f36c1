"""One traced and compiled form of a function: its arguments, its executable, and its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from refs import _jax
from refs._buffers.devices import devices_told
from refs._buffers.handles import buffer_of, is_ours, sharding_of
from refs._callbacks.analysis import calls_host, uncopied
from refs._handles.access import check_ref
from refs._handles.making import adopt
from refs._jit.arguments import Arguments
from refs._jit.executable import Executable, Options
from refs._jit.staged import Staged
from refs._tracing.facts import can_fail
from refs._tracing.trace import Call, result_of
from refs._transactions.signature import Static, dtype_of, shape_of
from refs._types import Aval, PyTree, PyTreeDef, RefLike


class Entry:
    """One traced and compiled form of a function.

    Attributes:
      is_plain: False; a `Plain` has True.
      transaction, name: the traced function, and the name of the user's.
      arguments, executable: the positions of its arguments, and the compiled function.
      shardings: those of the buffers that are written, None if all are on a single device.
      can_fail: whether the program can fail while it runs, and values would be lost then; if it
        writes no refs, whether it calls a callback.
      copied: positions of the written buffers that a call keeps copies of, if it can fail.
      is_careful: whether each call is a careful one: it can fail, or touches a handle of JAX's.
      is_direct: whether the rest that the executable returns is the function's result as it is.
      is_alone: whether the function has no other form. Only then is `flatten` tried at once: on
        arguments of another structure it is slow, for its error prints them.
      flatten: gives the leaves of arguments of this structure, or raises ValueError.
      call: `call(entry, flat, args, kwargs)` runs it, on arguments whose structure fits, but
        perhaps not their types and aliases; see `ways.py`.
      run: the same, on arguments that are known to fit.
    """

    call: Callable[..., Any]
    run: Callable[..., Any]

    is_plain = False

    def __init__(
        self,
        transaction: Staged,
        name: str,
        static: Static | None,
        donated: Sequence[bool],
        options: Options,
        call: Call,
    ):
        self.transaction, self.name = transaction, name
        self.static, self.is_alone = static, True
        t, self.out_tree = transaction, transaction.out_tree
        for ref in t.outers:
            check_ref(ref, "call")
        self.in_tree, self.flatten = call.tree, call.tree.flatten_up_to
        written, read = t.refs(t.written, call.refs), t.refs(t.read, call.refs)
        self.arguments = Arguments(t, call, donated)
        packing = self.arguments.packing
        self.can_fail = can_fail(t.closed) if written else calls_host(t.closed)
        of_operands = packing.per_operand([None] * len(packing.bases), written)
        self.copied = self._copied(of_operands) if self.can_fail else []
        self.is_careful = self.can_fail or not all(map(is_ours, (*written, *read)))
        of_slots = [sharding_of(r) for r in written]
        shardings = packing.per_operand([None] * len(packing.bases), of_slots)
        self.shardings = shardings if any(s is not None for s in shardings) else None
        self.is_direct = (
            options.out_shardings is None
            and all(m is None for m in t.out_leaves)
            and not any(_jax.is_key(dtype_of(a)) for a in t.out_avals)
            and _is_built_in(t.out_tree)
        )
        self.executable = Executable(
            t, name, self.arguments, call, options, self.is_direct, self.can_fail
        )
        self._is_compiled, self._compiles_once = False, not options.compiler_options

    def _copied(self, written: Sequence[RefLike | None]) -> list[int]:
        """The positions of the written buffers that a call keeps copies of; None is a pack's."""
        of_number = {n: written[k] for n, k in self.transaction.numbers.items()}
        ours = {n: ref for n, ref in of_number.items() if is_ours(ref)}
        left_out = {self.transaction.numbers[n] for n in uncopied(self.transaction.closed, ours)}
        return [k for k in range(len(written)) if k not in left_out]

    def __reduce__(self) -> Any:
        raise TypeError(
            f"cannot pickle or deepcopy what is compiled of `{self.name}`: it belongs to this "
            "process. `refs.export.export` makes bytes of a function"
        )

    def fits(self, call: Call) -> bool:
        """Whether the refs of a call have the same aliases as in this program."""
        return self.arguments.fit(call)

    def note_failure(self, error: str, written: Sequence[RefLike]) -> None:
        """Cleans up after a call that has failed, when the buffers are back in their cells."""
        # JAX would call a function whose first run failed through its slow path ever after.
        _jax.forget_fast_path(self.executable.compiled)
        for ref in written:
            if is_ours(ref):
                ref._note_loss(f" in a call of `{self.name}` that failed with {error:.200}")

    def trace(self, flat: list[Any]) -> jax.stages.Traced:
        """The compiled function's trace, as JAX gives it."""
        while True:
            state = [buffer_of(r) for r in self.arguments.written_of(flat)]
            constants = [buffer_of(r) for r in self.arguments.read_of(flat)]
            operands = self.executable.operands(flat, state, constants)
            try:
                return self.executable.compiled.trace(*operands)
            except Exception as error:  # pragma: no cover, another thread writes it meanwhile
                # JAX asks whether an array is deleted, and then for its layout. Another thread may
                # write the ref between the two.
                arrays = [x for x in (*state, *constants) if isinstance(x, jax.Array)]
                is_gone = any(x.is_deleted() for x in arrays)
                if not (_jax.is_about_deleted(error) and is_gone):
                    raise

    def compile_ahead(self, flat: list[Any]) -> None:
        """Compiles the program for a call, if that hasn't been done.

        No buffers are taken yet, because compiling takes long, and may fail.
        """
        if not self._is_compiled:
            touched = self.arguments.refs_of(flat)
            with devices_told(f"a call of `{self.name}`", touched, flat):
                lowered = self.trace(flat).lower()
            if self._compiles_once:
                lowered.compile()
            self._is_compiled = True

    def result(self, rest: Any, flat: list[Any]) -> PyTree:
        """The function's result, from the rest that the executable has returned."""
        t = self.transaction
        if self.is_direct:
            return rest
        arrays, made = rest
        dtypes = [dtype_of(a) for a in t.out_avals]
        arrays = [_jax.wrap_keys(x, d) for x, d in zip(arrays, dtypes, strict=False)]
        made = [
            adopt(_jax.wrap_keys(x, d), origin)
            for x, d, origin in zip(made, dtypes[len(arrays) :], t.new_origins, strict=True)
        ]
        arguments = [flat[k] for k in self.arguments.ref_leaves]
        return result_of(t.out_tree, t.out_leaves, arrays, arguments, made)

    @property
    def argument_types(self) -> list[Aval]:
        """The type of each leaf of the arguments."""
        avals = self.transaction.in_avals
        rest = iter(avals[len(self.arguments.ref_leaves) :])
        return [next(rest) if n is None else avals[n] for n in self.arguments.ref_places]

    @property
    def args_info(self) -> PyTree:
        """The arguments' types, and whether they are donated."""
        donated = self.arguments.donated
        types = enumerate(self.argument_types)
        return self.in_tree.unflatten(jax.stages.ArgInfo(t, k in donated) for k, t in types)

    @property
    def out_info(self) -> PyTree:
        """The result's shapes and dtypes."""
        t = self.transaction
        arrays, made = t.split_results(t.out_avals)
        return result_of(
            t.out_tree,
            t.out_leaves,
            [shape_of(a) for a in arrays],
            [shape_of(a, is_ref=True) for a in t.in_avals],
            [shape_of(a, is_ref=True) for a in made],
        )


def _is_built_in(tree: PyTreeDef) -> bool:
    """Whether a structure is made without running Python code, which could raise."""
    data = tree.node_data()
    if data is not None and data[0] not in (list, tuple, dict, type(None)):
        return False
    return all(map(_is_built_in, tree.children()))
