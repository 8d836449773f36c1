"""Parameters of equations whose spelling depends on the version."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
from jax._src import ad_util, custom_batching
from jax._src import linear_util as lu

from refs._jax.equations import as_closed
from refs._jax.names import zeros_like_aval
from refs._jax.primitives import custom_jvp_call_p, custom_vjp_call_p
from refs._types import Atom, ClosedJaxpr, Eqn, Sharding, Value

__all__ = [
    "JitParams", "can_accumulate_gradients", "forward_rule", "has_rules", "instantiate",
    "is_custom_vjp", "is_symbolic_zero", "is_unspecified", "jit_params", "jvp_rule", "scan_params",
    "vjp_rule", "vmap_rule", "with_rules",
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
    else:
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
    in_shardings: tuple[Any, ...]
    out_shardings: tuple[Any, ...]
    compiler_options: dict[str, Any]


def jit_params(params: dict[str, Any]) -> JitParams:
    return JitParams(
        as_closed(params["jaxpr"]),
        params["name"],
        params["inline"],
        params["keep_unused"],
        params["in_shardings"],
        params["out_shardings"],
        dict(params["compiler_options_kvs"]),
    )


def is_unspecified(sharding: Sharding | None) -> bool:
    return type(sharding).__name__ == "UnspecifiedValue"


class JvpRule(NamedTuple):
    """A user's JVP rule as jaxprs: `trace(zeros) -> (closed jaxpr, which output tangents are 0)`.

    Inputs of the jaxpr are the primals after the first `num_consts`, then the tangents that are
    not symbolically zero; outputs are the primals, then the tangents not zero.
    """

    num_consts: int
    symbolic_zeros: bool
    trace: Callable[[Sequence[bool]], tuple[Any, Sequence[Any], Sequence[bool]]]


def jvp_rule(params: dict[str, Any]) -> JvpRule:
    return JvpRule(
        params["num_consts"],
        params["symbolic_zeros"],
        lambda zeros: params["jvp_jaxpr_fun"].call_wrapped(*zeros),
    )


class VjpRule(NamedTuple):
    """A user's VJP rule: `fwd(nonzeros) -> (jaxpr, consts)` and `bwd(residuals, cotangents)`.

    The forward jaxpr takes the primals after the first `num_consts` and returns the residuals that
    are not inputs, then the primal outputs. `residual_forwards`, to be called after `fwd`, says
    for each residual which primal it is, or None. `bwd` returns a cotangent, or a symbolic zero
    (`is_symbolic_zero`), for each primal after the first `num_consts`.
    """

    num_consts: int
    symbolic_zeros: bool
    fwd: Callable[[Sequence[bool]], tuple[Any, Sequence[Any]]]
    residual_forwards: Callable[[], Sequence[int | None]]
    bwd: Callable[[Sequence[Any], Sequence[Any]], list[Any]]


def vjp_rule(params: dict[str, Any]) -> VjpRule:
    def bwd(residuals: Sequence[Any], cotangents: Sequence[Value]) -> list[Any]:
        out = params["bwd"].call_wrapped(*residuals, *cotangents)
        # The newest JAX returns (cotangents, logs); the logs belong to `f_vjp.with_logs`.
        return list(out[0] if isinstance(out, tuple) and len(out) == 2 else out)

    return VjpRule(
        params["num_consts"],
        params["symbolic_zeros"],
        lambda nonzeros: _traced_anew(params, params["fwd_jaxpr_thunk"])(*nonzeros),
        lambda: params["out_trees"]()[2],
        bwd,
    )


def _traced_anew(params: dict[str, Any], thunk: Any) -> Callable[..., Any]:
    """A forward rule to call, traced anew where its flags may change the residuals' structure.

    JAX keeps what it has traced for all flags, but the structure only of what it traced last.
    """
    if not params["symbolic_zeros"]:
        return thunk.call_wrapped
    known = inspect.getclosurevars(thunk.f).nonlocals.get("cells", {})

    def traced(*nonzeros: Any) -> Any:
        known.clear()
        try:
            return thunk.call_wrapped(*nonzeros)
        finally:
            known.clear()

    return traced


def is_custom_vjp(eqn: Eqn) -> bool:
    """True of the call of a function with a backward rule of the user's."""
    return eqn.primitive is custom_vjp_call_p


def has_rules(eqn: Eqn) -> bool:
    """True of the call of a function with derivative rules of the user's."""
    return eqn.primitive is custom_jvp_call_p or eqn.primitive is custom_vjp_call_p


def with_rules(
    eqn: Eqn,
    forward: Callable[[Any, Sequence[Any]], tuple[Any, Sequence[Any]]],
    backward: Callable[[Callable[..., Any], Sequence[Any]], Any],
) -> Any:
    """The call of a function with derivative rules, with other rules.

    `forward(jaxpr, consts)` replaces what a rule that is traced when it is needed has become, and
    `backward(rule, args)` is called instead of a backward rule.
    """

    def replaced(key: str, fun: Callable[..., Any]) -> lu.WrappedFun:
        old = eqn.params[key]
        call = _traced_anew(eqn.params, old) if key == "fwd_jaxpr_thunk" else old.call_wrapped
        return lu.wrap_init(functools.partial(fun, call), debug_info=old.debug_info)

    def trace(old: Callable[..., Any], *zeros: bool) -> tuple[Any, ...]:
        jaxpr, consts, *rest = old(*zeros)
        return (*forward(jaxpr, consts), *rest)

    def run(old: Callable[..., Any], *given: Any) -> Any:
        return backward(old, given)

    if eqn.primitive is custom_jvp_call_p:
        new = {"jvp_jaxpr_fun": replaced("jvp_jaxpr_fun", trace)}
    else:
        new = {"fwd_jaxpr_thunk": replaced("fwd_jaxpr_thunk", trace), "bwd": replaced("bwd", run)}
    return eqn.replace(params={**eqn.params, **new})


def forward_rule(eqn: Eqn) -> tuple[Any, Sequence[Any], list[Any]]:
    """A user's rule, where all that can be is differentiated: its jaxpr, constants and operands.

    A JVP rule takes tangents besides.
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
    """While a forward rule is traced of which JAX needn't know what its residuals are."""
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


def vmap_rule(params: dict[str, Any]) -> Callable[..., tuple[list[Any], list[bool]]]:
    """A user's batching rule: of the axis size, which operands are batched, and the operands.

    It returns the outputs, and which are batched.
    """

    def rule(size: int, is_batched: Sequence[bool], args: Sequence[Value]) -> Any:
        out, out_batched = custom_batching.call_rule(
            params["rule"],
            size,
            jax.tree.unflatten(params["in_tree"], is_batched),
            jax.tree.unflatten(params["in_tree"], args),
        )
        leaves, tree = jax.tree.flatten(out)
        flags, tree_of_flags = jax.tree.flatten(out_batched)
        custom_batching.check_vmap_rule_trees(
            params["rule"], params["out_tree"], tree, tree_of_flags
        )
        return leaves, flags

    return rule


# The oldest JAX's backward pass can't accumulate into a ref where a slice was read.
can_accumulate_gradients = jax.__version_info__ >= (0, 12)


def is_symbolic_zero(x: Value) -> bool:
    return isinstance(x, ad_util.Zero | ad_util.SymbolicZero)


def instantiate(x: Value) -> Any:
    """The array that a symbolic zero stands for; anything else as it is."""
    return zeros_like_aval(x.aval) if is_symbolic_zero(x) else x
