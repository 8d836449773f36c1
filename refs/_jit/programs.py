"""The compiled programs of a function over refs, and the choice of the one that a call runs."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import jax

from refs import _jax
from refs._buffers.devices import devices_told
from refs._buffers.waiting import patiently
from refs._discharge.op_by_op import is_staged
from refs._handles.access import check_ref
from refs._handles.ref import Ref
from refs._handles.resharding import go_along, note_mesh
from refs._jit.dispatch import Bucket, Methods, Table, dispatcher
from refs._jit.inner import Inner, key_of
from refs._jit.plain import GetFun, Plain
from refs._jit.program import MISS, Options, Program, TypesDiffer, is_like, kinds_of
from refs._jit.running import carefully, quick_call
from refs._jit.staged import Staged, staged
from refs._jit.stages import Lowered, Traced
from refs._tracing.discharged import with_lines
from refs._tracing.trace import Call, ref_type, trace
from refs._tracing.weak_memo import WeakMemo
from refs._transactions.calls import in_transaction
from refs._transactions.nested import call_inside
from refs._transactions.signature import NO_STATIC, Choice, Static, check_call
from refs._types import ClosedJaxpr, RefLike, Value
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
    return programs, dispatcher(programs.table, programs)


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
        self.table = Table(static)
        # For calls in another trace. Of a function that touches refs and takes none: JAX's jit of
        # the function as it is, since the other trace is to see each access. And those with refs.
        self._inner: dict[tuple[Any, ...], Plain | Inner | None] = {}
        self._is_method: WeakKeyDictionary[type, bool] = WeakKeyDictionary()  # of which classes

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
        program, kinds = self._program(static, call, is_compiled=False)
        if _jax.is_jit_disabled() and not program.is_plain:
            raise RefStateError(
                f"trace of `{program.name}` under `jax.disable_jit`, where a function is run as it "
                "is: trace, lower or compile it outside"
            )
        given = (args, kwargs) if program.is_plain else (kinds, call.flat)
        traced = program.trace(*given)
        has_refs = not program.is_plain or program.is_discharged
        effectful = functools.partial(self._effectful, static, call) if has_refs else None
        return Traced(program, kinds, traced, self._fit, call.flat, effectful)

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
        return explained(self._fun, traced, args, kwargs)

    def clear_cache(self) -> None:
        """Forgets every compiled program of this function."""
        self.table.clear()
        self._inner.clear()

    def _cache_size(self) -> int:
        return sum(len(program.forms) for program in self.table.programs())

    def of_instance(self, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        """The compiled method for the first argument, if that is an instance and no pytree.

        It closes over the instance weakly, and is dropped with it.
        """
        instance, instances = args[0] if args else None, self.table.instances
        if id(instance) in instances:
            return instances[id(instance)]
        kind = type(instance)
        if kind not in self._is_method:
            self._is_method[kind] = _is_method(kind, self._fun)
        if not self._is_method[kind] or not jax.tree_util.all_leaves([instance]):
            return None
        try:
            found = weakref.ref(instance, functools.partial(_forget, instances, id(instance)))
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
        instances[id(instance)] = call = compiled(bound, static, donate, self._options)
        return call

    # -- for calls, see `dispatch.py` ------------------------------------------------------------

    def take_static(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Static | None, tuple[Any, ...], dict[str, Any]]:
        """The static arguments and the rest.

        Raises:
          RefTypeError, RefValueError: if one of them can't be static.
        """
        if not (self._static.nums or self._static.names):
            return None, args, kwargs
        found, args, kwargs = self._static.split(args, kwargs)
        return found.checked(), args, kwargs

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call for which no quick one was found."""
        if _jax.is_jit_disabled():
            return self._fun(*args, **kwargs)
        if (bound := self.of_instance(args)) is not None:
            return bound(*args[1:], **kwargs)
        static, rest_args, rest_kwargs = self.take_static(args, kwargs)
        call = Call.of(rest_args, rest_kwargs)
        if not _jax.at_top_level():
            return self._call_inside(static, call, args, kwargs)
        is_debugging = _jax.looks_for_nans()
        for _ in range(4):
            program, _ = self._program(static, call, is_compiled=True)
            bucket = self.table.bucket(static, call.tree)
            if program.is_plain:
                result = program.run(args, kwargs)
                self.table.set_ready(bucket, program)
                return result
            for ref in program.operands.refs_of(call.flat):
                check_ref(ref, "call")  # those closed over, too
            if program in bucket.ready and not is_debugging:
                result = patiently(
                    functools.partial(program.call, program, call.flat, args, kwargs),
                    program.operands.written_of(call.flat),
                    program.operands.read_of(call.flat),
                )
                if result is not MISS:
                    return result
            try:
                result = carefully(program, call.flat, is_debugging=is_debugging)
            except TypesDiffer:  # pragma: no cover, another thread has placed a ref elsewhere
                continue
            if not is_debugging:
                self.table.set_ready(bucket, program)
            return result
        raise TypesDiffer  # pragma: no cover, the same

    def _call_inside(
        self, static: Static | None, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call in the trace of another function."""
        if not call.refs:
            kinds = self._kinds(static, call)
            key = (static, call.tree, kinds)
            bucket = self.table.bucket(static, call.tree)
            known = (p for p in bucket.programs if p.is_plain and kinds in p.forms)
            plain: Any = self._inner.get(key) or next(known, None)
            if plain is None or not plain.is_of_this_trace:
                plain = self._plain(static, call).inside(*self._arguments(static, call))
                plain.forms.add(kinds)
                if plain.is_seen or plain.captured:
                    self._inner[key] = plain
                else:
                    plain = self._first(bucket, plain, kinds, call)
            if not plain.returns_refs:
                return plain.run(args, kwargs)

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
        if key not in self._inner:
            options = o._asdict() | {"compiler_options": None}
            self._inner[key] = Inner.of(self._fun, static or NO_STATIC, call, **options)
        return self._inner[key]  # type: ignore[return-value]

    # -- the programs ---------------------------------------------------------------------------

    def _program(self, static: Static | None, call: Call, is_compiled: bool) -> tuple[Any, Any]:
        """The program for these arguments, made at the first call with arguments like them.

        The second result is what its form for them is known by.
        """
        go_along(call.refs, call.flat)
        while True:
            note_mesh(call.refs)
            kinds = self._kinds(static, call)
            bucket = self.table.bucket(static, call.tree)
            program = next((p for p in bucket.programs if p.knows(kinds, call)), None)
            program: Any = program or self._made(bucket, static, call, kinds)
            # Which refs it closes over is known now.
            if not program.is_plain:
                places = program.forms[kinds].places
                touched = program.operands.refs_of(call.flat)
                note_mesh(touched)
                if go_along(touched, [*call.flat, *places]) or not program.knows(kinds, call):
                    continue
                if is_compiled:
                    program.compile_ahead(kinds, call.flat)
            return program, kinds

    def _made(
        self, bucket: Bucket, static: Static | None, call: Call, kinds: Any
    ) -> Program | Plain:
        """A program; a `Plain`, if it touches no refs but those that it makes for itself."""
        found: Staged | Plain
        name = getattr(self._fun, "__name__", "function")
        if call.refs:
            found = staged(self._fun, static or NO_STATIC, call, name)
        else:
            found = self._plain(static, call).staged(*self._arguments(static, call))
            if not isinstance(found, Staged):
                found.forms.add(kinds)
                return self._first(bucket, found, kinds, call)
        donated = self._donated(static or NO_STATIC, call)
        for program in bucket.programs:
            if not program.is_plain and program.takes(found, call, donated):
                program.add(kinds, found, call.flat)
                return program
        program = Program(found, name, static, donated, self._options, call)
        program.add(kinds, found, call.flat)
        return self._first(bucket, program, kinds, call)

    def _first(self, bucket: Bucket, made: Any, kinds: Any, call: Call) -> Any:
        """Adds a program. If another thread has made one meanwhile, all use the first one."""
        known = bucket.programs
        known.append(made)
        first = next(p for p in known if p.knows(kinds, call))
        if first is not made:
            known.remove(made)
        for program in known:
            program.call = quick_call(program, is_one_of_many=len(known) > 1)
        self.table.changed()
        return first

    @staticmethod
    def _fit(
        program: Program, argument_types: Sequence[Any], args: tuple[Any, ...], kwargs: Any
    ) -> tuple[bool, list[Any]]:
        """Whether a program compiled ahead takes arguments without static ones; and their leaves.

        As in JAX, what it was compiled for is shapes and dtypes; XLA compares the shardings.
        """
        call = Call.of(args, kwargs)
        go_along(call.refs, call.flat)
        fits = (
            call.tree == program.in_tree
            and program.operands.fit(call)
            and program.operands.written_of(call.flat) is not None
        )
        return fits and all(map(is_like, call.flat, argument_types)), call.flat

    def _plain(self, static: Static | None, call: Call) -> Plain:
        keywords = self._donate.keywords("donate") | self._options._asdict()
        return Plain(self._get_fun, self._static, keywords)

    @staticmethod
    def _arguments(static: Static | None, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call without refs, as they were given."""
        return (static or NO_STATIC).restore(*call.rebuild((), call.leaves))

    def _kinds(self, static: Static | None, call: Call) -> tuple[Any, ...]:
        """What a form for these arguments is known by."""
        try:
            return kinds_of(call.flat)
        except (TypeError, OverflowError):
            if not call.refs:  # JAX raises its own error about the argument.
                self._plain(static, call).trace(*self._arguments(static, call))
            check_call(f"call of `{_jax.fun_name(self._fun)}`", static or NO_STATIC, call)
            raise  # pragma: no cover, as all else is a key

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


def _is_method(kind: type, fun: Callable[..., Any]) -> bool:
    """Whether a function is a method of a class, perhaps wrapped."""
    return any(
        inspect.unwrap(getattr(value, "fget", value)) is fun  # pyright: ignore
        for base in kind.__mro__
        for value in vars(base).values()
        if callable(value) or isinstance(value, property)
    )


def _forget(instances: dict[int, Any], key: int, _: Any) -> None:
    instances.pop(key, None)
