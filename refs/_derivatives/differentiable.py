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
from refs._types import PyTreeDef, Value
from refs.errors import RefEscapeError, RefTypeError


class Differentiable(ABC):
    """A call as a pure function of its variables: `_direct` says how, or `_traced`.

    `check` is called with the value of each variable, when it is known, and may refuse it.

    Attributes:
      out_tree: the structure of the function's output, auxiliary data apart. It is known once the
        function has run.
      has_backward_effects: whether the backward pass may touch refs, which is known then, too.
    """

    out_tree: PyTreeDef
    has_backward_effects: bool

    def __init__(self, doing: str, inputs: Inputs, has_aux: bool, check: Callable[[Any], None]):
        self.doing, self.inputs, self.has_aux, self.check = doing, inputs, has_aux, check

    @abstractmethod
    def __call__(self, values: Sequence[Value]) -> tuple[list[Any], Any]:
        """(outputs, what else comes of it), for these values of the variables."""

    @abstractmethod
    def with_contents(self, values: Sequence[Value]) -> tuple[Any, Any]:
        """`self(values)`, with the final contents of the variables that it writes as outputs.

        They are a dictionary, by the number of the ref. Of the others, nothing has become.
        """

    @abstractmethod
    def run(self, transformed: Callable[[list[Any]], tuple[Any, ...]]) -> tuple[Any, ...]:
        """`transformed(values)`, one of JAX's transformations of this function, as one operation.

        It gives a tuple, of which the last is what else this function returns. The state in that
        is written back, and only the auxiliary data are left of it.
        """

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

    def outputs(self, arrays: Sequence[Value]) -> Any:
        """The function's output, from one item for each array in it."""
        return jax.tree.unflatten(self.out_tree, arrays)

    def escaped(self, described: str) -> RefEscapeError:
        """The error about a ref in the output."""
        return RefEscapeError(
            f"{self.doing} of a function that returns {described}: return its value, `ref[...]`, "
            "or the ref as auxiliary data (`has_aux`)"
        )


def returning_pair(doing: str, fun: Callable[..., Any]) -> Callable[..., Any]:
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
        return result[0], result[1]

    return checked


def as_variable(x: Value) -> Any:
    """An array where it has a tangent; other numbers stay those of Python and NumPy, as in JAX."""
    if not isinstance(x, jax.typing.ArrayLike) or isinstance(x, jax.Array):
        return x
    return _jax.as_array(x) if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else x
