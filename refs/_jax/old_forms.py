"""`scan`, `checkpoint` and custom rules as JAX has them up to 0.12, and there by default.

Each is a primitive of its own, and a custom function's rules are functions that JAX has wrapped. On
the day when JAX has only its new forms (`new_forms.py`), this file goes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax._src.linear_util import wrap_init
from jax.extend import linear_util as lu

from refs._jax.equations import as_closed, at_its_own_lines, jaxprs_in
from refs._jax.new_forms import CheckpointParams, JvpRule, ScanParams, VjpRule
from refs._types import Eqn, Jaxpr, Value

_can_log = hasattr(jax.custom_vjp, "defvjp_with_logs")


def scan_params(eqn: Eqn) -> ScanParams:
    params = eqn.params
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
        range(len(eqn.invars)),
    )


def checkpoint_params(eqn: Eqn) -> CheckpointParams:
    return CheckpointParams(eqn.params["policy"], eqn.params["prevent_cse"])


def rules_of(eqn: Eqn) -> Any:
    """What stands for the rules of a custom function: the jaxpr of that, a new one each time."""
    [closed] = jaxprs_in(eqn.params)
    return closed.jaxpr


def jvp_rule(eqn: Eqn) -> JvpRule:
    params = eqn.params
    num_consts = params["num_consts"]

    def trace(zeros: Sequence[bool]) -> tuple[Jaxpr, Sequence[Value], Sequence[bool]]:
        return at_its_own_lines()(params["jvp_jaxpr_fun"].call_wrapped)(*zeros)

    return JvpRule(num_consts, num_consts, params["symbolic_zeros"], trace)


def vjp_rule(eqn: Eqn) -> VjpRule:
    params = eqn.params
    num_consts = params["num_consts"]

    def fwd(nonzeros: Sequence[bool]) -> tuple[Jaxpr, Sequence[Value], Sequence[int | None]]:
        jaxpr, consts = _traced_anew(params)(*nonzeros)
        return jaxpr, consts, params["out_trees"]()[2]

    def bwd(
        nonzeros: Sequence[bool], residuals: Sequence[Any], cotangents: Sequence[Value]
    ) -> tuple[list[Value], Any]:
        out = at_its_own_lines()(params["bwd"].call_wrapped)(*residuals, *cotangents)
        in_cts, logs = out if _can_log else (out, None)
        return list(in_cts), logs

    flags = params["symbolic_zeros"]
    return VjpRule(num_consts, num_consts, flags, fwd, bwd, lambda: _unnoticed(params))


def _traced_anew(params: dict[str, Any]) -> Callable[..., Any]:
    """A forward rule, as a function that traces anew if its flags may change the residuals' tree.

    JAX keeps a trace for each set of flags, but the residuals' tree of its last trace only.
    """
    thunk = params["fwd_jaxpr_thunk"]
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


def rewrap(fun: lu.WrappedFun | Callable[..., Any], run: Callable[..., Any]) -> Any:
    """`run` in the form in which JAX passes `fun` on: wrapped, if `fun` is."""
    if isinstance(fun, lu.WrappedFun):
        return wrap_init(run, debug_info=fun.debug_info)
    return run


def call_wrapped(fun: lu.WrappedFun | Callable[..., Any], args: Sequence[Value]) -> Any:
    """Calls a function that JAX passes on."""
    return fun.call_wrapped(*args) if isinstance(fun, lu.WrappedFun) else fun(*args)


def settle_result_tree(fun: lu.WrappedFun, rule: lu.WrappedFun) -> None:
    """Drops the result tree that a custom function has stored, if its rule has stored one, too.

    JAX tells by the stored tree which of the two has run, and allows only one.
    """

    def has_said(store: Any) -> bool:
        try:
            return store.val is not None
        except lu.StoreException:
            return False

    stores = [s for s in fun.stores if s is not None]
    if all(map(has_said, (s for s in rule.stores if s is not None))):
        for store in stores:
            store.reset()
