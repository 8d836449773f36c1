"""A function over refs, discharged while it is traced: the front end of `refs.jit`.

The function runs once, in a trace that lies over JAX's own. A ref becomes an input of the jaxpr
under construction when it is first touched, whether it is an argument or closed over; operations on
arrays are JAX's. What has been written is known when the function has ended: then the inputs and
outputs are put in order, and the jaxpr is pure.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from refs import _jax
from refs._buffers.stores import store_of
from refs._discharge.op_by_op import OpByOp
from refs._discharge.ref_tracer import RefTracer
from refs._handles import access
from refs._jit.packing import Packing, holder_of
from refs._origin import Origin, origin_of
from refs._tracing.discharged import to_be_discharged
from refs._tracing.names import Names
from refs._tracing.trace import (
    ArgumentRef,
    Call,
    NewRef,
    OuterRef,
    advised,
    flatten_result,
    new_origins,
    ref_type,
    strip_refs,
)
from refs._transactions.signature import Static
from refs._transactions.transaction import Slot
from refs._types import Aval, ClosedJaxpr, PyTreeDef, RefLike, Value


class Staging(OpByOp):
    """The trace that a function which is to be compiled runs in.

    Attributes:
      arguments: for each of the refs that the function is given, what it gets.
    """

    def __init__(self, refs: Sequence[RefLike]):
        parent = _jax.current_trace()
        super().__init__(parent, parent)
        self._refs = refs
        self.arguments = [RefTracer(self, ref_type(ref), None, ref) for ref in refs]
        # A function may close over a ref that it is given, too.
        self._names = Names()
        self._names.other.update(zip(map(id, refs), self.arguments, strict=True))
        self._inputs: dict[int, tuple[RefLike, Value]] = {}  # by the id of what holds the value

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A context in which the function runs."""
        # With jit disabled, JAX's loops first evaluate their predicates, which fails on tracers,
        # and then trace them after all: what a predicate writes would be written twice.
        with (
            jax.disable_jit(False),
            to_be_discharged(),
            self._names.known(),
            _jax.set_current_trace(self),
        ):
            yield

    @property
    def is_touched(self) -> bool:
        """Whether the function has touched a ref from outside."""
        return bool(self._opened)

    def _cell_of(self, ref: RefLike) -> Any:
        if isinstance(ref, RefTracer) and ref.given is not None and self.has_made(ref):
            return self._outer_cell(ref.given)
        return super()._cell_of(ref)

    def open(self, ref: RefLike, value: Value) -> None:
        super().open(ref, value)
        self._opened[id(ref)].cell.number = len(self._opened) - 1

    def read(self, ref: RefLike) -> Value:
        """The value of a ref before the function: an input."""
        with _jax.set_current_trace(_jax.eval_trace):
            access.check_ref(ref, "use")
        holder = holder_of(ref)
        if id(holder) not in self._inputs:
            alias = self._names.other.get(id(ref))
            name = access.describe(ref) if alias is None else alias.argument
            aval = _buffer_type(holder)
            self._inputs[id(holder)] = holder, _jax.new_input(self.parent, aval, name)
        _, buffer = self._inputs[id(holder)]
        with _jax.set_current_trace(self.parent):
            store = store_of(ref)
            return store.lens.get(buffer, store.start)

    def finish(
        self, leaves: Sequence[Any], tree: PyTreeDef, leaf_of: dict[int, int]
    ) -> tuple[list[Value], Callable[[ClosedJaxpr], Staged]]:
        """The outputs, and what makes the pure function of the jaxpr.

        Args:
          leaves: those of the function's result.
          tree: its structure.
          leaf_of: the id of each ref among the arguments -> the position of its first leaf.
        """
        with _jax.set_current_trace(self):
            arrays, markers, made = strip_refs(leaves, self.arguments)
        with _jax.set_current_trace(self.parent):
            results = [_jax.output(x) for x in (*arrays, *made)]
            touched = self._in_order()
            written = [x for x in touched if x.cell.read() is not x.before]
            read = [x.ref for x in touched if x.cell.read() is x.before]
            packing = Packing([x.ref for x in written], read, leaf_of)
            holders = [self._inputs[id(h)] for h in packing.holders]
            packing.holders = []  # A program holds no refs but those that its function closes over.
            new = packing.joined([x for _, x in holders], [x.cell.read() for x in written])
            outputs = [*new, *map(_jax.unwrap_keys, results)]
        order = [*self._inputs]
        places = [order.index(id(h)) for h, _ in holders]
        facts: dict[str, Any] = {
            "packing": packing,
            "refs": self._refs,
            "linked": self._names.used,
            "written": [(x.ref, x.cell.number) for x in written],
            "read": read,
            "out_tree": tree,
            "out_leaves": tuple(markers),
            "out_avals": [*map(jax.typeof, results)],
        }
        self.end()
        return outputs, functools.partial(Staged, places=places, n_new=len(new), **facts)

    def end(self) -> None:
        super().end()
        for tracer in self.arguments:
            tracer.given = None
        self._refs, self.arguments = (), []
        self._inputs.clear()
        self._names.other.clear()

    def _in_order(self) -> list[Any]:
        """The touched refs: the arguments in their order, then the others as they were touched."""
        given = [self._opened[id(ref)] for ref in self._refs if id(ref) in self._opened]
        ids = {id(x.ref) for x in given}
        return [*given, *(x for x in self._opened.values() if id(x.ref) not in ids)]


