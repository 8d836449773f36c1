"""`refs.in_place`: the pass that `refs.jit` ends with, for functions of arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import jax

from refs import _jax
from refs._discharge import discharge
from refs._handles.predicates import is_ref
from refs._inplace import run_in_place
from refs._tracing import touch_analysis
from refs.errors import RefTypeError

P = ParamSpec("P")
R = TypeVar("R")


def in_place(fun: Callable[P, R]) -> Callable[P, R]:
    """Compiles a function of arrays so that XLA runs its updates in place.

    `x.at[i].set(v)`, also in loops, branches and derivatives, then costs as much as the part that
    it touches and not all of `x`. `refs.jit` does this by itself; this is for functions without
    refs. Use it last, around functions that are differentiated or mapped and directly under
    `jax.jit`, and donate the arrays that are updated:

        step = jax.jit(refs.in_place(step), donate_argnums=0)

    Args:
      fun: a function of arrays, in pytrees as JAX takes them.

    Returns:
      A function of the same values (where floats are summed into an array they may be summed in
      another order). It can be transformed like any other; derivatives of it are those of `fun`,
      and not in place unless they are wrapped themselves.

    Raises:
      RefTypeError: when called, if `fun` takes or closes over a ref.

    >>> @jax.jit
    ... @refs.in_place
    ... def swap(x, i, j):
    ...     return x.at[i].set(x[j]).at[j].set(x[i])
    >>> swap(jnp.arange(4), 0, 2)
    Array([2, 1, 0, 3], dtype=int32)
    """

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if _jax.is_jit_disabled():
            return fun(*args, **kwargs)
        return call_in_place(fun, *args, **kwargs)

    return wrapped


def call_in_place(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`fun(*args, **kwargs)`, compiled in place."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    _check_no_refs(leaves)

    def flat(*leaves: Any) -> Any:
        args, kwargs = jax.tree.unflatten(tree, leaves)
        return fun(*args, **kwargs)

    closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
    _check_no_refs(closed.consts)
    if touch_analysis.holds_refs(closed):  # refs that `fun` makes
        closed = discharge(closed)
    return jax.tree.unflatten(jax.tree.structure(shapes), run_in_place(closed, leaves))


def _check_no_refs(values: Iterable[Any]) -> None:
    if any(map(is_ref, values)):
        raise RefTypeError(
            "in_place of a function over refs: it takes functions of arrays. `refs.jit` compiles "
            "in place by itself"
        )
