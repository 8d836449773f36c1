"""A call as JAX differentiates it: the function runs once, under JAX's own transformation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from refs import _jax
from refs._derivatives.at_top_level import op_by_op
from refs._derivatives.inputs import Inputs
from refs._discharge.op_by_op import OpByOp
from refs._handles import access
from refs._handles.access import describe
from refs._handles.making import make
from refs._handles.predicates import is_ref
from refs._origin import Origin
from refs._tracing.discharged import has_lines, is_lane, to_be_discharged
from refs._tracing.touch_analysis import Touch
from refs._tracing.trace import (
    PartlyKnown,
    advised,
    new_origins,
    result_of,
    strip_refs,
    zeros_like,
)
from refs._transactions.signature import flags
from refs._transactions.transaction import Transaction
from refs._types import PyTree, PyTreeDef, RefLike, Value
from refs.errors import RefEscapeError, RefTypeError

Check = Callable[[int, Value], None]


class Differentiable:
    """A call as a pure function of its variables.

    Python code in it gets what it would get in JAX: it may inspect values wherever JAX knows them.
    The `values` are the array variables, then the contents of the ref variables at entry.
    `check(k, value)` is called for each of them when it is known, and may refuse it.

    Attributes:
      out_tree: the structure of the function's output without auxiliary data. It is set once the
        function has run.
      has_backward_effects: whether the backward pass may touch refs. It is set then, too.
    """

    out_tree: PyTreeDef
    has_backward_effects: bool
    _outside: _jax.Trace  # the trace around the transformation
    _access: _Access  # to refs from outside

    def __init__(
        self,
        doing: str,
        fun: Callable[..., Any],
        inputs: Inputs,
        has_aux: bool,
        check: Check,
    ):
        self.doing, self.inputs, self.has_aux, self.check = doing, inputs, has_aux, check
        self._fun = returning_pair(doing, fun) if has_aux else fun

    def __call__(self, values: Sequence[Value]) -> tuple[list[Value], Any]:
        """`(outputs, rest)`: a value for each leaf of `out_tree`, and the other results.

        `rest` isn't differentiated. It is `(arrays, contents, state)`: the arrays in the auxiliary
        data, the final values of new refs in them, and those of the refs that were written.
        """
        n, refs = len(self.inputs.arrays), self.inputs.refs
        trace = _Differentiated(_jax.current_trace(), self._outside, self._access)
        for ref, value in zip(refs, values[n:], strict=True):
            trace.open(ref, value)
        with to_be_discharged(), _jax.set_current_trace(trace):
            args, kwargs = self.inputs.call.rebuild(refs, values[:n])
            result = advised(self._fun)(*args, **kwargs)
        output, aux = result if self.has_aux else (result, None)
        out, self.out_tree = jax.tree.flatten(output)
        for x in out:
            if is_ref(x):
                raise self.escaped(describe(x))
        leaves, self._aux_tree = jax.tree.flatten(PartlyKnown(aux))
        with _jax.set_current_trace(trace):
            arrays, self._markers, contents = strip_refs(leaves, [])
        self.has_backward_effects = trace.has_custom_vjp
        self._written, state = trace.written
        trace.end()
        return out, (arrays, contents, state)

    def with_contents(
        self, values: Sequence[Value]
    ) -> tuple[tuple[list[Value], dict[int, Value]], Any]:
        """`((outputs, final), rest)`: `self(values)`, with final contents of refs as outputs, too.

        `final` has those of the variables that the function writes, by the position in
        `inputs.refs`.
        """
        out, rest = self(values)
        *_, state = rest
        number = {id(ref): k for k, ref in enumerate(self.inputs.refs)}
        final = {
            number[id(ref)]: value
            for ref, value in zip(self._written, state, strict=True)
            if id(ref) in number
        }
        return (out, final), rest

    def run(self, transformed: Callable[[list[Value]], tuple[Any, ...]]) -> tuple[Any, ...]:
        """`transformed(values)`, one of JAX's transformations of this function, as one operation.

        `transformed` returns a tuple, whose last item is this function's `rest`. The state in it is
        written back to the refs, and the auxiliary data take its place in the result.
        """

        def inside() -> tuple[Any, ...]:
            self._outside = _jax.current_trace()
            arrays, refs = self.inputs.arrays, self.inputs.refs
            is_known = is_lane() or has_lines()
            self._access = _Known.of(self._fun, self.inputs) if is_known else _Access()
            values = [*arrays, *map(self._access.contents, refs)]
            for k, x in enumerate(values):
                self.check(k, x)
            *out, (arrays, contents, state) = transformed(values)
            for ref, value in zip(self._written, state, strict=True):
                self._access.set(ref, value)
            new = [*map(_made, contents, new_origins(self._markers))]
            return *out, result_of(self._aux_tree, self._markers, arrays, [], new)

        return op_by_op(inside)

    def holding(self, in_nzs: PyTree | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A decorator for functions of `values`: those flagged false in `in_nzs` are constant."""
        if in_nzs is None:
            return lambda fun: fun
        inputs = self.inputs
        nonzero = flags(self.doing, "in_nzs", in_nzs, inputs.tree)
        moving = {v.position for v, flag in zip(inputs.variables, nonzero, strict=True) if flag}

        def held(fun: Callable[..., Any]) -> Callable[..., Any]:
            return lambda values: fun(
                [x if k in moving else lax.stop_gradient(x) for k, x in enumerate(values)]
            )

        return held

    def outputs(self, arrays: Sequence[Value]) -> PyTree:
        """The function's output, from one item for each of its leaves."""
        return jax.tree.unflatten(self.out_tree, arrays)

    def escaped(self, described: str) -> RefEscapeError:
        """The error about a ref in the output."""
        return RefEscapeError(
            f"{self.doing} of a function that returns {described}: return its value, `ref[...]`, "
            "or the ref as auxiliary data (`has_aux`)"
        )


