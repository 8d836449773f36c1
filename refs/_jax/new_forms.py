"""`scan`, `checkpoint` and custom rules as JAX 0.12 has them if its switches are on.

The switches are `jax_scan3`, `jax_remat3`, `jax_custom_jvp3` and `jax_custom_vjp3`. Each operation
is then the one primitive `call_hi_primitive`, and an object among its parameters says which. JAX
makes a jaxpr of the function at once; what the function closes over comes first among the operands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax._src import ad_checkpoint, hijax
from jax._src.hijax import call_hi_primitive_p as call_hi_primitive_p
from jax._src.lax.control_flow import loops
from jax.interpreters.ad import Zero

from refs._jax.calls import with_inputs
from refs._jax.equations import as_closed, at_its_own_lines
from refs._jax.names import AbstractArgument, is_ref_type
from refs._jax.parameters import is_symbolic_zero
from refs._jax.primitives import (
    custom_jvp_call_p,
    custom_vjp_call_p,
    name_p,
    remat_p,
    scan_p,
)
from refs._types import ClosedJaxpr, Eqn, Jaxpr, Primitive, Value

# The classes, each in some versions only.
_CLASSES = [
    (loops, "Scan3", scan_p),
    (ad_checkpoint, "RematTraced", remat_p),
    (ad_checkpoint, "CheckpointName", name_p),
    (hijax, "CustomJVPTraced", custom_jvp_call_p),
]
has_custom_rules = hasattr(hijax, "CustomJVPTraced")
# JAX 0.10 has another class of this name, whose rules close over tracers that have ended.
_CLASSES += [(hijax, "CustomVJPTraced", custom_vjp_call_p)] if has_custom_rules else []
_primitives: dict[type, Primitive] = {
    getattr(module, name): primitive
    for module, name, primitive in _CLASSES
    if hasattr(module, name)
}


class ScanParams(NamedTuple):
    """The parameters of a scan.

    Attributes:
      jaxpr: the body: from constants, carry and rows to carry and rows.
      order: the positions, among the operands, of the body's inputs.
    """

    jaxpr: ClosedJaxpr
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int
    order: Sequence[int]


class CheckpointParams(NamedTuple):
    policy: Any
    prevent_cse: Any  # a bool, or one for each operand


class JvpRule(NamedTuple):
    """A user's JVP rule as jaxprs: `trace(zeros) -> (jaxpr, consts, zeros of output tangents)`.

    `zeros` says for each operand after the first `not_given` whether its tangent is symbolically
    zero. The jaxpr takes these operands, then the tangents that are not zero. It returns the primal
    outputs, then their tangents that are not zero.

    The first `num_consts` operands are what the function closes over.
    """

    num_consts: int
    not_given: int
    symbolic_zeros: bool
    trace: Callable[[Sequence[bool]], tuple[Jaxpr, Sequence[Value], Sequence[bool]]]


class VjpRule(NamedTuple):
    """A user's VJP rule: `fwd(nonzeros) -> (jaxpr, consts, forwards)` and `bwd`.

    The forward jaxpr takes the operands after the first `not_given` and returns the residuals that
    are not operands, then the primal outputs. `forwards` says for each residual which of these
    operands it is, or None. `bwd(nonzeros, residuals, cotangents)` returns a cotangent, or a
    symbolic zero (`is_symbolic_zero`), for each operand after the first `num_consts`; and the
    rule's logs, a dict of pytrees, or None. `unnoticed()` is a context in which `fwd` may be called
    for a look at its jaxpr. `options` are further ones of `defvjp`.
    """

    num_consts: int
    not_given: int
    symbolic_zeros: bool
    fwd: Callable[[Sequence[bool]], tuple[Jaxpr, Sequence[Value], Sequence[int | None]]]
    bwd: Callable[[Sequence[bool], Sequence[Any], Sequence[Value]], tuple[list[Value], Any]]
    unnoticed: Callable[[], AbstractContextManager[None]] = nullcontext
    options: Mapping[str, bool] = MappingProxyType({})


def old_name(eqn: Eqn) -> Primitive:
    """The primitive that the operation was before; its own if it has always been a hi primitive."""
    return _primitives.get(type(eqn.params["_prim"]), call_hi_primitive_p)


def scan_params(eqn: Eqn) -> ScanParams:
    """A scan in which refs that the body closes over are the carry."""
    prim = eqn.params["_prim"]
    closed = as_closed(prim.jaxpr)
    # A scan that JAX has differentiated has the tangents of constants after the rows.
    order = sorted(range(len(prim.extensives)), key=lambda k: prim.extensives[k])
    if order != [*range(len(order))]:
        closed = with_inputs(closed, [closed.jaxpr.invars[k] for k in order])
    n_consts = len(order) - sum(prim.extensives)
    return ScanParams(closed, n_consts, 0, prim.length, prim.reverse, prim.unroll, order)


def checkpoint_params(eqn: Eqn) -> CheckpointParams:
    prim = eqn.params["_prim"]
    return CheckpointParams(prim.policy, getattr(prim, "prevent_cse", True))


def rules_of(eqn: Eqn) -> Any:
    """What stands for the rules of a custom function: one object for each application of it."""
    prim = eqn.params["_prim"]
    return prim.fwd if old_name(eqn) is custom_vjp_call_p else prim.jvp_rule


def jvp_rule(eqn: Eqn) -> JvpRule:
    prim = eqn.params["_prim"]

    def trace(zeros: Sequence[bool]) -> tuple[Jaxpr, Sequence[Value], Sequence[bool]]:
        types = [a.to_tangent_aval() for a in prim.in_avals_flat]
        zeros_out: list[bool] = []

        def rule(primals: Sequence[Value], tangents: Sequence[Value]) -> list[Value]:
            given = iter(tangents)
            full = [Zero(t) if z else next(given) for t, z in zip(types, zeros, strict=True)]
            out, along = prim.jvp(*(prim.in_tree.unflatten(xs) for xs in (primals, full)))
            flat = prim.out_tree.flatten_up_to(along)
            zeros_out[:] = [isinstance(t, Zero) for t in flat]
            moving = [t for t in flat if not isinstance(t, Zero)]
            return [*prim.out_tree.flatten_up_to(out), *moving]

        moving = [t for t, z in zip(types, zeros, strict=True) if not z]
        jaxpr, consts = _traced(rule, prim.in_avals_flat, moving)
        return jaxpr, consts, zeros_out

    return JvpRule(_closed_over(prim), 0, prim.symbolic_zeros, trace)


def vjp_rule(eqn: Eqn) -> VjpRule:
    prim = eqn.params["_prim"]
    n_closed_over = _closed_over(prim)
    trees: dict[tuple[bool, ...], Any] = {}  # of the residuals, by what is differentiated

    def fwd(nonzeros: Sequence[bool]) -> tuple[Jaxpr, Sequence[Value], Sequence[int | None]]:
        forwards: list[int | None] = []
        # JAX refuses to differentiate what the function closes over. Of refs, `check_given` does.
        held = [is_ref_type(a) for a in prim.in_avals_flat[:n_closed_over]]
        flags = [f and not (k < n_closed_over and held[k]) for k, f in enumerate(nonzeros)]

        def rule(*operands: Value) -> list[Value]:
            args = prim.in_tree.unflatten(operands)
            out, residuals, *_ = prim.vjp_fwd(prim.in_tree.unflatten(flags), *args)
            flat, trees[tuple(nonzeros)] = jax.tree.flatten(residuals)
            place = {id(x): k for k, x in enumerate(operands)}
            forwards[:] = [place.get(id(x)) for x in flat]
            made = [x for x, k in zip(flat, forwards, strict=True) if k is None]
            return [*made, *prim.out_tree.flatten_up_to(out)]

        jaxpr, consts = _traced(rule, *prim.in_avals_flat)
        return jaxpr, consts, forwards

    @at_its_own_lines()
    def bwd(
        nonzeros: Sequence[bool], residuals: Sequence[Any], cotangents: Sequence[Value]
    ) -> tuple[list[Value], Any]:
        given = trees[tuple(nonzeros)].unflatten(residuals)
        inner = [Zero(ct.aval) if is_symbolic_zero(ct) else ct for ct in cotangents]
        cts, logs = prim.bwd(given, prim.out_tree.unflatten(inner))
        rest = jax.tree.structure(prim.in_avals[2:])
        return rest.flatten_up_to(cts), logs

    options = {"generic_batching": True} if prim.generic_batching else {}
    return VjpRule(n_closed_over, 0, prim.symbolic_zeros, fwd, bwd, options=options)


def _closed_over(prim: Any) -> int:
    return len(jax.tree.leaves(prim.in_avals[0]))


@at_its_own_lines()
def _traced(rule: Callable[..., Any], *types: Any) -> tuple[Jaxpr, Sequence[Value]]:
    closed = jax.make_jaxpr(rule)(*jax.tree.map(AbstractArgument, types))
    return closed.jaxpr, closed.consts
