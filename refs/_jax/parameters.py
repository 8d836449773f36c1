"""Decodes parameters of equations whose names or form depend on JAX's version."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax._src.custom_batching import check_vmap_rule_trees
from jax._src.sharding_impls import UNSPECIFIED
from jax.custom_derivatives import SymbolicZero
from jax.extend import linear_util as lu
from jax.interpreters.ad import Zero

from refs._jax.calls import without_constants
from refs._jax.equations import as_closed, at_its_own_lines, new_var
from refs._jax.names import zeros_like_aval
from refs._jax.primitives import custom_jvp_call_p, custom_vjp_call_p, jit_p
from refs._types import Atom, Aval, ClosedJaxpr, Eqn, Jaxpr, Sharding, Value

__all__ = [
    "JitParams", "can_accumulate_gradients", "define_backward", "forward_rule", "has_rules",
    "instantiate", "is_custom_vjp", "is_symbolic_zero", "is_unspecified", "jit_params", "jvp_rule",
    "scan_params", "symbolic_zero", "tangent_type", "vjp_rule", "vmap_rule",
    "with_own_constants", "xla_copies_less", "xla_merges_slices", "zero_tangent",
]  # fmt: skip


class ScanParams(NamedTuple):
    jaxpr: ClosedJaxpr
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int


def scan_params(params: dict[str, Any]) -> ScanParams:
    if "ft_in" in params:
        num_consts, num_carry, _ = (len(part) for part in params["ft_in"].unpack())
    else:  # pragma: no cover, JAX before 0.12
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    return ScanParams(
        as_closed(params["jaxpr"]),
        num_consts,
        num_carry,
        params["length"],
        params["reverse"],
        params["unroll"],
    )


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


class JvpRule(NamedTuple):
    """A user's JVP rule as jaxprs: `trace(zeros) -> (jaxpr, consts, zeros of output tangents)`.

    `zeros` says for each primal after the first `num_consts` whether its tangent is symbolically
    zero. The jaxpr takes these primals, then the tangents that are not zero. It returns the primal
    outputs, then their tangents that are not zero.
    """

    num_consts: int
    symbolic_zeros: bool
    trace: Callable[[Sequence[bool]], tuple[Jaxpr, Sequence[Value], Sequence[bool]]]


def jvp_rule(params: dict[str, Any]) -> JvpRule:
    return JvpRule(
        params["num_consts"],
        params["symbolic_zeros"],
        lambda zeros: at_its_own_lines()(params["jvp_jaxpr_fun"].call_wrapped)(*zeros),
    )


class VjpRule(NamedTuple):
    """A user's VJP rule: `fwd(nonzeros) -> (jaxpr, consts)` and `bwd(residuals, cotangents)`.

    The forward jaxpr takes the primals after the first `num_consts` and returns the residuals that
    are not inputs, then the primal outputs. `residual_forwards`, to be called after `fwd`, says
    for each residual which primal it is, or None. `bwd` returns a cotangent, or a symbolic zero
    (`is_symbolic_zero`), for each primal after the first `num_consts`; and the rule's logs, a dict
    of pytrees, or None.
    """

    num_consts: int
    symbolic_zeros: bool
    fwd: Callable[[Sequence[bool]], tuple[Jaxpr, Sequence[Value]]]
    residual_forwards: Callable[[], Sequence[int | None]]
    bwd: Callable[[Sequence[Any], Sequence[Value]], tuple[list[Value], Any]]


def vjp_rule(params: dict[str, Any]) -> VjpRule:
    def bwd(residuals: Sequence[Any], cotangents: Sequence[Value]) -> tuple[list[Value], Any]:
        out = at_its_own_lines()(params["bwd"].call_wrapped)(*residuals, *cotangents)
        in_cts, logs = out if _can_log else (out, None)
        return list(in_cts), logs

    return VjpRule(
        params["num_consts"],
        params["symbolic_zeros"],
        lambda nonzeros: _traced_anew(params, params["fwd_jaxpr_thunk"])(*nonzeros),
        lambda: params["out_trees"]()[2],
        bwd,
    )


_can_log = hasattr(jax.custom_vjp, "defvjp_with_logs")


def define_backward(
    fun: Any, fwd: Callable[..., Any], bwd: Callable[..., tuple[tuple[Value, ...], Any]]
) -> None:
    """`fun.defvjp(fwd, bwd)`, where `bwd` returns its logs too: the oldest JAX takes none.

    With symbolic zeros, so that `fwd` is told which arguments are differentiated.
    """
    if _can_log:
        fun.defvjp_with_logs(fwd, bwd, symbolic_zeros=True)
    else:  # pragma: no cover, JAX before 0.12
        fun.defvjp(fwd, lambda *given: bwd(*given)[0], symbolic_zeros=True)


def _traced_anew(params: dict[str, Any], thunk: lu.WrappedFun) -> Callable[..., Any]:
    """A forward rule, as a function that traces anew if its flags may change the residuals' tree.

    JAX keeps a trace for each set of flags, but the residuals' tree of its last trace only.
    """
    trace = at_its_own_lines()(thunk.call_wrapped)
    if not params["symbolic_zeros"]:
        return trace
    known = inspect.getclosurevars(thunk.f).nonlocals.get("cells", {})

    def traced(*nonzeros: Any) -> Any:
        known.clear()
        try:
            return trace(*nonzeros)
        finally:
            known.clear()

    return traced


def is_custom_vjp(eqn: Eqn) -> bool:
    """Whether an equation calls a function with a user's backward rule."""
    return eqn.primitive is custom_vjp_call_p


