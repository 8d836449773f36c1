"""`refs.grad` and `refs.value_and_grad`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp

from refs import _jax
from refs._derivatives.at_top_level import backward
from refs._derivatives.derivative import check_output, check_reduce_axes, derivative
from refs._derivatives.differentiable import Differentiable
from refs._derivatives.inputs import Inputs
from refs._types import PyTree, Value
from refs.errors import RefTypeError

P = ParamSpec("P")


def value_and_grad(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
) -> Callable[P, tuple[Any, Any]]:
    """Makes a function that evaluates `fun` and its gradient. Works like `jax.value_and_grad`.

    The differentiated arguments are arrays, refs, views, and pytrees of them. A ref's gradient is
    an array: the derivative with respect to its contents when the call begins. The writes of `fun`
    to refs happen once. Like auxiliary data, the final contents of refs aren't differentiated.

    Args:
      fun: a function over refs that returns a scalar, or with `has_aux` a scalar and anything.
      argnums: which positional arguments to differentiate with respect to.
      has_aux: whether `fun` returns a pair, of which the second is auxiliary data.
      holomorphic: whether `fun` is promised to be holomorphic, with complex variables.
      allow_int: whether variables may be integers, whose gradient is of dtype `float0`.
      reduce_axes: has no meaning any more, as in JAX, and must be empty.

    Returns:
      A function of `fun`'s arguments: `(value, gradient)`, or `((value, aux), gradient)`. The
      gradient has the structure of the differentiated argument, or is a tuple of them.

    Raises:
      RefTypeError: when called, if the value of `fun` is not a real scalar, or a variable is not
        real-valued.
      RefValueError: when called, if a ref is a variable twice.
      RefEscapeError: when called, if the value is a ref.

    >>> n = refs.new_ref(jnp.int32(0))
    >>> def loss(w, x):
    ...     n[...] += 1
    ...     return (w[...] * x).sum()
    >>> w = refs.new_ref(jnp.array([1.0, 2.0]))
    >>> refs.value_and_grad(loss)(w, jnp.array([3.0, 4.0]))
    (Array(11., dtype=float32), Array([3., 4.], dtype=float32))
    >>> n
    Ref(1, dtype=int32)
    """
    check_reduce_axes("value_and_grad", reduce_axes)
    return _gradient("value_and_grad", fun, argnums, has_aux, holomorphic, allow_int)


def grad(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
) -> Callable[P, Any]:
    """Makes a function that evaluates the gradient of `fun`. Works like `jax.grad`.

    Arguments and errors are those of `value_and_grad`.

    Returns:
      A function of `fun`'s arguments: the gradient, or `(gradient, aux)`.

    >>> log = refs.new_ref(jnp.zeros(2))
    >>> def loss(x):
    ...     log[0] = x
    ...     log[1] = x**2
    ...     return log[0] * log[1]
    >>> refs.grad(loss)(2.0)
    Array(12., dtype=float32, weak_type=True)
    >>> log
    Ref([2., 4.], dtype=float32)
    """
    check_reduce_axes("grad", reduce_axes)
    both = _gradient("grad", fun, argnums, has_aux, holomorphic, allow_int)

    @functools.wraps(fun)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, gradient = both(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return gradient


def _gradient(
    doing: str,
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    holomorphic: bool,
    allow_int: bool,
) -> Callable[..., Any]:
    """`value_and_grad` of `fun`; `doing` is the transformation's name in messages."""

    def derive(f: Differentiable, inputs: Inputs) -> PyTree:
        def pulled(values: list[Value]) -> tuple[Any, ...]:
            [*out], pullback, rest = jax.vjp(f, values, has_aux=True)
            return _check_scalar(doing, f.outputs(out), holomorphic), pullback, rest

        value, pullback, aux = f.run(pulled)
        [cotangents] = backward(
            lambda _, cts: pullback(cts), [], [_jax.one_vjp(value)], f.has_backward_effects
        )
        gradient = inputs.unflatten(cotangents)
        return ((value, aux) if has_aux else value), gradient

    return derivative(doing, fun, argnums, has_aux, holomorphic, allow_int, derive)


def _check_scalar(doing: str, value: PyTree, holomorphic: bool) -> Value:
    """Returns `value` if it is one array of shape `[]`, with a dtype that has a gradient."""
    leaves = jax.tree.leaves(value)
    if len(leaves) != 1 or leaves[0] is not value:
        raise RefTypeError(
            f"{doing} of a function that returns a {type(value).__name__}: its value must be a "
            "scalar. With has_aux=True it may return a scalar and anything else"
        )
    if shape := jnp.shape(value):
        raise RefTypeError(
            f"{doing} of a function that returns an array of shape {shape}: its value must "
            "be a scalar. `refs.jacrev` differentiates arrays"
        )
    check_output(doing, value, holomorphic)
    return value
