"""A program: a function over refs, traced and compiled for calls that are alike."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from refs import _jax
from refs._buffers.devices import devices_told
from refs._buffers.operations import buffer_of
from refs._buffers.signals import without_interrupts
from refs._buffers.stores import store_of
from refs._callbacks.analysis import calls_host, uncopied
from refs._handles.access import check_ref
from refs._handles.making import adopt
from refs._handles.predicates import is_ref
from refs._inplace import run_in_place
from refs._jit.operands import Operands
from refs._jit.staged import Staged
from refs._tracing.facts import can_fail
from refs._tracing.trace import Call, ref_type, result_of
from refs._transactions.signature import (
    Static,
    dtype_of,
    shape_of,
    shardings_of_arguments,
    shardings_of_result,
    type_of,
)
from refs._transactions.transaction import of_leaves
from refs._types import Aval, ClosedJaxpr, PyTree, PyTreeDef, RefLike, Value


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
    """A compiled function was called with types that its program has no form for."""


# The result of a call that a program isn't for, or that must be retried.
MISS: Any = object()


class _OfThread(threading.local):
    """What JAX's Python code asks in this thread.

    Attributes:
      before: what calls do before that code runs their programs, the outermost call first.
      offered: the form of the types that a program is being traced for.
    """

    def __init__(self) -> None:
        self.before: list[Callable[[], None]] = []
        self.offered: Staged | None = None


of_thread = _OfThread()


def _before_python() -> None:
    of_thread.before[-1]()


class Program:
    """A function over refs, compiled for arguments of one structure, whose refs have equal roles.

    JAX's jit tells the types of the arguments apart: for each there is a form.

    Attributes:
      name: that of the user's function.
      static: the static arguments.
      in_tree, out_tree, out_leaves: the structures of the arguments and of the result, and what the
        leaves of that are.
      operands: which buffers and arrays of a call the program takes.
      n_written: the number of buffers in the state.
      numbers: which of these a ref's value is, by the number that callbacks know it by.
      forms: the traced function, by the kinds of the arguments.
      types: what `types_of` gives for the calls that there are forms for.
      can_fail: whether the program can fail while it runs, and values would be lost then; if it
        writes no refs, whether it calls a callback.
      copied: positions of the written buffers that a call keeps copies of, if it can fail.
      is_careful: whether each call is a careful one: it can fail, or touches a ref of JAX's own.
      is_direct: whether the rest that the executable returns is the function's result as it is.
      compiled: the function under `jax.jit`, `(state, constants, undonated, donated) -> (new state,
        rest)`: state comes first, since XLA gives an alias to the first output that fits. PRNG keys
        go in and out as bits. If JAX's Python code is to run it, signals wait; or, if it can fail,
        the last one of `of_thread.before` is called: callbacks are to be interruptible.
      compiled_undonated: the same, donating nothing: while JAX looks for NaNs, it runs a program
        that has made some a second time.
      call: `call(program, flat, args, kwargs)`, its quick call, or MISS; see `running.py`.
    """

    is_plain = False
    call: Callable[..., Any]

    def __init__(
        self,
        t: Staged,
        name: str,
        static: Static | None,
        donated: Sequence[bool],
        options: Options,
        call: Call,
    ):
        self.name, self.static, self.in_tree = name, static, call.tree
        self.out_tree, self.out_leaves = t.out_tree, t.out_leaves
        self.operands = Operands(t, call, donated)
        self.n_written, self.numbers = t.n_new, t.numbers
        self.forms: dict[Any, Staged] = {}
        self.types: set[tuple[Any, ...]] = set()
        written, read = t.refs(t.written, call.refs), t.refs(t.read, call.refs)
        self.can_fail = can_fail(t.closed) if written else calls_host(t.closed)
        self.copied = _copied(t, written) if self.can_fail else []
        self.is_careful = self.can_fail or not all(
            store_of(ref).may_donate for ref in (*written, *read)
        )
        self.is_direct = (
            options.out_shardings is None
            and all(m is None for m in t.out_leaves)
            and not any(_jax.is_key(dtype_of(a)) for a in t.out_avals)
            and _is_built_in(t.out_tree)
        )
        self._facts = _facts(t, self.operands, self.copied)
        self._traced: list[tuple[Any, ClosedJaxpr]] = []
        self._compiled: set[Any] = set()
        self._compiles_once = not options.compiler_options
        pure = _pure(t, name, self.operands, self._traced, self.is_direct)
        keywords = {
            "device": options.device,
            "backend": options.backend,
            "compiler_options": options.compiler_options,
            "keep_unused": True,
            **_shardings(t, self.operands, call, options),
        }
        # This is for `refs.jit`. Kernels of eager operations donate their buffer
        # (`_buffers.kernels`), loops at top level theirs (`_transactions.calls`), and callbacks
        # there (`_callbacks.eager`).
        compiled = jax.jit(pure, donate_argnums=self.operands.donated, **keywords)
        self.compiled_undonated = jax.jit(pure, **keywords)
        self.compiled: Any = (
            _jax.before_python(compiled, _before_python)
            if self.can_fail
            else without_interrupts(compiled)
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            f"cannot pickle or deepcopy what is compiled of `{self.name}`: it belongs to this "
            "process. `refs.export.export` makes bytes of a function"
        )

    def knows(self, kinds: Any, call: Call) -> bool:
        """Whether it has a form for a call with arguments of these kinds."""
        return kinds in self.forms and self.operands.fit(call)

    def takes(self, t: Staged, call: Call, donated: Sequence[bool]) -> bool:
        """Whether a function that was traced for other types can be a form of it."""
        if any(m is not None for m in (*t.out_leaves, *self.out_leaves)):  # Refs are returned.
            return False
        written = t.refs(t.written, call.refs)
        fails = can_fail(t.closed) if written else calls_host(t.closed)
        if fails != self.can_fail or self.is_careful:
            return False
        return _facts(t, Operands(t, call, donated), []) == self._facts

    def add(self, kinds: Any, t: Staged, flat: list[Any]) -> None:
        """Adds a form, for calls with leaves like these."""
        self.forms[kinds] = t
        self.types.add(self.types_of(flat))

    def compile_ahead(self, kinds: Any, flat: list[Any]) -> None:
        """Compiles a form, if that hasn't been done.

        No buffers are taken yet, because compiling takes long, and may fail.
        """
        if kinds not in self._compiled:
            touched = self.operands.refs_of(flat)
            for ref in touched:
                check_ref(ref, "call")  # those closed over, too
            with devices_told(f"a call of `{self.name}`", touched, flat):
                lowered = self.trace(kinds, flat).lower()
            if self._compiles_once:
                lowered.compile()
            self._compiled.add(kinds)

    def types_of(self, flat: list[Any]) -> tuple[Any, ...]:
        """The types of the arrays of a call, and the context that it runs in."""
        return (_jax.trace_context(), *[type_of(flat[k]) for k in self.operands.arrays])

    def trace(self, kinds: Any, flat: list[Any]) -> jax.stages.Traced:
        """The trace of a form, as JAX gives it."""
        of_thread.offered = self.forms[kinds]
        try:
            return self._trace(flat)
        finally:
            of_thread.offered = None

    def _trace(self, flat: list[Any]) -> jax.stages.Traced:
        while True:
            state = [buffer_of(r) for r in self.operands.written_of(flat)]
            constants = [buffer_of(r) for r in self.operands.read_of(flat)]
            operands = self.operands.of(flat, state, constants)
            try:
                return self.compiled.trace(*operands)
            except Exception as error:  # pragma: no cover, another thread writes it meanwhile
                # JAX asks whether an array is deleted, and then for its layout. Another thread may
                # write the ref between the two.
                arrays = [x for x in (*state, *constants) if isinstance(x, jax.Array)]
                is_gone = any(x.is_deleted() for x in arrays)
                if not (_jax.is_about_deleted(error) and is_gone):
                    raise

    def note_failure(self, error: str, written: Sequence[RefLike]) -> None:
        """Cleans up after a call that has failed, when the buffers are back in their cells."""
        self.forget_fast_path()
        for ref in written:
            store_of(ref).note_loss(f" in a call of `{self.name}` that failed with {error:.200}")

    def forget_fast_path(self) -> None:
        """Makes JAX look its programs up once more.

        It would call one whose first call failed through its slow path ever after.
        """
        _jax.forget_fast_path(self.compiled)

    def result(self, rest: Any, flat: list[Any]) -> PyTree:
        """The function's result, from the rest that the compiled function has returned."""
        if self.is_direct:
            return rest
        t = next(iter(self.forms.values()))  # All have the same dtypes of keys, and origins.
        arrays, made = rest
        dtypes = [dtype_of(a) for a in t.out_avals]
        arrays = [_jax.wrap_keys(x, d) for x, d in zip(arrays, dtypes, strict=False)]
        made = [
            adopt(_jax.wrap_keys(x, d), origin)
            for x, d, origin in zip(made, dtypes[len(arrays) :], t.new_origins, strict=True)
        ]
        arguments = [flat[k] for k in self.operands.ref_leaves]
        return result_of(t.out_tree, t.out_leaves, arrays, arguments, made)


