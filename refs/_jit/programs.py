"""The compiled programs of a function over refs, and the choice of the one that a call runs."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from refs import _jax
from refs._buffers.devices import devices_told
from refs._discharge.op_by_op import is_staged
from refs._handles.access import check_ref
from refs._handles.ref import Ref
from refs._handles.resharding import go_along
from refs._jit.dispatch import Methods, NoForm, dispatcher
from refs._jit.entry import Entry
from refs._jit.executable import Options
from refs._jit.inner import Inner, key_of
from refs._jit.kinds import is_like, kind_of, quick_key, shapes_of_refs
from refs._jit.plain import GetFun, Plain
from refs._jit.staged import Staged, staged
from refs._jit.stages import Lowered, Traced
from refs._jit.ways import carefully, prepare
from refs._tracing.discharged import with_lines
from refs._tracing.trace import Call, ref_type, trace
from refs._tracing.weak_memo import WeakMemo
from refs._transactions.calls import in_transaction
from refs._transactions.nested import call_inside
from refs._transactions.signature import NO_STATIC, Choice, Static, check_call
from refs._types import ClosedJaxpr, PyTreeDef, RefLike, Value
from refs.errors import RefStateError, RefTypeError

if TYPE_CHECKING:
    from refs._explain.report import Explanation


def compiled(
    fun: Callable[..., Any], static: Choice, donate: Choice, options: Options
) -> Callable[..., Any]:
    """A new function for users; as with `jax.jit`, it shares the programs of earlier ones.

    It holds the user's function and its programs. The programs don't hold the user's function,
    because they are cached for as long as it lives; nor the new function, so that all of them are
    freed at once.
    """
    is_shared = type(fun) is types.FunctionType
    get_fun: Any = weakref.ref(fun) if is_shared else lambda: fun
    key = (static, donate, options)
    try:
        known = _known.of([fun]) if is_shared else {}
        programs, shared = known.get(key) or known.setdefault(key, _made(get_fun, *key))
    except TypeError:  # Shardings in a dictionary have no hash.
        programs, shared = _made(get_fun, *key)
    call: Any = types.FunctionType(shared.__code__, shared.__globals__, closure=shared.__closure__)
    functools.update_wrapper(call, fun)
    call.__dict__ = Methods(call.__dict__)
    for name in ("trace", "lower", "eval_shape", "explain", "clear_cache", "_cache_size"):
        setattr(call, name, functools.partial(_calling, fun, getattr(programs, name)))
    return call


def _made(*given: Any) -> tuple[Programs, Any]:
    programs = Programs(*given)
    return programs, dispatcher(programs)


def _calling(_: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a method of `Programs`, and keeps the user's function alive meanwhile."""
    return method(*args, **kwargs)


_known = WeakMemo()  # a function's programs, by keywords