class Staged:
    """A function over refs as a pure jaxpr.

    Attributes:
      closed: the jaxpr. It takes the buffers that are written, those that are only read, and the
        other leaves of the arguments; it returns the new buffers, and then the results, arrays
        first: bits where these are PRNG keys.
      n_new: the number of buffers that are written.
      in_avals: the types of the ref arguments and of the other leaves.
      out_avals: the types of the results.
      out_tree, out_leaves: the structure of the function's result, and what its leaves are.
      outers: the refs that it closes over, distinct.
      links: for each ref argument: which closed-over ref it is, or None.
      written, read: the slots that the function writes, and those that it only reads.
      packing: where their values are among the buffers.
      numbers: which written buffer a ref's value is, by the number that callbacks know it by.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        n_leaves: int,
        *,
        packing: Packing,
        places: Sequence[int],
        n_new: int,
        refs: Sequence[RefLike],
        linked: set[int],
        written: Sequence[tuple[RefLike, int]],
        read: Sequence[RefLike],
        out_tree: PyTreeDef,
        out_leaves: Sequence[ArgumentRef | OuterRef | NewRef | None],
        out_avals: Sequence[Aval],
    ):
        invars = closed.jaxpr.invars
        leaves, buffers = invars[: len(invars) - len(places)], invars[len(invars) - len(places) :]
        if len(leaves) != n_leaves:  # pragma: no cover, JAX before 0.12
            raise jax.errors.UnexpectedTracerError(
                "a value of a differentiated function is used where its trace has ended: a rule of "
                "a custom function closes over it. Pass it to the function as an argument"
            )
        ordered = [*(buffers[k] for k in places), *leaves]
        self.closed = _jax.with_inputs(closed, ordered)
        self.n_new, self.packing = n_new, packing
        self.in_avals = [*map(ref_type, refs), *(v.aval for v in leaves)]
        self.out_avals, self.out_tree, self.out_leaves = out_avals, out_tree, out_leaves
        argument_of = {id(ref): k for k, ref in enumerate(refs)}
        touched = [*(ref for ref, _ in written), *read]
        self.outers = [ref for ref in touched if id(ref) not in argument_of]
        self.outers += [ref for ref in refs if id(ref) in linked]
        outer_of = {id(ref): k for k, ref in enumerate(self.outers)}
        self.links = tuple(outer_of.get(id(ref)) for ref in refs)

        def slot(ref: RefLike) -> Slot:
            origin = origin_of(jax.typeof(ref))
            return Slot(argument_of.get(id(ref)), outer_of.get(id(ref)), origin)

        self.written, self.read = [slot(ref) for ref, _ in written], [*map(slot, read)]
        numbers = zip((n for _, n in written), packing.numbers, strict=True)
        self.numbers = {n: k for n, k in numbers if k is not None}

    def refs(self, slots: Sequence[Slot], arguments: Sequence[RefLike]) -> list[RefLike]:
        """The refs that slots stand for in a call."""
        return [s.ref(arguments, self.outers) for s in slots]

    def split_results(self, results: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        """The results that are arrays, and the values of new refs."""
        n = len(results) - len(self.new_origins)
        return [*results[:n]], [*results[n:]]

    @property
    def new_origins(self) -> list[Origin]:
        """The origins of the refs that the function makes and returns."""
        return new_origins(self.out_leaves)

    @functools.cached_property
    def places(self) -> list[jax.sharding.Sharding]:
        """Where its `shard_map`s run."""
        return _jax.places_in(self.closed)


def _buffer_type(ref: RefLike) -> Aval:
    """The type of what is in the cell of a ref: bits, if it holds keys."""
    of_ref = ref_type(ref)
    aval: Aval = of_ref.inner_aval
    if _jax.is_key(aval.dtype):
        place = aval.sharding if _jax.is_on_explicit_mesh(ref) else None
        keys = jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=place)
        return _jax.shaped_abstractify(jax.eval_shape(_jax.unwrap_keys, keys))
    is_of_host = of_ref.memory_space == jax.memory.Space.Host
    return aval.update(memory_space=jax.memory.Space.Host) if is_of_host else aval


def staged(fun: Callable[..., Any], static: Static, call: Call, name: str) -> Staged:
    """Runs `fun` once, with arguments like those of a call.

    Raises whatever `fun` raises; no ref has changed then.
    """
    leaf_of: dict[int, int] = {}
    for k, number in enumerate(call.ref_places):
        if number is not None:
            leaf_of.setdefault(id(call.refs[number]), k)
    made: Any = None

    def flat(leaves: list[Value]) -> list[Value]:
        nonlocal made
        stage = Staging(call.refs)
        try:
            with stage.running():
                # Objects of Flax note the trace that they are made in.
                args, kwargs = static.restore(*call.rebuild(stage.arguments, leaves))
                with _jax.set_current_trace(stage.parent):
                    names = _jax.name_arguments(fun, args, kwargs, leaves)
                for ref in stage.arguments:
                    ref.argument = names.get(id(ref), "")
                out, tree = flatten_result(fun, fun(*args, **kwargs))
            outputs, made = stage.finish(out, tree, leaf_of)
        finally:
            stage.end()
        unchecked.enter_context(jax.enable_checks(False))
        return outputs

    flat.__name__ = flat.__qualname__ = name
    # JAX's checks count the names of the inputs, of which more have come than JAX knows names of.
    with contextlib.ExitStack() as unchecked:
        closed = advised(jax.make_jaxpr(flat))([*call.leaves])
    return made(closed, len(call.leaves))