class Description:
    """A form of a program, as stages and reports tell of it.

    Attributes:
      argument_types: the type of each leaf of the arguments.
      args_info: the arguments' types, and whether they are donated.
      out_info: the result's shapes and dtypes.
    """

    def __init__(self, program: Program, t: Staged):
        rest = iter(t.in_avals[len(program.operands.ref_leaves) :])
        self.argument_types: list[Aval] = [
            next(rest) if n is None else t.in_avals[n] for n in program.operands.ref_places
        ]
        is_donated = program.operands.is_donated
        types = enumerate(self.argument_types)
        self.args_info = program.in_tree.unflatten(
            jax.stages.ArgInfo(kind, is_donated(k)) for k, kind in types
        )
        arrays, made = t.split_results(t.out_avals)
        self.out_info = result_of(
            t.out_tree,
            t.out_leaves,
            [shape_of(a) for a in arrays],
            [shape_of(a, is_ref=True) for a in t.in_avals],
            [shape_of(a, is_ref=True) for a in made],
        )


def kind_of(leaf: Any) -> Any:
    """What a form is for: the type of a leaf, and where a ref lies.

    Raises:
      TypeError, OverflowError: if the leaf is no array and no ref.
    """
    return (ref_type(leaf), store_of(leaf).layout) if is_ref(leaf) else type_of(leaf)


