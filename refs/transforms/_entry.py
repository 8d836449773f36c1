"""One traced and compiled form of a function, and what a call of it takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import jax

from refs import _jax
from refs._access import check_ref
from refs._buffers.handles import buffer_of, is_ours, sharding_of
from refs._ref import Ref
from refs._tracing import Call, adopt, ref_type, result_of
from refs.callbacks._held import calls_host, uncopied
from refs.transforms._devices import devices_told
from refs.transforms._signature import (
    Static,
    dtype_of,
    shape_of,
    shardings_of_arguments,
    shardings_of_result,
)
from refs.transforms._transaction import Transaction, links_of
from refs.transforms.in_place import call_in_place


class Options(NamedTuple):
    """The keywords of `refs.jit`, those that choose arguments apart."""

    in_shardings: Any
    out_shardings: Any
    keep_unused: bool
    device: Any
    backend: str | None
    inline: Any
    compiler_options: dict[str, Any] | None


class OtherTypes(Exception):
    """A compiled function was called with types that its program wasn't traced for."""


class OtherRefs(Exception):
    """A call's refs are other ones, of one another or of those closed over, than in a program."""


class Entry:
    """One traced and compiled form of a function.

    Its compiled function takes `(state, constants, kept, donated)`, lists of arrays: what the
    written refs hold, what those only read hold, and the other arguments. It returns `(new state,
    rest)`: state comes first, since XLA gives an alias to the first output that fits. Arrays of
    PRNG keys go in and out as bits.

    Attributes:
      is_plain: whether it is none, but a `Plain`.
      transaction, name: the traced function.
      is_bare: whether the arguments are just the refs that are written, each once: then the
        compiled function takes the state only.
      shardings: those of the written refs, None if all are on a single device.
      can_fail: whether the program can fail while it runs, and something would be lost then.
      copied: which of the written refs a call keeps copies of, if it can fail.
      is_careful: whether each call is a careful one: it can fail, or touches a handle of JAX's.
      is_direct: whether `rest` is the function's result as it stands.
      is_alone: whether the function has no other. `flatten` says so if the structure is another
        one, but takes its time: it prints the arguments.
      reads: whether there are refs that a call only reads; `read_of` gives them.
      flatten: gives the leaves of arguments of this structure, or raises ValueError.
      written_of: gives the refs that a call with these leaves writes. Raises OtherRefs where refs
        are not the same ones, of one another and of those closed over, as in this program.
      call: `call(entry, flat, args, kwargs)` calls it, with arguments that have the structure of
        those that it is for; see `_ways`.
      run: the same, with arguments that it is known to be for.
    """

    call: Callable[..., Any]
    run: Callable[..., Any]

    is_plain = False

    def __init__(
        self,
        transaction: Transaction,
        name: str,
        static: Static | None,
        donated: Sequence[bool],
        options: Options,
        call: Call,
    ):
        self.transaction, self.name = transaction, name
        self.static, self.is_alone = static, True
        self.ref_places, self.in_tree = call.ref_places, call.tree
        t, self.out_tree = transaction, transaction.traced.out_tree
        for ref in t.program.refs:
            check_ref(ref, "call")
        self.effectful_jaxpr, self.flatten = t.traced.jaxpr, call.tree.flatten_up_to
        self._place(call, donated)
        written, read = t.refs(t.written, call.refs), t.refs(t.read, call.refs)
        self.can_fail = _jax.can_fail(t.traced.jaxpr) if written else calls_host(t.traced.jaxpr)
        self.copied = self._copied(written) if self.can_fail else []
        self.is_careful = self.can_fail or not all(map(is_ours, (*written, *read)))
        shardings = [sharding_of(r) for r in written]
        self.shardings = shardings if any(s is not None for s in shardings) else None
        self.is_direct = (
            options.out_shardings is None
            and all(m is None for m in t.traced.out_leaves)
            and not any(_jax.is_key(dtype_of(a)) for a in t.traced.jaxpr.out_avals)
            and _is_built_in(t.traced.out_tree)
        )
        self._dtypes = {s: ref_type(r).dtype for s, r in self._slots(call.refs)}
        self._compile(options, call)
        self._is_compiled, self._compiles_once = False, not options.compiler_options

    def _place(self, call: Call, donated: Sequence[bool]) -> None:
        """Finds out where among the leaves of a call everything stands."""
        t = self.transaction
        place: dict[int, int] = {}  # of each distinct ref argument: where it stands first
        for k, number in enumerate(call.ref_places):
            if number is not None:
                place.setdefault(number, k)
        self._first_places = [place[i] for i in range(len(place))]
        repeated = [
            (k, place[number])
            for k, number in enumerate(call.ref_places)
            if number is not None and k != place[number]
        ]
        linked = [(place[i], k) for i, k in enumerate(t.links) if k is not None]
        touched = {s.argument for s in (*t.written, *t.read)}
        idle = [(place[i], ref_type(r)) for i, r in enumerate(call.refs) if i not in touched]
        self.written_of = self._picker_of_refs(t.written)
        if repeated or linked or idle:
            pick, outers = self.written_of, t.program.refs

            def checked(flat: list[Any]) -> Any:
                if (
                    all(flat[i] is flat[j] for i, j in repeated)
                    and all(flat[i] is outers[k] for i, k in linked)
                    and all(_is_like(flat[i], kind) for i, kind in idle)
                ):
                    return pick(flat)
                raise OtherRefs

            self.written_of = checked
        self.read_of, self.reads = self._picker_of_refs(t.read), bool(t.read)
        arrays = [k for k, number in enumerate(call.ref_places) if number is None]
        self._kept = [k for k in arrays if not donated[k]]
        self._donated = [k for k in arrays if donated[k]]
        self.kept_of, self.donated_of = picker(self._kept), picker(self._donated)
        self.is_bare = not (repeated or linked or idle or arrays or t.read) and [
            s.argument for s in t.written
        ] == [*range(len(call.ref_places))]

    def _picker_of_refs(self, slots: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """A function from the leaves of a call to the refs that slots stand for: a sequence."""
        outers = [self.transaction.program.refs[s.outer] for s in slots if s.argument is None]
        places = [self._first_places[s.argument] for s in slots if s.argument is not None]
        if not places:
            return lambda flat: outers
        pick = picker(places)
        return (lambda flat: [*pick(flat), *outers]) if outers else pick

    def _slots(self, arguments: Sequence[Any]) -> list[tuple[Any, Any]]:
        t = self.transaction
        slots = [*t.written, *t.read]
        return list(zip(slots, t.refs(slots, arguments), strict=True))

    def _copied(self, written: Sequence[Any]) -> list[int]:
        t = self.transaction
        inputs = t.traced.jaxpr.jaxpr.invars
        keys = [
            id(ref) if s.argument is None else inputs[s.argument]
            for s, ref in zip(t.written, written, strict=True)
        ]
        refs = dict(zip(keys, written, strict=True)) if all(map(is_ours, written)) else {}
        left_out = uncopied(t.traced.jaxpr, refs)
        return [k for k, key in enumerate(keys) if key not in left_out]

    # -- the compiled function ------------------------------------------------------------------

    def _compile(self, options: Options, call: Call) -> None:
        # What is compiled doesn't hold the entry: that holds it, and with it the refs.
        t, dtypes, is_direct = self.transaction, self._dtypes, self.is_direct
        expected: list[Any] = []
        order = {k: j for j, k in enumerate([*self._kept, *self._donated])}
        arrays = sorted(order)

        def pure(state: Any, constants: Any = (), kept: Any = (), donated: Any = ()) -> Any:
            flat, tree = jax.tree.flatten((state, constants, kept, donated))
            # What a ref holds may be weakly typed, in JAX's own handles, and strongly later.
            n = len(state) + len(constants)
            strong = [_jax.type_in_jit(x)._replace(weak_type=None) for x in flat[:n]]
            types = (tree, strong, [*map(_jax.type_in_jit, flat[n:])], _jax.context_in_jit())
            if not expected:
                expected.append(types)
            if expected[0] != types or _jax.is_jit_disabled():
                raise OtherTypes
            given = [*kept, *donated]
            leaves = [given[order[k]] for k in arrays]
            return call_in_place(run, state, constants, leaves)

        def run(state: Any, constants: Any, leaves: Any) -> Any:
            state = [_jax.wrap_keys(x, dtypes[s]) for x, s in zip(state, t.written, strict=True)]
            constants = [
                _jax.wrap_keys(x, dtypes[s]) for x, s in zip(constants, t.read, strict=True)
            ]
            state, rest = t.run(state, constants, leaves, is_program=True)
            if is_direct:
                return list(map(_jax.unwrap_keys, state)), t.traced.out_tree.unflatten(rest[0])
            return jax.tree.map(_jax.unwrap_keys, (state, rest))

        pure.__name__ = pure.__qualname__ = self.name
        keywords = {
            "device": options.device,
            "backend": options.backend,
            "compiler_options": options.compiler_options,
            **self._shardings(options, call),
        }
        donated = 0 if self.is_bare else (0, 3)
        self.compiled = jax.jit(pure, donate_argnums=donated, keep_unused=True, **keywords)
        # Donating nothing, for debugging: JAX then runs the program a second time.
        self.compiled_kept = jax.jit(pure, keep_unused=True, **keywords)

    def _shardings(self, options: Options, call: Call) -> dict[str, Any]:
        t = self.transaction
        found: dict[str, Any] = {}
        if options.in_shardings is not None:
            flat = shardings_of_arguments(options.in_shardings, call.tree)
            if not self.is_bare:
                found["in_shardings"] = (None, None, self.kept_of(flat), self.donated_of(flat))
        state = [sharding_of(r) for r in t.refs(t.written, call.refs)]
        shardings = state if any(s is not None for s in state) else None
        if options.out_shardings is not None:
            flat = shardings_of_result(options.out_shardings, self.out_tree)
            found["out_shardings"] = (shardings, t.of_leaves(flat))
        elif shardings is not None:
            found["out_shardings"] = (shardings, None)
        return found

    # -- a call ---------------------------------------------------------------------------------

    def refs_of(self, flat: list[Any]) -> list[Any]:
        """The refs that a call with these leaves touches."""
        return [*self.written_of(flat), *self.read_of(flat)]

    def fits(self, call: Call) -> bool:
        """Whether refs of a call are the same ones, of one another and of those closed over."""
        t = self.transaction
        return self.ref_places == call.ref_places and t.links == links_of(call.refs, t.program.refs)

    def check_known(self, flat: list[Any]) -> None:
        """That a careful call's refs are such as this entry is for, by all but their types.

        Those the compiled function compares; but one ref in two places it would be donated twice.
        Handles of JAX's own are left to `Programs.settle`.

        Raises:
          OtherRefs: if they are not.
        """
        refs = self.refs_of(flat)
        if len({*map(id, refs)}) < len(refs) or not all(
            type(r) is Ref and r._end is None and r._sharding is None for r in refs
        ):
            raise OtherRefs

    def note_failure(self, error: str, written: Sequence[Any]) -> None:
        """What is to be done when a call has failed, all of its refs being back."""
        # JAX would call a function that has failed at its first run the slow way ever after.
        _jax.forget_fast_path(self.compiled)
        for ref in written:
            if is_ours(ref):
                ref._note_loss(f" in a call of `{self.name}` that failed with {error:.200}")

    def operands(self, flat: list[Any], state: list[Any], constants: list[Any]) -> tuple[Any, ...]:
        """What the compiled function takes, for a call with these leaves."""
        if self.is_bare:
            return (state,)
        return state, constants if self.reads else (), self.kept_of(flat), self.donated_of(flat)

    def trace(self, flat: list[Any]) -> Any:
        """The compiled function's trace, as JAX gives it."""
        state = [buffer_of(r) for r in self.written_of(flat)]
        constants = [buffer_of(r) for r in self.read_of(flat)]
        return self.compiled.trace(*self.operands(flat, state, constants))

    def compile_ahead(self, flat: list[Any]) -> None:
        """Compiles it for a call, if it isn't: while all refs still hold what they hold.

        For it takes long, and may fail.
        """
        if not self._is_compiled:
            touched = [*self.written_of(flat), *self.read_of(flat)]
            with devices_told(f"a call of `{self.name}`", touched):
                lowered = self.trace(flat).lower()
            if self._compiles_once:
                lowered.compile()
            self._is_compiled = True

    def result(self, rest: Any, flat: list[Any]) -> Any:
        """The function's result."""
        t = self.transaction
        if self.is_direct:
            return rest
        arrays, made = rest
        dtypes = [dtype_of(a) for a in t.traced.jaxpr.out_avals]
        arrays = [_jax.wrap_keys(x, d) for x, d in zip(arrays, dtypes, strict=False)]
        made = [
            adopt(_jax.wrap_keys(x, d), origin)
            for x, d, origin in zip(made, dtypes[len(arrays) :], t.new_origins, strict=True)
        ]
        arguments = [flat[k] for k in self._first_places]
        return result_of(t.traced.out_tree, t.traced.out_leaves, arrays, arguments, made)

    @property
    def args_info(self) -> Any:
        """The arguments' types, and whether they are donated."""
        avals = self.transaction.traced.jaxpr.in_avals
        rest = iter(avals[len(self._first_places) :])
        infos = [
            jax.stages.ArgInfo(next(rest) if number is None else avals[number], k in self._donated)
            for k, number in enumerate(self.ref_places)
        ]
        return self.in_tree.unflatten(infos)

    @property
    def out_info(self) -> Any:
        """The result's shapes and dtypes."""
        t = self.transaction
        avals = t.traced.jaxpr.out_avals
        n_arrays = len(avals) - len(t.new_origins)
        inputs = t.traced.jaxpr.in_avals
        return result_of(
            t.traced.out_tree,
            t.traced.out_leaves,
            [shape_of(a) for a in avals[:n_arrays]],
            [shape_of(a, is_ref=True) for a in inputs],
            [shape_of(a, is_ref=True) for a in avals[n_arrays:]],
        )


def picker(places: Sequence[int]) -> Callable[[Any], Any]:
    """A function that picks what stands at these places of a list: a list or a tuple."""
    places = list(places)
    if not places:
        return lambda flat: ()
    if places == list(range(places[0], places[-1] + 1)):
        return itemgetter(slice(places[0], places[-1] + 1))
    return itemgetter(*places)


def _is_like(x: Any, kind: Any) -> bool:
    """Whether something is a ref of ours of this type, that has not ended."""
    return isinstance(x, Ref) and x._aval == kind and x._end is None


def _is_built_in(tree: Any) -> bool:
    """Whether a structure is made without running Python code, which could raise."""
    data = tree.node_data()
    if data is not None and data[0] not in (list, tuple, dict, type(None)):
        return False
    return all(map(_is_built_in, tree.children()))