def returning_pair(doing: str, fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, with a check that its result is a pair."""

    @functools.wraps(fun)
    def checked(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        result = fun(*args, **kwargs)
        if not isinstance(result, tuple | list) or len(result) != 2:
            what = "an array" if isinstance(result, jax.Array) else f"a {type(result).__name__}"
            raise RefTypeError(
                f"{doing} with has_aux of a function that returns {what}: it must return a pair, "
                "(output, auxiliary data)"
            )
        return result[0], result[1]

    return checked


class _Differentiated(OpByOp):
    """The trace of a differentiated function."""

    def __init__(self, parent: Any, outside: _jax.Trace, of_refs: _Access):
        super().__init__(parent, outside, is_differentiated=True)
        self._of_refs = of_refs

    def read(self, ref: RefLike) -> Value:
        with _jax.set_current_trace(self.outside):
            return self._of_refs.get(ref)


class _Access:
    """How a differentiated function's refs are read before it, and written after it."""

    def get(self, ref: RefLike) -> Value:
        """What the function has for a ref's value when it touches the ref first."""
        return access.get(ref)

    def contents(self, ref: RefLike) -> Value:
        """The contents of a ref that is a variable."""
        return self.get(ref)

    def set(self, ref: RefLike, value: Value) -> None:
        """Gives a ref its new value."""
        access.set(ref, ..., value)


class _Known(_Access):
    """What is known beforehand of the refs of a differentiated function, as it is traced for that.

    In a lane of `refs.vmap` a ref that lanes share must not be read if the function only
    accumulates into it, nor if only a backward rule does. And `refs.explain` shows where the
    function touches a ref.
    """

    def __init__(self, t: Transaction, arguments: Sequence[RefLike]):
        self._transaction, self._arguments = t, arguments
        slots = [*t.touch_of]
        self._slots = dict(zip(map(id, t.refs(slots, arguments)), slots, strict=True))

    @staticmethod
    def of(fun: Callable[..., Any], inputs: Inputs) -> _Known:
        def known(*args: Any, **kwargs: Any) -> Any:
            return PartlyKnown(fun(*args, **kwargs))

        refs, rebuild = inputs.refs, inputs.call.rebuild
        t = Transaction.of(known, refs, inputs.arrays, rebuild, is_differentiated=True)
        return _Known(t, refs)

    def get(self, ref: RefLike) -> Value:
        """The value, or the neutral element, if the function only accumulates."""
        slot = self._slots[id(ref)]
        if self._transaction.touch_of[slot] == Touch.NONE:
            return None  # Only a rule that runs later touches it.
        [value] = self._transaction.values([slot], self._arguments)
        return value

    def contents(self, ref: RefLike) -> Value:
        """The contents, or zeros if the function doesn't touch the ref."""
        value = self.get(ref)
        return zeros_like(ref) if value is None else value

    def set(self, ref: RefLike, value: Value) -> None:
        """Gives a ref its new value, or accumulates what the function has accumulated."""
        self._transaction.commit([self._slots[id(ref)]], self._arguments, [value])


def _made(value: Value, origin: Origin) -> RefLike:
    """The ref outside of a function for one that it has made and returned, with its final value."""
    trace = _jax.current_trace()
    return trace.make(value, origin) if isinstance(trace, OpByOp) else make(value, origin)
