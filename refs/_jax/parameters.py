"""Decodes parameters of equations whose names or form depend on JAX's version."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jaxlib
from jax._src.custom_batching import check_vmap_rule_trees
from jax._src.sharding_impls import UNSPECIFIED
from jax.custom_derivatives import SymbolicZero
from jax.interpreters.ad import Zero

from refs._jax.calls import without_constants
from refs._jax.equations import as_closed, new_var
from refs._jax.names import zeros_like_aval
from refs._jax.primitives import jit_p
from refs._types import Aval, ClosedJaxpr, Sharding, Value

__all__ = [
    "JitParams", "can_accumulate_gradients", "define_backward", "instantiate",
    "is_symbolic_zero", "is_unspecified", "jit_params", "symbolic_zero", "tangent_type",
    "vmap_rule", "with_own_constants", "xla_merges_slices",
]  # fmt: skip


class JitParams(NamedTuple):
    jaxpr: ClosedJaxpr
    name: str
    inline: Any
    keep_unused: bool
    in_shardings: tuple[Any, ...]  # each a `Sharding`, or JAX's mark for an unspecified one
    out_shardings: tuple[Any, ...]


def jit_params(params: dict[str, Any]) -> JitParams:
    return JitParams(
        as_closed(params["jaxpr"]),
        params["name"],
        params["inline"],
        params["keep_unused"],
        params["in_shardings"],
        params["out_shardings"],
    )


def with_own_constants(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr with the constants of the jits in it, at any depth, for constants of its own."""
    eqns, variables, values = [], [], []
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive is jit_p and (inner := with_own_constants(eqn.params["jaxpr"])).consts:
            more = [new_var(v.aval) for v in inner.jaxpr.constvars]
            variables += more
            values += inner.consts
            params = {"jaxpr": without_constants(inner)}
            for name, unspecified in _OF_INPUTS.items():
                params[name] = (unspecified,) * len(more) + eqn.params[name]
            eqn = eqn.replace(invars=[*more, *eqn.invars], params={**eqn.params, **params})
        eqns.append(eqn)
    if not values:
        return closed
    constvars = [*closed.jaxpr.constvars, *variables]
    jaxpr = closed.jaxpr.replace(constvars=constvars, eqns=eqns)
    return closed.replace(jaxpr=jaxpr, consts=[*closed.consts, *values])


_OF_INPUTS = {
    "donated_invars": False,
    "in_layouts": None,
    "in_shardings": UNSPECIFIED,
}


def is_unspecified(sharding: Sharding | None) -> bool:
    return type(sharding).__name__ == "UnspecifiedValue"


def define_backward(
    fun: Any,
    fwd: Callable[..., Any],
    bwd: Callable[..., tuple[tuple[Value, ...], Any]],
    options: Mapping[str, bool],
) -> None:
    """`fun.defvjp(fwd, bwd)`, where `bwd` returns its logs too: the oldest JAX takes none.

    With symbolic zeros, so that `fwd` is told which arguments are differentiated.
    """
    if hasattr(fun, "defvjp_with_logs"):
        fun.defvjp_with_logs(fwd, bwd, symbolic_zeros=True, **options)
    else:  # pragma: no cover, JAX before 0.12
        fun.defvjp(fwd, lambda *given: bwd(*given)[0], symbolic_zeros=True)


def vmap_rule(params: dict[str, Any]) -> Callable[..., tuple[list[Value], list[bool]]]:
    """A user's batching rule: `rule(size, is_batched, operands) -> (outputs, which are batched)`.

    Batched operands and outputs are `[size, *shape]`.
    """

    def rule(size: int, is_batched: Sequence[bool], args: Sequence[Value]) -> Any:
        flags, given = (jax.tree.unflatten(params["in_tree"], x) for x in (is_batched, args))
        out, out_batched = params["rule"](size, [*flags], *given)
        leaves, tree = jax.tree.flatten(out)
        flags, tree_of_flags = jax.tree.flatten(out_batched)
        check_vmap_rule_trees(params["rule"], params["out_tree"], tree, tree_of_flags)
        return leaves, flags

    return rule


# The oldest JAX's backward pass can't accumulate into a ref where a slice was read.
can_accumulate_gradients = jax.__version_info__ >= (0, 12)

# Before this version XLA takes a slice of a slice for one slice, whose places end elsewhere. On
# several devices it also writes rows elsewhere if a slice of the same array was written before.
xla_merges_slices = jaxlib.version.__version_info__ < (0, 11, 2)


def is_symbolic_zero(x: Value) -> bool:
    return isinstance(x, Zero | SymbolicZero)


def tangent_type(x: Value) -> Aval:
    """The type of the tangents of a value."""
    return jax.typeof(x).to_tangent_aval()


def symbolic_zero(aval: Aval) -> Any:
    """A symbolic zero of a type."""
    return Zero(aval)


def instantiate(x: Value) -> Value:
    """The array that a symbolic zero stands for; anything else as it is."""
    return zeros_like_aval(x.aval) if is_symbolic_zero(x) else x