def has_rules(eqn: Eqn) -> bool:
    """Whether an equation calls a function with a user's derivative rules."""
    return eqn.primitive is custom_jvp_call_p or eqn.primitive is custom_vjp_call_p


def forward_rule(eqn: Eqn) -> tuple[Jaxpr, Sequence[Value], list[Atom]]:
    """A user's JVP or forward rule, traced: its jaxpr, its constants and its primal operands.

    All operands that can be differentiated are. The jaxpr of a JVP rule then takes tangents, too.
    """
    operands: list[Atom] = eqn.invars[eqn.params["num_consts"] :]
    smooth = [v.aval.to_tangent_aval().dtype != jax.dtypes.float0 for v in operands]
    if eqn.primitive is custom_jvp_call_p:
        jaxpr, consts, _ = jvp_rule(eqn.params).trace([not s for s in smooth])
    else:
        with _unnoticed(eqn.params):
            jaxpr, consts = vjp_rule(eqn.params).fwd(smooth)
    return jaxpr, consts, operands


@contextmanager
def _unnoticed(params: dict[str, Any]) -> Iterator[None]:
    """Meanwhile a forward rule is traced. Then restores JAX's own record of its residuals."""
    stores: list[Any] = []
    if params["symbolic_zeros"]:
        trace = inspect.getclosurevars(params["fwd_jaxpr_thunk"].f).nonlocals["fn"]
        stores = [s for s in inspect.getclosurevars(trace).nonlocals["fwd"].stores if s is not None]
    kept: list[list[Any]] = []
    for store in stores:
        try:
            kept.append([store.val])
        except lu.StoreException:
            kept.append([])
    try:
        yield
    finally:
        for store, values in zip(stores, kept, strict=True):
            store.reset()
            for value in values:
                store.store(value)


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

# From this version on XLA expands `optimization_barrier` after fusion, and copies less in branches.
xla_copies_less = jaxlib.version.__version_info__ >= (0, 11, 2)
# Before, it takes a slice of a slice for one slice, whose places end elsewhere.
xla_merges_slices = not xla_copies_less


def is_symbolic_zero(x: Value) -> bool:
    return isinstance(x, Zero | SymbolicZero)


def tangent_type(x: Value) -> Aval:
    """The type of the tangents of a value."""
    return jax.typeof(x).to_tangent_aval()


def symbolic_zero(aval: Aval) -> Any:
    """A symbolic zero of a type."""
    return Zero(aval)


def zero_tangent(x: Value) -> Value:
    """The zero among the tangents of a value."""
    if jnp.issubdtype(jnp.result_type(x), jnp.inexact):
        return jnp.zeros_like(x)
    return np.zeros(jnp.shape(x), jax.dtypes.float0)


def instantiate(x: Value) -> Value:
    """The array that a symbolic zero stands for; anything else as it is."""
    return zeros_like_aval(x.aval) if is_symbolic_zero(x) else x
