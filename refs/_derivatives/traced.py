"""A call that is traced first and then differentiated."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from refs._derivatives.differentiable import Check, Differentiable, as_variable, returning_pair
from refs._derivatives.inputs import Inputs
from refs._handles.access import describe
from refs._origin import UNKNOWN
from refs._tracing.derivative_rules import has_custom_vjp
from refs._tracing.trace import NewRef, PartlyKnown, zeros_like
from refs._transactions.transaction import Slot, Transaction
from refs._types import Value


class Traced(Differentiable):
    """A call that is traced to a transaction.

    Its `rest` is `(arrays, state, made)`: all arrays that the function returns, the new state, and
    the final values of new refs.
    """

    _state: Sequence[Value]  # one for each slot in `_t.written`
    _constants: Sequence[Value]  # one for each slot in `_t.read`

    def __init__(
        self,
        doing: str,
        fun: Callable[..., Any],
        inputs: Inputs,
        has_aux: bool,
        check: Check,
    ):
        super().__init__(doing, inputs, has_aux, check)
        if has_aux:
            fun = _with_known_aux(returning_pair(doing, fun))
        self._t = Transaction.of(
            fun, inputs.refs, inputs.arrays, inputs.rebuild, is_differentiated=True
        )
        traced = self._t.traced
        self.out_tree = traced.out_tree.children()[0] if has_aux else traced.out_tree
        places = range(self.out_tree.num_leaves)
        for k in places:
            if traced.out_leaves[k] is not None:
                raise self.escaped(_described(traced.out_leaves[k], inputs))
        arrays = [k for k, marker in enumerate(traced.out_leaves) if marker is None]
        self._outputs = [arrays.index(k) for k in places]
        self.has_backward_effects = has_custom_vjp(traced.jaxpr.jaxpr)

    @property
    def values(self) -> list[Value]:
        """The array variables, then the contents of ref variables at entry: zeros if unused."""
        known = {
            slot.argument: value
            for slots, values in ((self._t.written, self._state), (self._t.read, self._constants))
            for slot, value in zip(slots, values, strict=True)
        }
        contents = [
            known[k] if k in known else zeros_like(ref) for k, ref in enumerate(self.inputs.refs)
        ]
        return [*map(as_variable, self.inputs.arrays), *contents]

    def __call__(self, values: Sequence[Value]) -> tuple[list[Value], Any]:
        n = len(self.inputs.arrays)

        def at(slots: Sequence[Slot], held: Sequence[Value]) -> list[Value]:
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

    def with_contents(
        self, values: Sequence[Value]
    ) -> tuple[tuple[list[Value], dict[int, Value]], Any]:
        out, rest = self(values)
        _, state, _ = rest
        final = {
            slot.argument: value
            for slot, value in zip(self._t.written, state, strict=True)
            if slot.argument is not None
        }
        return (out, final), rest

    def run(self, transformed: Callable[[list[Value]], tuple[Any, ...]]) -> tuple[Any, ...]:
        def body(state: list[Value], constants: list[Value]) -> Any:
            self._state, self._constants = state, constants
            for k, x in enumerate(self.values):
                self.check(k, x)
            *out, rest = transformed(self.values)
            return rest[1], (out, rest)

        out, (arrays, _, made) = self._t.update(self.inputs.refs, body)
        aux = self._t.result(arrays, made, self.inputs.refs)[1] if self.has_aux else None
        return *out, aux


def _with_known_aux(fun: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fun)
    def pair(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        output, aux = fun(*args, **kwargs)
        return output, PartlyKnown(aux)

    return pair


def _described(marker: Any, inputs: Inputs) -> str:
    """The ref in the output that a marker of `strip_refs` stands for, for messages."""
    if isinstance(marker, NewRef):
        return "a ref made inside" if marker.origin is UNKNOWN else marker.origin.describe()
    return describe(marker.ref if hasattr(marker, "ref") else inputs.refs[marker.position])
