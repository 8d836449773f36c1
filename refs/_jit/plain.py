"""The form of a function for calls that touch no refs: JAX's own jit of it, and nothing else.

A function may make refs for itself and not return them: then the form is JAX's jit of the
discharged function.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax

from refs import _jax
from refs._callbacks.analysis import calls_host
from refs._discharge.interpreter import Context
from refs._discharge.program import Program, discharges
from refs._handles.predicates import is_ref
from refs._inplace import run_in_place
from refs._jit.program import TypesDiffer, kinds_of
from refs._jit.staged import Staged, Staging
from refs._tracing.touch_analysis import Rules, uses_refs
from refs._tracing.trace import advised, strip_refs
from refs._transactions.signature import Choice, are_arrays
from refs._types import ClosedJaxpr, PyTreeDef, Value

# Returns a function that another object keeps alive.
GetFun = Callable[[], Callable[..., Any]]


class Plain:
    """A form of a function for arguments that are no refs.

    The function's trace tells whether it touches other refs: closed over, made inside, returned. If
    there are none, JAX alone runs the function. If the function makes all of them for itself,
    perhaps in a transformation such as `refs.grad`, which leaves none of them in the trace, its
    form is the `discharged` one, in place. Of any other function's trace a `Program` is made.

    Attributes:
      forms, types: the kinds of arguments that it is for.
      captured: the values of an enclosing trace that it closes over.
      is_discharged: whether the function makes refs for itself, which are gone.
      is_seen: whether the trace around it is to see what it does: touch refs, or call back.
      compiled: the function under `jax.jit`, with all of the user's keywords. Instead of being
        traced again it raises `TypesDiffer`: for arguments of other types it may touch refs.
    """

    is_plain = True

    def __init__(
        self,
        get_fun: GetFun,
        chosen: Choice,
        keywords: Mapping[str, Any],
    ):
        self._get_fun, self._chosen, self._keywords = get_fun, chosen, keywords
        self.forms = self.types = set[Any]()
        self.captured: Sequence[Value] = ()
        self.is_discharged = self.is_seen = False
        self._asks = asks = object()
        self._returned: list[Any] = []
        returned = self._returned

        @_wraps(get_fun)
        def traced(*args: Any, **kwargs: Any) -> Any:
            if _asking.get() is not asks:
                raise TypesDiffer
            if (outcome := _outcome.get()) is not None:
                return _run_staged(get_fun(), chosen.split(args, kwargs), outcome)
            result = get_fun()(*args, **kwargs)
            leaves, tree = jax.tree.flatten(result)
            if not any(map(is_ref, leaves)):
                return result
            arrays, markers, new = strip_refs(leaves, ())
            returned[:] = tree, tuple(markers)
            return arrays, new

        traced.__name__ = _jax.fun_name(get_fun())
        static_ones = chosen.keywords("static")
        # Shardings are for the whole result, refs included, which `traced` doesn't always return:
        # so `_bare` has none. It is traced once for both: JAX caches the trace by the function.
        self._bare = jax.jit(traced, **static_ones)
        self.compiled = jax.jit(traced, **static_ones, **keywords)

    @staticmethod
    def types_of(flat: list[Any]) -> Any:
        """What it is for, of a call with these leaves."""
        return kinds_of(flat)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call, whether or not the function has been traced for it."""
        return self._ask(self.compiled, args, kwargs)

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> jax.stages.Traced:
        """The trace as JAX gives it, with all of the user's keywords."""
        return self._ask(self.compiled.trace, args, kwargs)

    def staged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Staged | Plain:
        """The function over refs, or the form of one that touches none but its own."""
        outcome: list[Any] = []
        token, before = _outcome.set(outcome), discharges()
        try:
            # JAX's checks count the names of the inputs: see `staged`.
            with contextlib.ExitStack() as unchecked:
                outcome.append(unchecked)
                traced = advised(self._ask)(self._bare.trace, args, kwargs)
        finally:
            _outcome.reset(token)
        [(made, is_touched)] = outcome
        if is_touched or calls_host(traced.jaxpr):
            _, *given = self._chosen.split(args, kwargs)
            return made(traced.jaxpr, len(jax.tree.leaves(given)))
        if discharges() == before:
            return self
        return self._discharged_form((), traced.jaxpr, traced.out_tree)

    def inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plain:
        """The form for calls in the trace under way, which sees the refs that are touched."""
        before = discharges()
        traced = advised(self._ask)(self._bare.trace, args, kwargs)
        closed = traced.jaxpr
        self._capture(_jax.captured(traced))
        makes_refs = discharges() > before or uses_refs(closed)
        self.is_seen = self.returns_refs or calls_host(closed)
        if self.is_seen or not makes_refs:
            return self
        program = Program.of(closed)
        if program.refs or any(map(_jax.is_ref_type, closed.in_avals)):
            self.is_seen = True
            return self
        context = Context(rules=Rules.MAY_WRITE)
        leaves = [*map(_jax.AbstractArgument, closed.in_avals)]
        pure = jax.make_jaxpr(lambda *leaves: program.run(context, [], leaves))(*leaves)
        return self._discharged_form(self.captured, pure, traced.out_tree)

    def _discharged_form(
        self, captured: Sequence[Value], closed: ClosedJaxpr, tree: PyTreeDef
    ) -> Plain:
        """The form that runs a pure jaxpr in place, whose first inputs are what is captured."""

        @_wraps(self._get_fun)
        def pure(*args: Any, **kwargs: Any) -> Any:
            _, args, kwargs = self._chosen.split(args, kwargs)
            leaves = [*captured, *jax.tree.leaves((args, kwargs))]
            return tree.unflatten(run_in_place(closed, leaves))

        form = Plain(lambda: pure, self._chosen, self._keywords)
        form.is_discharged = True
        form._capture(captured)
        return form

    def _capture(self, values: Sequence[Value]) -> None:
        self.captured, self._trace = values, weakref.ref(_jax.current_trace())

    @property
    def is_of_this_trace(self) -> bool:
        """Whether what it has captured, if anything, is of the trace under way."""
        return not self.captured or self._trace() is _jax.current_trace()

    @property
    def returns_refs(self) -> bool:
        """Whether the function, as far as it was traced, returns refs."""
        return bool(self._returned)

    def knows(self, kinds: Any, call: Any) -> bool:
        """Whether it is for a call with arguments of these kinds."""
        return kinds in self.forms and not call.refs

    def _ask(self, what: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        token = _asking.set(self._asks)
        try:
            return what(*args, **kwargs)
        finally:
            _asking.reset(token)


def _run_staged(fun: Callable[..., Any], given: Any, outcome: list[Any]) -> Any:
    """Runs a function at top level: its result; with refs, the outputs of a `Staged` function.

    `given` is the call's arguments, the static ones apart. `outcome` has an exit stack of the
    caller's; it gets instead what makes a `Staged` of the jaxpr, and whether refs are touched or
    returned.
    """
    stage, token = Staging(()), _outcome.set(None)
    try:
        with stage.running():
            static, *rest = given
            args, kwargs = static.restore(*jax.tree.map(lambda x: x, rest))  # as in `staged`
            result = fun(*args, **kwargs)
        leaves, tree = jax.tree.flatten(result)
        if not are_arrays([x for x in leaves if not is_ref(x)]):
            outcome[:] = [(None, False)]
            return result  # JAX raises its own error.
        is_touched = stage.is_touched or any(map(is_ref, leaves))
        outputs, made = stage.finish(leaves, tree, {})
    finally:
        stage.end()
        _outcome.reset(token)
    [unchecked] = outcome
    unchecked.enter_context(jax.enable_checks(False))
    outcome[:] = [(made, is_touched)]
    return outputs if is_touched else result


def _wraps(get_fun: GetFun) -> Callable[..., Any]:
    """`functools.wraps`, which doesn't keep alive a function that is weakly referred to."""

    def wrap(wrapper: Any) -> Any:
        functools.update_wrapper(wrapper, get_fun())
        if isinstance(get_fun, weakref.ref):
            wrapper.__wrapped__ = weakref.proxy(get_fun())
        return wrapper

    return wrap


_asking: ContextVar[object] = ContextVar("_asking", default=None)
_outcome: ContextVar[list[Any] | None] = ContextVar("_outcome", default=None)