class Programs:
    """The compiled programs of a function over refs, one for each kind of arguments.

    `fun()` gives the user's function, or None when that is gone: callers of methods keep it alive.
    """

    def __init__(self, fun: GetFun, static: Choice, donate: Choice, options: Options):
        self._get_fun, self._static, self._donate, self._options = fun, static, donate, options
        self.has_static = bool(static.nums or static.names)
        self._entries: dict[tuple[Any, ...], list[Any]] = {}  # each item an `Entry` or a `Plain`
        # For calls in another trace, of a function that touches refs and takes none: JAX's jit of
        # the function as it is, since the other trace is to see each access.
        self._inner: dict[tuple[Any, ...], Plain] = {}
        # For calls in another trace that give refs.
        self._given_refs: dict[tuple[Any, ...], Inner | None] = {}
        # By the structure and the arrays' types only, without a look at the refs; where several
        # entries have these, by the shapes of the refs, too.
        self._quick: dict[tuple[Any, ...], Entry | Plain | dict[Any, Entry | Plain]] = {}
        self._tree: PyTreeDef | None = None  # the arguments' structure, while all entries share one
        self.forget: Callable[[], None] = lambda: None  # drops the form that the dispatcher holds
        # For a method: its compiled functions for instances that are no pytrees, by identity.
        self.instances: dict[int, Callable[..., Any]] = {}

    @property
    def _fun(self) -> Callable[..., Any]:
        return self._get_fun()

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Lowers the function for arguments like these."""
        traced = self.trace(*args, **kwargs)
        leaves = jax.tree.leaves((args, kwargs))
        given = [x for x in leaves if type(x) is Ref]
        with devices_told(f"lower of `{_jax.fun_name(self._fun)}`", given, leaves):
            return traced.lower()

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Traces and discharges the function for arguments like these."""
        if (bound := self.of_instance(args)) is not None:
            return bound.trace(*args[1:], **kwargs)  # type: ignore[attr-defined]
        static, rest_args, rest_kwargs = self.take_static(args, kwargs)
        call = Call.of(rest_args, rest_kwargs, runs=False)
        entry = self._entry(static, call)
        if _jax.is_jit_disabled() and not entry.is_plain:
            raise RefStateError(
                f"trace of `{entry.name}` under `jax.disable_jit`, where a function is run as it "
                "is: trace, lower or compile it outside"
            )
        traced = entry.trace(args, kwargs) if entry.is_plain else entry.trace(call.flat)
        has_refs = not entry.is_plain or entry.is_discharged
        effectful = functools.partial(self._effectful, static, call) if has_refs else None
        return Traced(entry, traced, self._fit, call.flat, effectful)

    def _effectful(self, static: Static | None, call: Call) -> ClosedJaxpr:
        """The function's jaxpr over refs."""

        def rebuild(refs: Sequence[RefLike], leaves: Sequence[Value]) -> Any:
            return (static or NO_STATIC).restore(*call.rebuild(refs, leaves))

        with with_lines():
            return trace(self._fun, [*map(ref_type, call.refs)], call.leaves, rebuild).jaxpr

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The result's shapes and dtypes, as `jax.ShapeDtypeStruct`s; nothing runs."""
        return self.trace(*args, **kwargs).out_info

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """What the function does to refs and to memory, for arguments like these."""
        from refs._explain.explained import explained

        traced = self.trace(*args, **kwargs)
        return explained(self._fun, traced, traced._entry, args, kwargs)

    def clear_cache(self) -> None:
        """Forgets every compiled program of this function."""
        self.forget()
        for known in (self._entries, self._inner, self._given_refs, self._quick, self.instances):
            known.clear()
        self._tree = None

    def _cache_size(self) -> int:
        return len(self._all())

    def of_instance(self, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        """The compiled method for the first argument, if that is an instance and no pytree.

        It closes over the instance weakly, and is dropped with it.
        """
        instance = args[0] if args else None
        if id(instance) in self.instances:
            return self.instances[id(instance)]
        if not jax.tree_util.all_leaves([instance]) or not any(
            inspect.unwrap(getattr(value, "fget", value)) is self._fun  # pyright: ignore
            for base in type(instance).__mro__
            for value in vars(base).values()
            if callable(value) or isinstance(value, property)
        ):
            return None
        try:
            found = weakref.ref(instance, functools.partial(_forget, self.instances, id(instance)))
        except TypeError:
            raise RefTypeError(
                f"call of the method {self._fun.__name__} on a {type(instance).__name__}, which is "
                "no pytree and can't be referred to weakly: register the class with "
                "`jax.tree_util.register_dataclass`, or give it a slot `__weakref__`"
            ) from None

        @functools.wraps(self._fun)
        def bound(*args: Any, **kwargs: Any) -> Any:
            return self._fun(found(), *args, **kwargs)

        static, donate = self._static.without_first(), self._donate.without_first()
        self.instances[id(instance)] = call = compiled(bound, static, donate, self._options)
        return call

    # -- for calls, see `dispatch.py` ------------------------------------------------------------

    def take_static(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], known: Static | None = None
    ) -> tuple[Static | None, tuple[Any, ...], dict[str, Any]]:
        """The static arguments, `known` itself if they are equal to that, and the rest."""
        if not self.has_static:
            return None, args, kwargs
        found, args, kwargs = self._static.split(args, kwargs)
        try:
            same = found == known
        except Exception:  # Arrays, for one: they have no truth value, and can't be static.
            same = False
        return known if same else found.checked(), args, kwargs

    def find(
        self, static: Static | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[Any]]:
        """The entry for arguments like those of an earlier call, or NoForm; and their leaves."""
        if (tree := self._tree) is not None:
            try:  # It takes a tenth of the time of what doesn't know the structure.
                flat = tree.flatten_up_to((args, kwargs))
            except ValueError:
                tree = None
        if tree is None:
            flat, tree = jax.tree.flatten((args, kwargs))
        try:
            found = self._quick.get(quick_key(static, tree, flat))
        except (TypeError, OverflowError):  # something that is no array
            return NoForm, flat
        if type(found) is dict:
            found = found.get(shapes_of_refs(flat))
        return found or NoForm, flat

    def find_or_make(
        self, static: Static | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[Any]]:
        """The entry for any arguments, made and compiled if need be; and their leaves."""
        call = Call.of(args, kwargs)
        entry = self._entry(static, call)
        key = quick_key(static, call.tree, call.flat)
        known = self._quick.setdefault(key, entry)
        if known is not entry:
            known = known if isinstance(known, dict) else {}
            known[shapes_of_refs(call.flat)] = entry
            self._quick[key] = known
        if entry.is_plain:
            return entry, call.flat
        for ref in entry.arguments.refs_of(call.flat):
            check_ref(ref, "call")  # those closed over, too
        entry.compile_ahead(call.flat)
        return entry, call.flat

    def call_otherwise(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call with jit disabled, inside another trace, or while JAX looks for NaNs."""
        if _jax.is_jit_disabled():
            return self._fun(*args, **kwargs)
        if (bound := self.of_instance(args)) is not None:
            return bound(*args[1:], **kwargs)
        static, rest_args, rest_kwargs = self.take_static(args, kwargs)
        call = Call.of(rest_args, rest_kwargs)
        if _jax.at_top_level():
            entry = self._entry(static, call)
            if entry.is_plain:
                return entry.run(entry, call.flat, args, kwargs)
            entry.compile_ahead(call.flat)
            return carefully(entry, call.flat, is_debugging=_jax.looks_for_nans())
        if not call.refs:
            key = self._key(static, call)
            known = (e for e in self._entries.get(key, ()) if e.is_plain)
            plain = self._inner.get(key) or next(known, None)
            if plain is None or not plain.is_of_this_trace:
                plain = self._plain(static, call).inside(*self._arguments(static, call))
                if plain.is_seen or plain.captured:
                    self._inner[key] = plain
                else:
                    plain = self._add(key, call, plain)
            if not plain.returns_refs:
                return plain.run(plain, call.flat, args, kwargs)

        def inside(refs: Sequence[RefLike], leaves: Sequence[Value]) -> Any:
            given = call._replace(refs=[*refs], leaves=[*leaves])
            if (inner := self._inner_form(static, given)) is not None:
                return inner(given.refs, given.leaves)
            return call_inside(self._fun, static or NO_STATIC, given, self._options)

        settings = (static, call.tree, call.ref_places)
        return in_transaction(inside, call.refs, call.leaves, [self], settings)

    def _inner_form(self, static: Static | None, call: Call) -> Inner | None:
        """The form for a call with refs in the trace of another function."""
        o = self._options
        has_shardings = o.in_shardings is not None or o.out_shardings is not None
        if has_shardings or not call.refs or not is_staged(_jax.current_trace()):
            return None
        try:
            key = key_of(static, call)
        except (TypeError, OverflowError):
            check_call(f"call of `{_jax.fun_name(self._fun)}`", static or NO_STATIC, call)
            raise  # pragma: no cover, as all else is a key
        if key not in self._given_refs:
            options = o._asdict() | {"compiler_options": None}
            self._given_refs[key] = Inner.of(self._fun, static or NO_STATIC, call, **options)
        return self._given_refs[key]

    # -- the programs ---------------------------------------------------------------------------

    def _entry(self, static: Static | None, call: Call) -> Any:
        """The entry for these arguments, made at the first call with arguments like them."""
        go_along(call.refs, call.flat)
        while True:
            key = self._key(static, call)
            entry = self._fitting(key, call) or self._add(key, call, self._made(static, call))
            # Which refs it closes over is known now.
            if entry.is_plain or not go_along(
                entry.arguments.refs_of(call.flat), [*call.flat, *entry.transaction.places]
            ):
                return entry

    def _fitting(self, key: tuple[Any, ...], call: Call) -> Any:
        # Which arguments are also closed over is known only after the trace.
        return next((e for e in self._entries.get(key, ()) if e.fits(call)), None)

    @staticmethod
    def _fit(entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, list[Any]]:
        """Whether a program compiled ahead takes arguments without static ones; and their leaves.

        As in JAX, what it was compiled for is shapes and dtypes; XLA compares the shardings.
        """
        call = Call.of(args, kwargs)
        go_along(call.refs, call.flat)
        fits = call.tree == entry.in_tree and entry.fits(call)
        return fits and all(map(is_like, call.flat, entry.argument_types)), call.flat

    def _add(self, key: tuple[Any, ...], call: Call, made: Entry | Plain) -> Any:
        entries = self._entries.setdefault(key, [])
        entries.append(made)
        # Another thread may have made one meanwhile: then all threads use the first one.
        first = self._fitting(key, call)
        if first is not made:
            entries.remove(made)
        trees = {tree for _, tree, *_ in self._entries}
        self._tree = trees.pop() if len(trees) == 1 else None
        known = self._all()
        for entry in known:
            entry.is_alone = len(known) == 1
        return first

    def _made(self, static: Static | None, call: Call) -> Entry | Plain:
        """An entry, which is a `Plain` if it touches no refs but those that it makes for itself."""
        found: Staged | Plain
        name = getattr(self._fun, "__name__", "function")
        if call.refs:
            found = staged(self._fun, static or NO_STATIC, call, name)
        else:
            found = self._plain(static, call).staged(*self._arguments(static, call))
            if not isinstance(found, Staged):
                return found
        donated = self._donated(static or NO_STATIC, call)
        entry = Entry(found, name, static, donated, self._options, call)
        prepare(entry)
        return entry

    def _plain(self, static: Static | None, call: Call) -> Plain:
        keywords = self._donate.keywords("donate") | self._options._asdict()
        return Plain(self._get_fun, static, call.tree.flatten_up_to, self._static, keywords)

    @staticmethod
    def _arguments(static: Static | None, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call without refs, as they were given."""
        return (static or NO_STATIC).restore(*call.rebuild((), call.leaves))

    def _key(self, static: Static | None, call: Call) -> tuple[Any, ...]:
        try:
            kinds = map(kind_of, call.flat)
            return (static, call.tree, _jax.trace_context(), *kinds)
        except (TypeError, OverflowError):
            if not call.refs:  # JAX raises its own error about the argument.
                self._plain(static, call).trace(*self._arguments(static, call))
            check_call(f"call of `{_jax.fun_name(self._fun)}`", static or NO_STATIC, call)
            raise  # pragma: no cover, as all else is a key

    def _all(self) -> list[Any]:
        return [entry for entries in self._entries.values() for entry in entries]

    def _donated(self, static: Static, call: Call) -> list[bool]:
        """For each leaf of the arguments that are not static: whether it is donated."""
        args, kwargs = static.restore(*jax.tree.unflatten(call.tree, call.flat))
        taken, donated = self._static.positions(args), self._donate.positions(args)
        chosen = [(k in donated, a) for k, a in enumerate(args) if k not in taken]
        chosen += [
            (name in self._donate.names, kwargs[name])
            for name in sorted(kwargs)
            if name not in self._static.names
        ]
        return [flag for flag, a in chosen for _ in jax.tree.leaves(a)]


def _forget(instances: dict[int, Any], key: int, _: Any) -> None:
    instances.pop(key, None)
