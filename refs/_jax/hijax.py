"""JAX's "hi" primitives, expanded to the operations that they stand for."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.hijax import MappingSpec as MappingSpec
from jax._src.interpreters.batching import is_vmappable as is_vmappable
from jax._src.interpreters.batching import spec_types
from jax._src.lax.control_flow import solves

from refs._jax.names import is_ref_type
from refs._types import Eqn, PyTree, Value

__all__ = [
    "MappingSpec", "has_its_own_axes", "hi_function", "is_axis", "is_of_hi_type", "is_vmappable",
]  # fmt: skip

# The newest JAX makes a hi primitive of `custom_root`.
_ROOT: Any = getattr(solves, "CustomRoot", ())
# A part of the derivative of a `custom_root`. Its own derivative is that of its expansion.
_DERIVED: Any = getattr(solves, "_RootLinearMap", ())


def hi_function(
    eqn: Eqn, places: Sequence[int], refuse: Callable[[], Any]
) -> Callable[..., list[Value]]:
    """The expansion of a hi primitive, as a function of its distinct operands, refs among them.

    `places` says for each operand which of the distinct ones it is.

    Where the primitive's derivative may differ from that of its expansion, differentiating the
    function calls `refuse`, which raises.
    """
    prim = eqn.params["_prim"]

    def as_given(items: Sequence[Any]) -> Any:
        return jax.tree.unflatten(prim.in_tree, [items[k] for k in places])

    def expanded(*items: Any) -> list[Value]:
        return jax.tree.leaves(prim.expand(*as_given(items)))

    if isinstance(prim, _DERIVED):
        return expanded
    call = jax.custom_jvp(expanded)
    call.defjvp(
        _root_rule(prim, as_given, call) if isinstance(prim, _ROOT) else lambda *_: refuse()
    )
    return call


def _root_rule(
    prim: Any, as_given: Callable[..., Any], call: Callable[..., Any]
) -> Callable[[PyTree, PyTree], Any]:
    """The JVP rule of `custom_root`: the implicit function theorem.

    It works like `CustomRoot.lin`, with refs among the operands.
    """

    def rule(primals: PyTree, tangents: PyTree) -> Any:
        out = call(*primals)
        solution = jax.tree.unflatten(prim.out_tree, out)
        root, aux = solution if prim.has_aux else (solution, ())
        _, _, f_consts, tangent_consts = as_given(primals)
        given, tree = jax.tree.flatten(f_consts)
        rates = jax.tree.leaves(as_given(tangents)[2])
        smooth = [k for k, x in enumerate(given) if jnp.issubdtype(x.dtype, jnp.inexact)]

        def residual(values: list[Value]) -> Any:
            consts = [*given]
            for k, value in zip(smooth, values, strict=True):
                consts[k] = jax.new_ref(value) if _is_ref(given[k]) else value
            return prim.f(jax.tree.unflatten(tree, consts), root)

        values, rates = ([_value(xs[k]) for k in smooth] for xs in (given, rates))
        _, moved = jax.jvp(residual, (values,), (rates,))
        root_dot = jax.tree.map(operator.neg, prim.tangent_solve(tangent_consts, root, moved))
        return out, [*jax.tree.leaves(root_dot), *map(jnp.zeros_like, jax.tree.leaves(aux))]

    return rule


def _is_ref(x: Value) -> bool:
    return is_ref_type(jax.typeof(x))


def _value(x: Value) -> Value:
    return x[...] if _is_ref(x) else x


def is_of_hi_type(x: Value) -> bool:
    """Whether `x` has a type of the user's, without shape and dtype."""
    return jax.typeof(x).is_high and not _is_ref(x)


def is_axis(x: Value) -> bool:
    """Whether `jax.vmap` takes `x` for an axis: an integer, or the spec of a user's type."""
    return type(x) is int or type(x) in spec_types or isinstance(x, MappingSpec)


def has_its_own_axes(x: Value) -> bool:
    """Whether `x` is of a type that defines how it is mapped, or such a type's spec."""
    return is_vmappable(x) or (is_axis(x) and type(x) is not int)
