"""`refs.jacfwd`, `refs.jacrev` and `refs.hessian`: whole derivatives of array-valued functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp

from refs import _jax
from refs._derivatives.at_top_level import backward
from refs._derivatives.derivative import check_output, derivative
from refs._derivatives.differentiable import Differentiable
from refs._derivatives.inputs import Inputs
from refs._indexing.sharded import sharded_in_rows
from refs._transforms.vmap import vmap
from refs._types import PyTree, Value

P = ParamSpec("P")


def jacfwd(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
) -> Callable[P, Any]:
    """Makes a function that evaluates the Jacobian of `fun`, column by column.

    Works like `jax.jacfwd`.

    Args:
      fun: a function over refs that returns arrays.
      argnums: which positional arguments to differentiate with respect to: arrays, refs (with
        respect to their contents when the call begins), views and pytrees of them.
      has_aux: whether `fun` returns a pair, of which the second is auxiliary data.
      holomorphic: whether `fun` is promised to be holomorphic, with complex variables.

    Returns:
      A function of `fun`'s arguments: the Jacobian, or `(Jacobian, aux)`. At each leaf of the
      output, the Jacobian has the structure of the differentiated argument, or is a tuple of such
      structures. An array in it has the shape `[*output.shape, *variable.shape]`.

    Raises:
      RefTypeError: when called, if a variable is not real-valued.
      RefValueError: when called, if a ref is a variable twice.
      RefEscapeError: when called, if the output holds a ref.

    >>> w = refs.new_ref(jnp.array([1.0, 2.0]))
    >>> refs.jacfwd(lambda w: w[...] ** 2)(w)
    Array([[2., 0.],
           [0., 4.]], dtype=float32)
    """

    return _by_columns("jacfwd", fun, argnums, has_aux, holomorphic)


def jacrev(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, Any]:
    """Makes a function that evaluates the Jacobian of `fun`, row by row. Works like `jax.jacrev`.

    Arguments, result and errors are those of `jacfwd`. With `allow_int`, variables may be integers,
    and their Jacobian is zero.

    >>> w = refs.new_ref(jnp.array([1.0, 2.0]))
    >>> refs.jacrev(lambda w: w[...] ** 2)(w)
    Array([[2., 0.],
           [0., 4.]], dtype=float32)
    """

    return _by_rows("jacrev", fun, argnums, has_aux, holomorphic, allow_int)


def hessian(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
) -> Callable[P, Any]:
    """Makes a function that evaluates the Hessian of `fun`. Works like `jax.hessian`.

    The writes of `fun` to refs happen once.

    The Hessian is `jacfwd` of `jacrev`. Arguments, result and errors are those of `jacfwd`.

    >>> n = refs.new_ref(jnp.int32(0))
    >>> def f(x):
    ...     n[...] += 1
    ...     return x**3
    >>> refs.hessian(f)(2.0), n[...]
    (Array(12., dtype=float32, weak_type=True), Array(1, dtype=int32))
    """
    inner = _by_rows("hessian", fun, argnums, has_aux, holomorphic)
    return _by_columns("hessian", inner, argnums, has_aux, holomorphic)


def _by_columns(
    doing: str,
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    holomorphic: bool,
) -> Callable[..., Any]:
    """`jacfwd` of `fun`; `doing` is the transformation's name in messages."""

    def derive(f: Differentiable, inputs: Inputs) -> PyTree:
        columns, aux = f.run(jax.jacfwd(f, has_aux=True, holomorphic=holomorphic))
        result = f.outputs([inputs.unflatten(column) for column in columns])
        return (result, aux) if has_aux else result

    return derivative(doing, fun, argnums, has_aux, holomorphic, False, derive)


def _by_rows(
    doing: str,
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    holomorphic: bool,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """`jacrev` of `fun`, likewise."""

    def derive(f: Differentiable, inputs: Inputs) -> PyTree:
        rows, aux = _row_by_row(f, holomorphic)
        result = f.outputs([inputs.unflatten(row) for row in rows])
        return (result, aux) if has_aux else result

    return derivative(doing, fun, argnums, has_aux, holomorphic, allow_int, derive)


def _row_by_row(f: Differentiable, holomorphic: bool) -> tuple[list[list[Value]], PyTree]:
    """(for each output, an array `[*output.shape, *value.shape]` for each value, auxiliary data)"""

    def pulled(values: list[Value]) -> tuple[Any, ...]:
        [*out], pullback, rest = jax.vjp(f, values, has_aux=True)
        for x in out:
            check_output(f.doing, x, holomorphic)
        return values, out, pullback, rest

    values, out, pullback, aux = f.run(pulled)
    # Each row runs the backward rules, with their effects on refs.
    mapped = vmap if f.has_backward_effects else jax.vmap

    def rows(k: int) -> list[Value]:
        def row(ct: Value) -> list[Value]:
            cts = [ct if j == k else jnp.zeros_like(x) for j, x in enumerate(out)]
            return backward(lambda _, cts: pullback(cts)[0], [], cts, f.has_backward_effects)

        x = jnp.asarray(out[k])
        basis = jnp.eye(x.size, dtype=x.dtype).reshape(x.size, *x.shape)  # a cotangent a row
        basis = _jax.vary_as(sharded_in_rows(basis, x), x)
        return [
            _jax.typed_like(r.reshape((*x.shape, *r.shape[1:])), value)
            for r, value in zip(mapped(row)(basis), values, strict=True)
        ]

    return [rows(k) for k in range(len(out))], aux
