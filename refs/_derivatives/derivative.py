"""Code shared by the differentiating transformations: what is checked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from refs import _jax
from refs._derivatives.at_top_level import op_by_op
from refs._derivatives.differentiable import Check, Differentiable
from refs._derivatives.inputs import Inputs
from refs._transactions.signature import check_callable
from refs._types import PyTree, Value
from refs.errors import RefTypeError, RefValueError


def differentiable(
    doing: str,
    fun: Callable[..., Any],
    inputs: Inputs,
    has_aux: bool,
    check: Check = lambda k, x: None,
) -> Differentiable:
    """A call as a pure function."""
    check_callable(doing, fun)
    return Differentiable(doing, fun, inputs, has_aux, check)


def check_reduce_axes(doing: str, reduce_axes: Sequence[Any]) -> None:
    """JAX still has the keyword, but accepts only an empty value."""
    if reduce_axes:
        raise RefValueError(f"{doing}: reduce_axes={reduce_axes!r} means nothing any more in JAX")


def derivative(
    doing: str,
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    holomorphic: bool,
    allow_int: bool,
    derive: Callable[[Differentiable, Inputs], PyTree],
) -> Callable[..., PyTree]:
    """A function of `fun`'s arguments: `derive(f, inputs)` for the call as a pure function `f`."""
    check_callable(doing, fun)

    @functools.wraps(fun)
    def derived(*args: Any, **kwargs: Any) -> PyTree:
        def check(k: int, x: Value) -> None:
            _check_variable(doing, inputs, k, x, holomorphic, allow_int)

        inputs = Inputs.of(doing, argnums, args, kwargs)
        return op_by_op(lambda: derive(differentiable(doing, fun, inputs, has_aux, check), inputs))

    return derived


def _check_variable(
    doing: str, inputs: Inputs, k: int, x: Value, holomorphic: bool, allow_int: bool
) -> None:
    """Refuses the `k`-th variable if it has no gradient of its own type, as JAX does."""
    if _jax.is_of_hi_type(x):  # Such a type defines its tangents itself.
        return
    dtype = jnp.result_type(x)
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        raise RefTypeError(
            f"{doing} with respect to {inputs.describe(k)}, of dtype {dtype}: it has no derivative"
        )
    if holomorphic and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise RefTypeError(
            f"{doing} with holomorphic=True with respect to {inputs.describe(k)}, of dtype "
            f"{dtype}: it must be complex"
        )
    if jnp.issubdtype(dtype, jnp.inexact) or allow_int:
        return
    has_flag = doing not in ("jacfwd", "hessian")
    way_out = "close over it, or set allow_int=True" if has_flag else "or close over it"
    raise RefTypeError(
        f"{doing} with respect to {inputs.describe(k)}, of dtype {dtype}: it has no gradient of "
        f"that type. Pass it as another argument, {way_out}"
    )


def check_output(doing: str, x: Value, holomorphic: bool) -> None:
    """Refuses an output that has no gradient of the variables' type, as JAX does."""
    wanted, word = (jnp.complexfloating, "complex") if holomorphic else (jnp.floating, "real")
    if not jnp.issubdtype(dtype := jnp.result_type(x), wanted):
        what = f"an array of shape {shape} and" if (shape := jnp.shape(x)) else "a scalar of"
        raise RefTypeError(
            f"{doing} of a function that returns {what} dtype {dtype}: with "
            f"holomorphic={holomorphic} its value must be {word}"
        )
