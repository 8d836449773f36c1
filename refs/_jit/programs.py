"""The compiled programs of a function over refs, and which of them a call runs."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from refs import _jax
from refs._buffers.handles import is_ours, sharding_of
from refs._handles.access import check_ref
from refs._handles.predicates import is_ref
from refs._handles.ref import Ref
from refs._jit.dispatch import NoForm, dispatcher
from refs._jit.entry import Entry
from refs._jit.executable import Options
from refs._jit.plain import GetFun, Plain
from refs._jit.stages import Lowered, Traced
from refs._jit.ways import carefully, prepare
from refs._tracing.trace import Call, Trace, ref_type
from refs._tracing.weak_memo import WeakMemo
from refs._transactions.calls import in_transaction
from refs._transactions.nested import call_inside
from refs._transactions.signature import NO_STATIC, Choice, Static, type_of
from refs._transactions.transaction import Transaction
from refs._types import PyTreeDef, RefLike, Value
from refs.errors import RefStateError, RefTypeError


def compiled(
    fun: Callable[..., Any], static: Choice, donate: Choice, options: Options
) -> Callable[..., Any]:
    """What users get: another one each time, which as `jax.jit`'s has the programs of the last.

    It holds the function and its programs. Those don't hold the function, for they are kept for as
    long as it lives; nor what users get, so that all goes at once.
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
    call.__dict__ = _Methods(call.__dict__)
    for name in ("trace", "lower", "eval_shape", "clear_cache", "_cache_size"):
        setattr(call, name, functools.partial(_calling, fun, getattr(programs, name)))
    return call


def _made(*given: Any) -> tuple[Programs, Any]:
    programs = Programs(*given)
    return programs, dispatcher(programs)


