"""A call as JAX differentiates it: a pure function of its variables."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from refs import _jax
from refs._derivatives.inputs import Inputs
from refs._transactions.signature import flags
from refs._types import PyTree, PyTreeDef, Value
from refs.errors import RefEscapeError, RefTypeError

Check = Callable[[int, Value], None]


class Differentiable(ABC):
    """A call as a pure function of its variables. Subclasses: `Direct` and `Traced`.

    The `values` are the array variables, then the contents of the ref variables at entry.
    `check(k, value)` is called for each of them when it is known, and may refuse it.

    Attributes:
      out_tree: the structure of the function's output without auxiliary data. It is set once the
        function has run.
      has_backward_effects: whether the backward pass may touch refs. It is set then, too.
    """

    out_tree: PyTreeDef
    has_backward_effects: bool

    def __init__(self, doing: str, inputs: Inputs, has_aux: bool, check: Check):
        self.doing, self.inputs, self.has_aux, self.check = doing, inputs, has_aux, check

    @abstractmethod
    def __call__(self, values: Sequence[Value]) -> tuple[list[Value], Any]:
        """`(outputs, rest)`: a value for each leaf of `out_tree`, and the other results.

        `rest` isn't differentiated: auxiliary data and state, as the subclass describes.
        """

    @abstractmethod
    def with_contents(
        self, values: Sequence[Value]
    ) -> tuple[tuple[list[Value], dict[int, Value]], Any]:
        """`((outputs, final), rest)`: `self(values)`, with final contents of refs as outputs, too.

        `final` has those of the variables that the function writes, by the position in
        `inputs.refs`.
        """

    @abstractmethod
    def run(self, transformed: Callable[[list[Value]], tuple[Any, ...]]) -> tuple[Any, ...]:
        """`transformed(values)`, one of JAX's transformations of this function, as one operation.

        `transformed` returns a tuple, whose last item is this function's `rest`. The state in it is
        written back to the refs, and the auxiliary data take its place in the result.
        """

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


def as_variable(x: Value) -> Value:
    """A number as an array if it has a tangent. Others stay Python's or NumPy's, as in JAX."""
    if not isinstance(x, jax.typing.ArrayLike) or isinstance(x, jax.Array):
        return x
    return _jax.as_array(x) if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else x
