"""A call as JAX differentiates it: a pure function of its variables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from refs._access import describe
from refs._rules import has_custom_vjp
from refs._tracing import NewRef, PartlyKnown, zeros_like
from refs.errors import RefEscapeError, RefTypeError, RefValueError
from refs.transforms._inputs import Inputs
from refs.transforms._signature import flags
from refs.transforms._transaction import Slot, Transaction, in_transaction, run


class Differentiable:
    """A traced call as a pure function of its variables.

    `values` is one array for each variable: the arrays, then the contents of refs. `check` is
    called with each, when they are known, and may refuse it.
    """

    _state: Sequence[Any]
    _constants: Sequence[Any]

    def __init__(
        self,
        doing: str,
        fun: Callable[..., Any],
        inputs: Inputs,
        has_aux: bool,
        check: Callable[[Any], None] = lambda x: None,
    ):
        self.doing, self.inputs, self._check = doing, inputs, check
        if has_aux:
            fun = _returning_pair(doing, fun)
        self._t = Transaction.of(
            fun, inputs.refs, inputs.arrays, inputs.rebuild, is_differentiated=True
        )
        traced, self.has_aux = self._t.traced, has_aux
        self.out_tree = traced.out_tree.children()[0] if has_aux else traced.out_tree
        places = range(self.out_tree.num_leaves)
        for k in places:
            if traced.out_leaves[k] is not None:
                raise RefEscapeError(
                    f"{doing} of a function that returns {_described(traced.out_leaves[k], inputs)}"
                    ": return its value, `ref[...]`, or the ref as auxiliary data (`has_aux`)"
                )
        arrays = [k for k, marker in enumerate(traced.out_leaves) if marker is None]
        self._outputs = [arrays.index(k) for k in places]
        self.has_backward_effects = has_custom_vjp(traced.jaxpr.jaxpr)

    @property
    def values(self) -> list[Any]:
        """The values of the variables at entry."""
        known = {
            slot.argument: value
            for slots, values in ((self._t.written, self._state), (self._t.read, self._constants))
            for slot, value in zip(slots, values, strict=True)
        }
        contents = [
            known[k] if k in known else zeros_like(ref) for k, ref in enumerate(self.inputs.refs)
        ]
        return [*self.inputs.arrays, *contents]

    def __call__(self, values: Sequence[Any]) -> tuple[list[Any], Any]:
        """(outputs, what else comes of it: auxiliary arrays, new state, values of new refs)."""
        n = len(self.inputs.arrays)

        def at(slots: Sequence[Slot], held: Sequence[Any]) -> list[Any]:
            return [
                value if slot.argument is None else values[n + slot.argument]
                for slot, value in zip(slots, held, strict=True)
            ]

        state, (arrays, made) = self._t.run(
            at(self._t.written, self._state),
            at(self._t.read, self._constants),
            values[:n],
            self.inputs.refs,
        )
        return [arrays[k] for k in self._outputs], (arrays, state, made)

    def run(self, transformed: Callable[[list[Any]], tuple[Any, ...]]) -> tuple[Any, ...]:
        """`transformed(values)`, one of JAX's transformations of this function, as one operation.

        It gives a tuple, of which the last is what else this function returns. The state in that
        is written back, and only the auxiliary data are left of it.
        """

        def body(state: list[Any], constants: list[Any]) -> Any:
            self._state, self._constants = state, constants
            for x in self.values:
                self._check(x)
            *out, rest = transformed(self.values)
            return rest[1], (out, rest)

        out, (arrays, _, made) = self._t.update(self.inputs.refs, body)
        aux = self._t.result(arrays, made, self.inputs.refs)[1] if self.has_aux else None
        return *out, aux

    def backward(self, fun: Callable[..., Any], refs: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """`fun(refs, arrays)`, a backward pass of this function.

        JAX transposes loops and branches into ones that hide the refs they touch, those of users'
        backward rules, where only we can see them: it is a transaction of its own.
        """
        return (run if self.has_backward_effects else in_transaction)(fun, refs, arrays)

    def holding(self, in_nzs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Makes of a function of `values` one in which those flagged as false are constant."""
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

    def with_contents(self, values: Sequence[Any]) -> tuple[Any, Any]:
        """`self(values)`, with the final contents of the variables that it writes as outputs.

        They are a dictionary, by the number of the ref. Of the others, nothing has become.
        """
        out, rest = self(values)
        _, state, _ = rest
        final = {
            slot.argument: value
            for slot, value in zip(self._t.written, state, strict=True)
            if slot.argument is not None
        }
        return (out, final), rest

    def outputs(self, arrays: Sequence[Any]) -> Any:
        """The function's output, from one item for each array in it."""
        return jax.tree.unflatten(self.out_tree, arrays)


def _returning_pair(doing: str, fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, whose result must be a pair."""

    @functools.wraps(fun)
    def checked(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        result = fun(*args, **kwargs)
        if not isinstance(result, tuple | list) or len(result) != 2:
            what = "an array" if isinstance(result, jax.Array) else f"a {type(result).__name__}"
            raise RefTypeError(
                f"{doing} with has_aux of a function that returns {what}: it must return a pair, "
                "(output, auxiliary data)"
            )
        output, aux = result
        return output, PartlyKnown(aux)

    return checked


def check_reduce_axes(doing: str, reduce_axes: Any) -> None:
    """JAX still has the keyword, and takes nothing for it."""
    if reduce_axes:
        raise RefValueError(f"{doing}: reduce_axes={reduce_axes!r} means nothing any more in JAX")


def _described(marker: Any, inputs: Inputs) -> str:
    if isinstance(marker, NewRef):
        return marker.origin.describe() if marker.origin is not None else "a ref made inside"
    return describe(marker.ref if hasattr(marker, "ref") else inputs.refs[marker.position])


def derivative(
    doing: str,
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    holomorphic: bool,
    allow_int: bool,
    derive: Callable[[Differentiable, Inputs], Any],
) -> Callable[..., Any]:
    """The function of `fun`'s arguments that `derive(f, inputs)` evaluates."""

    @functools.wraps(fun)
    def derived(*args: Any, **kwargs: Any) -> Any:
        def check(x: Any) -> None:
            _check_variable(doing, x, holomorphic, allow_int)

        def inside(inputs: Inputs) -> Any:
            return derive(Differentiable(doing, fun, inputs, has_aux, check), inputs)

        return Inputs.of(doing, argnums, args, kwargs).in_transaction(inside)

    return derived


def _check_variable(doing: str, x: Any, holomorphic: bool, allow_int: bool) -> None:
    """Refuses what has no gradient of its own type, as JAX does."""
    dtype = jnp.result_type(x)
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        raise RefTypeError(
            f"{doing} with respect to a variable of dtype {dtype}: it has no derivative"
        )
    if holomorphic and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise RefTypeError(
            f"{doing} with holomorphic=True with respect to a variable of dtype {dtype}: it must "
            "be complex"
        )
    if jnp.issubdtype(dtype, jnp.inexact) or allow_int:
        return
    raise RefTypeError(
        f"{doing} with respect to a variable of dtype {dtype}: it has no gradient of that type. "
        "Leave it out of `argnums`, or set allow_int=True, which makes its gradient one of dtype "
        "float0"
    )
