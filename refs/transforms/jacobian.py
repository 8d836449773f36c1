"""`refs.jacfwd`, `refs.jacrev` and `refs.hessian`: whole derivatives of array-valued functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from refs.transforms._differentiable import Differentiable, derivative
from refs.transforms._inputs import Inputs
from refs.transforms.vmap import vmap


def jacfwd(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
) -> Callable[..., Any]:
    """Makes a function that evaluates the Jacobian of `fun`, column by column. As `jax.jacfwd`.

    Args:
      fun: a function over refs that returns arrays.
      argnums: which positional arguments to differentiate with respect to: arrays, refs (with
        respect to their contents when the call begins), views and pytrees of them.
      has_aux: whether `fun` returns a pair, of which the second is auxiliary data.
      holomorphic: whether `fun` is promised to be holomorphic, of complex variables.

    Returns:
      A function of `fun`'s arguments: the Jacobian, or `(Jacobian, aux)`. At each leaf of the
      output it has the structure of the differentiated argument, or is a tuple of them; each array
      there is of the output's shape followed by the variable's.

    Raises:
      RefTypeError: when called, if a variable is not real-valued.
      RefValueError: when called, if a ref is a variable twice.
      RefEscapeError: when called, if the output holds a ref.

    >>> w = refs.new_ref(jnp.array([1.0, 2.0]))
    >>> refs.jacfwd(lambda w: w[...] ** 2)(w)
    Array([[2., 0.],
           [0., 4.]], dtype=float32)
    """

    def transform(f: Any) -> Any:
        return jax.jacfwd(f, has_aux=True, holomorphic=holomorphic)

    return _jacobian("jacfwd", transform, fun, argnums, has_aux, holomorphic, False)


def jacrev(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Makes a function that evaluates the Jacobian of `fun`, row by row. As `jax.jacrev`.

    Args, returns, raises: as `jacfwd`; with `allow_int`, variables may be integers, and their
    Jacobian is of dtype `float0`.

    >>> w = refs.new_ref(jnp.array([1.0, 2.0]))
    >>> refs.jacrev(lambda w: w[...] ** 2)(w)
    Array([[2., 0.],
           [0., 4.]], dtype=float32)
    """

    def transform(f: Any) -> Any:
        return jax.jacrev(f, has_aux=True, holomorphic=holomorphic, allow_int=allow_int)

    return _jacobian("jacrev", transform, fun, argnums, has_aux, holomorphic, allow_int)


def hessian(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
) -> Callable[..., Any]:
    """Makes a function that evaluates the Hessian of `fun`. As `jax.hessian`.

    What `fun` writes to refs is written once.

    Args, returns, raises: as `jacfwd`, of which this is the composition with `jacrev`.

    >>> n = refs.new_ref(jnp.int32(0))
    >>> def f(x):
    ...     n[...] += 1
    ...     return x**3
    >>> refs.hessian(f)(2.0), n[...]
    (Array(12., dtype=float32, weak_type=True), Array(1, dtype=int32))
    """
    inner = jacrev(fun, argnums, has_aux, holomorphic)
    return jacfwd(inner, argnums, has_aux, holomorphic)


def _jacobian(
    doing: str,
    transform: Callable[..., Any],
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    holomorphic: bool,
    allow_int: bool,
) -> Callable[..., Any]:
    def derive(f: Differentiable, inputs: Inputs) -> Any:
        by_row = doing == "jacrev" and f.has_backward_effects
        rows, aux = _row_by_row(f) if by_row else f.run(transform(f))
        result = f.outputs([inputs.unflatten(row) for row in rows])
        return (result, aux) if has_aux else result

    return derivative(doing, fun, argnums, has_aux, holomorphic, allow_int, derive)


def _row_by_row(f: Differentiable) -> tuple[list[Any], Any]:
    """`jacrev` of a function whose backward pass may touch refs, once for each row."""
    out, pullback, aux = f.run(lambda values: jax.vjp(f, values, has_aux=True))

    def rows(k: int) -> list[Any]:
        def row(ct: Any) -> list[Any]:
            cts = [ct if j == k else jnp.zeros_like(x) for j, x in enumerate(out)]
            return f.backward(lambda _, cts: pullback(cts)[0], [], cts)

        x = out[k]
        basis = jnp.eye(x.size, dtype=x.dtype).reshape(x.size, *x.shape)
        return [r.reshape(*x.shape, *r.shape[1:]) for r in vmap(row)(basis)]

    return [rows(k) for k in range(len(out))], aux
