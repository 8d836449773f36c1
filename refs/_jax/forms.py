"""The two forms that JAX has for `scan`, `checkpoint` and custom rules, read as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax._src.config import custom_vjp3, remat3, scan3
from jax._src.core import get_referent

from refs._jax import new_forms, old_forms
from refs._jax.new_forms import (
    CheckpointParams,
    JvpRule,
    ScanParams,
    VjpRule,
    call_hi_primitive_p,
)
from refs._jax.old_forms import call_wrapped, rewrap, settle_result_tree
from refs._jax.primitives import (
    custom_jvp_call_p,
    custom_vjp_call_p,
    passing_primitives,
    scan_p,
)
from refs._types import Atom, Eqn, Jaxpr, Primitive, RefLike, Value

__all__ = [
    "call_hi_primitive_p", "call_wrapped", "checkpoint_params", "custom_vjp", "fori_loop",
    "forward_rule", "has_rules", "is_custom_vjp", "is_scan_of_refs", "jvp_rule",
    "old_checkpoint", "passed_on", "primitive_of", "rewrap", "rules_of", "scan", "scan_params",
    "settle_result_tree", "vjp_rule",
]  # fmt: skip


def primitive_of(eqn: Eqn) -> Primitive:
    """The primitive that an equation applies, in both forms the one of the old form."""
    primitive = eqn.primitive
    return new_forms.old_name(eqn) if primitive is call_hi_primitive_p else primitive


def passed_on(ref: RefLike) -> RefLike:
    """The ref that `passing_primitives` took and returned as `ref`; `ref` itself if none did."""
    while (eqn := getattr(ref, "parent", None)) is not None and (
        primitive_of(eqn) in passing_primitives
    ):
        # A handle that is closed over is a constant of the trace.
        ref = get_referent(eqn.in_tracers[0])
    return ref


def _form(eqn: Eqn) -> Any:
    return new_forms if eqn.primitive is call_hi_primitive_p else old_forms


def scan_params(eqn: Eqn) -> ScanParams:
    return _form(eqn).scan_params(eqn)


def checkpoint_params(eqn: Eqn) -> CheckpointParams:
    return _form(eqn).checkpoint_params(eqn)


def jvp_rule(eqn: Eqn) -> JvpRule:
    return _form(eqn).jvp_rule(eqn)


def vjp_rule(eqn: Eqn) -> VjpRule:
    return _form(eqn).vjp_rule(eqn)


def rules_of(eqn: Eqn) -> Any:
    """An object that stands for the rules of a custom function, as a key."""
    return _form(eqn).rules_of(eqn)


def is_custom_vjp(eqn: Eqn) -> bool:
    """Whether an equation calls a function with a user's backward rule."""
    return primitive_of(eqn) is custom_vjp_call_p


def has_rules(eqn: Eqn) -> bool:
    """Whether an equation calls a function with a user's derivative rules."""
    primitive = primitive_of(eqn)
    return primitive is custom_jvp_call_p or primitive is custom_vjp_call_p


def forward_rule(eqn: Eqn) -> tuple[Jaxpr, Sequence[Value], list[Atom]]:
    """A user's JVP or forward rule, traced: its jaxpr, its constants and its primal operands.

    All operands that can be differentiated are. The jaxpr of a JVP rule then takes tangents, too.
    """
    rule = vjp_rule(eqn) if is_custom_vjp(eqn) else jvp_rule(eqn)
    operands: list[Atom] = eqn.invars[rule.not_given :]
    smooth = [v.aval.to_tangent_aval().dtype != jax.dtypes.float0 for v in operands]
    smooth[: rule.num_consts - rule.not_given] = [False] * (rule.num_consts - rule.not_given)
    if isinstance(rule, JvpRule):
        jaxpr, consts, _ = rule.trace([not s for s in smooth])
    else:
        with rule.unnoticed():
            jaxpr, consts, _ = rule.fwd(smooth)
    return jaxpr, consts, operands


def is_scan_of_refs(eqn: Eqn) -> bool:
    """Whether an equation is a scan in the new form, which makes refs when it is expanded.

    In JAX 0.12 it has no derivative backwards, can't be mapped, and goes forwards if it should go
    in reverse. So this library always makes a scan of values of it.
    """
    return eqn.primitive is call_hi_primitive_p and primitive_of(eqn) is scan_p


def _without(switch: Any, fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, which is called with one of JAX's switches off."""

    def called(*args: Any, **kwargs: Any) -> Any:
        with switch(False):
            return fun(*args, **kwargs)

    return called


def old_checkpoint(fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.checkpoint` in the old form.

    JAX 0.12's new one tells rules in it that all is differentiated, and takes the results of a
    function where the old one takes those of its rule: what the rule writes would be lost.
    """
    # The oldest JAX asks for the switch when it makes the function, the newest when it is called.
    return _without(remat3, _without(remat3, jax.checkpoint)(fun, **options))


# JAX's functions in the old form: the carry are values, not refs.
scan = _without(scan3, lax.scan)
fori_loop = _without(scan3, lax.fori_loop)
# JAX 0.10's new form is unfinished.
custom_vjp = jax.custom_vjp if new_forms.has_custom_rules else _without(custom_vjp3, jax.custom_vjp)