def _calling(_: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of a method, during which the function lives that its programs don't hold."""
    return method(*args, **kwargs)


_known = WeakMemo()  # of a function: its programs, by keywords


class Programs:
    """The compiled programs of a function over refs, one for each kind of arguments.

    `fun` gives the function, which is held by those who call it.
    """

    def __init__(self, fun: GetFun, static: Choice, donate: Choice, options: Options):
        self._get_fun, self._static, self._donate, self._options = fun, static, donate, options
        self.has_static = bool(static.nums or static.names)
        self._entries: dict[Any, list[Any]] = {}  # each an `Entry` or a `Plain`
        self._inner: dict[Any, Plain] = {}  # for calls in a trace, where it touches refs
        # By structure and arrays only; None where that doesn't tell which.
        self._quick: dict[Any, Any] = {}
        self.forget: Callable[[], None] = lambda: None  # what a call remembers besides
        # Of a method: those of its instances that are no pytrees, by identity.
        self.instances: dict[int, Callable[..., Any]] = {}

    @property
    def _fun(self) -> Callable[..., Any]:
        return self._get_fun()

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Lowers the function for arguments like these."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Traces and discharges the function for arguments like these."""
        if (bound := self.of_instance(args)) is not None:
            return bound.trace(*args[1:], **kwargs)  # type: ignore[attr-defined]
        entry, flat = self._prepare(args, kwargs, runs=False)
        if _jax.is_jit_disabled() and not entry.is_plain:
            raise RefStateError(
                f"trace of `{entry.name}` under `jax.disable_jit`, where a function is run as it "
                "is: trace, lower or compile it outside"
            )
        traced = entry.trace(args, kwargs) if entry.is_plain else entry.trace(flat)
        return Traced(entry, traced, self._known)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The result's shapes and dtypes, as `jax.ShapeDtypeStruct`s; nothing runs."""
        return self.trace(*args, **kwargs).out_info

    def clear_cache(self) -> None:
        """Forgets every compiled program of this function."""
        self.forget()
        self._entries.clear()
        self._inner.clear()
        self._quick.clear()
        self.instances.clear()

    def _cache_size(self) -> int:
        return len(self._all())

    def of_instance(self, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        """Of a method, called on an instance that is no pytree: that of this instance alone.

        It closes over the instance, and is forgotten with it.
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

    # -- what a call asks for, see `_dispatch` ---------------------------------------------------

    def take_static(self, args: Any, kwargs: Any, known: Any = None) -> Any:
        """The static arguments, those of the last call if they are the same, and the rest."""
        if not self.has_static:
            return None, args, kwargs
        found, args, kwargs = self._static.split(args, kwargs)
        try:
            same = found == known
        except Exception:  # as arrays, which aren't equal or not: and no static arguments
            same = False
        return known if same else found.checked(), args, kwargs

    def find(self, static: Any, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
        """The entry for arguments that there was a call with before, and their leaves."""
        flat, tree = jax.tree.flatten((args, kwargs))
        try:
            return self._quick.get(_quick_key(static, tree, flat)) or NoForm, flat
        except (TypeError, OverflowError):  # something that is no array
            return NoForm, flat

    def find_or_make(self, static: Any, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
        """The entry for any arguments, made if need be, and its refs ready to be taken."""
        call = Call.of(args, kwargs)
        entry = self._entry(static, call)
        key = _quick_key(static, call.tree, call.flat)
        self._quick[key] = entry if self._quick.get(key, entry) is entry else None
        if entry.is_plain:
            return entry, call.flat
        for ref in entry.arguments.refs_of(call.flat):
            check_ref(ref, "call")  # those closed over, too
        entry.compile_ahead(call.flat)
        return entry, call.flat

    def call_otherwise(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """With jit disabled, in another trace, looking for NaNs, or beside what calls back."""
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
            if plain is None:
                plain, traced = self._traced(static, call)
                if traced is not None and not plain.captured:
                    self._inner[key] = plain
                elif not plain.captured:
                    plain = self._add(key, call, plain)
            if not plain.returns_refs:
                return plain.run(plain, call.flat, args, kwargs)

        def inside(refs: Sequence[RefLike], leaves: Sequence[Value]) -> Any:
            given = call._replace(refs=[*refs], leaves=[*leaves])
            return call_inside(self._fun, static or NO_STATIC, given, self._options)

        settings = (static, call.tree, call.ref_places)
        return in_transaction(inside, call.refs, call.leaves, [self], settings)

    # -- the programs ---------------------------------------------------------------------------

    def _prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], runs: bool = True
    ) -> tuple[Any, list[Any]]:
        static, args, kwargs = self.take_static(args, kwargs)
        call = Call.of(args, kwargs, runs)
        return self._entry(static, call), call.flat

    def _entry(self, static: Any, call: Call) -> Any:
        """The entry for these arguments, made at the first call with their like."""
        key = self._key(static, call)
        return self._fitting(key, call) or self._add(key, call, self._made(static, call))

    def _fitting(self, key: Any, call: Call) -> Any:
        # Which arguments are also closed over is known only after the trace.
        return next((e for e in self._entries.get(key, ()) if e.fits(call)), None)

    def _known(
        self, static: Static | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[Any]]:
        """The entry for arguments without the static ones, if there is one; their leaves."""
        call = Call.of(args, kwargs)
        return self._fitting(self._key(static, call), call), call.flat

    def _add(self, key: Any, call: Call, made: Any) -> Any:
        entries = self._entries.setdefault(key, [])
        entries.append(made)
        # Another thread may have made one meanwhile: then all use that which came first.
        first = self._fitting(key, call)
        if first is not made:
            entries.remove(made)
        for entry in self._all():
            entry.is_alone = len(self._all()) == 1
        return first

    def _made(self, static: Static | None, call: Call) -> Any:
        """An entry, which is a `Plain` if it touches no refs but those that it makes for itself."""
        if call.refs:

            def rebuild(refs: Sequence[RefLike], leaves: Sequence[Value]) -> Any:
                return (static or NO_STATIC).restore(*call.rebuild(refs, leaves))

            transaction = Transaction.of(self._fun, call.refs, call.leaves, rebuild)
        else:
            plain, traced = self._traced(static, call)
            if traced is None:
                return plain
            transaction = Transaction(traced, ())
        name = getattr(self._fun, "__name__", "function")
        donated = self._donated(static or NO_STATIC, call)
        entry = Entry(transaction, name, static, donated, self._options, call)
        prepare(entry)
        return entry

    def _plain(self, static: Static | None, call: Call) -> Plain:
        keywords = self._donate.keywords("donate") | self._options._asdict()
        return Plain(self._get_fun, static, call.tree.flatten_up_to, self._static, keywords)

    def _traced(self, static: Static | None, call: Call) -> tuple[Plain, Trace | None]:
        """A `Plain`, and its trace if that has refs which it can't do without."""
        plain = self._plain(static, call)
        traced = plain.find_refs(*self._arguments(static, call))
        own = traced and plain.discharged(traced)
        return (own, None) if own else (plain, traced)

    @staticmethod
    def _arguments(static: Static | None, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call without refs, as they were given."""
        return (static or NO_STATIC).restore(*call.rebuild((), call.leaves))

    def _key(self, static: Static | None, call: Call) -> Any:
        try:
            kinds = map(_kind_of, call.flat)
            return (static, call.tree, _jax.trace_context(), *kinds)
        except (TypeError, OverflowError):
            if not call.refs:  # Whatever is wrong with an argument, JAX has words for it.
                self._plain(static, call).trace(*self._arguments(static, call))
            raise

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


class _Methods(dict[str, Any]):
    """The attributes of a compiled function, which are not those of what wraps it.

    `functools.wraps` copies them, and `jax.jit` is such a wrapper: then `trace` would be ours.
    """

    def keys(self) -> Any:
        return {}.keys()

    def __iter__(self) -> Any:
        return iter(())


def _forget(instances: dict[int, Any], key: int, _: Any) -> None:
    instances.pop(key, None)


def _kind_of(leaf: Any) -> Any:
    return (ref_type(leaf), sharding_of(leaf), is_ours(leaf)) if is_ref(leaf) else type_of(leaf)


def _quick_key(static: Any, tree: PyTreeDef, flat: list[Any]) -> Any:
    types = [type_of(x) for x in flat if type(x) is not Ref]
    return (static, tree, _jax.trace_context(), *types)