def kinds_of(flat: Sequence[Any]) -> Any:
    """What a form for a call with these leaves is known by.

    Raises:
      TypeError, OverflowError: as `kind_of`.
    """
    return (_jax.trace_context(), *map(kind_of, flat))


def is_like(leaf: Any, aval: Aval) -> bool:
    """Whether a leaf has the shape and dtype, or is such a ref, that a form is for."""
    if is_ref(leaf):
        return ref_type(leaf) == aval
    kind = type_of(leaf)
    if dtype_of(kind) is None or _jax.is_ref_type(aval):
        return kind == aval
    return (kind.shape, kind.dtype) == (aval.shape, dtype_of(aval))


def _pure(
    t: Staged,
    name: str,
    operands: Operands,
    traced: list[tuple[Any, ClosedJaxpr]],
    is_direct: bool,
) -> Callable[..., Any]:
    """The function that is compiled. It doesn't hold the program: that would keep refs alive."""
    order = {k: j for j, k in enumerate(operands.arrays)}
    in_order = [order[k] for k in sorted(order)]
    is_read, n_new, out_tree, split_results = operands.is_read, t.n_new, t.out_tree, t.split_results

    def pure(state: Sequence[Value], *groups: Sequence[Value]) -> tuple[list[Value], PyTree]:
        constants, arrays = (groups[0], groups[1:]) if is_read else ((), groups)
        flat, tree = jax.tree.flatten((state, *groups))
        # The value of one of JAX's own handles may be weakly typed now, and strongly later.
        n = len(state) + len(constants)
        strong = [_jax.type_in_jit(x)._replace(weak_type=None) for x in flat[:n]]
        types = (tree, strong, [*map(_jax.type_in_jit, flat[n:])], _jax.context_in_jit())
        closed = next((closed for known, closed in traced if known == types), None)
        if closed is None and of_thread.offered is not None:
            closed = of_thread.offered.closed
            traced.append((types, closed))
        if closed is None or _jax.is_jit_disabled():
            raise TypesDiffer
        given = [x for group in arrays for x in group]
        out = run_in_place(closed, [*state, *constants, *(given[k] for k in in_order)])
        new, rest = out[:n_new], out[n_new:]
        return new, out_tree.unflatten(rest) if is_direct else split_results(rest)

    pure.__name__ = pure.__qualname__ = name
    return pure


def _facts(t: Staged, operands: Operands, copied: Sequence[int]) -> Any:
    """What the forms of a program have in common."""
    slots = [[(s.argument, s.outer) for s in some] for some in (t.written, t.read)]
    keys = [d if _jax.is_key(d) else None for d in map(dtype_of, t.out_avals)]
    return t.out_tree, operands.facts(), slots, t.n_new, t.packing.facts(), keys, [*copied]


def _copied(t: Staged, written: Sequence[RefLike]) -> list[int]:
    """The positions of the written buffers that a call keeps copies of."""
    of_operands = t.packing.per_operand([None] * len(t.packing.bases), written)
    of_number = {n: of_operands[k] for n, k in t.numbers.items()}
    ours = {n: r for n, r in of_number.items() if r is not None and store_of(r).may_donate}
    left_out = {t.numbers[n] for n in uncopied(t.closed, ours)}
    return [k for k in range(len(of_operands)) if k not in left_out]


def _shardings(t: Staged, operands: Operands, call: Call, options: Options) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if options.in_shardings is not None:
        flat = shardings_of_arguments(options.in_shardings, call.tree)
        if operands.arrays:
            groups = [pick(flat) for pick in operands.arrays_of]
            found["in_shardings"] = (None, *[None] * operands.is_read, *groups)
    of_slots = [store_of(r).sharding for r in t.refs(t.written, call.refs)]
    state = t.packing.per_operand([None] * len(t.packing.bases), of_slots)
    shardings = state if any(s is not None for s in state) else None
    if options.out_shardings is not None:
        flat = shardings_of_result(options.out_shardings, t.out_tree)
        found["out_shardings"] = (shardings, of_leaves(flat, t.out_leaves))
    elif shardings is not None:
        found["out_shardings"] = (shardings, None)
    return found


def _is_built_in(tree: PyTreeDef) -> bool:
    """Whether a structure is made without running Python code, which could raise."""
    data = tree.node_data()
    if data is not None and data[0] not in (list, tuple, dict, type(None)):
        return False
    return all(map(_is_built_in, tree.children()))
