"""Rule of `checkpoint`, or `remat`.

JAX stores the inputs of a checkpointed function, to compute the rest again. If the function is the
body of a loop that updates a ref, the ref is one of them: all of it would be stored for each step.
But the body depends only on the values that it has read there. So these are stored instead.

If the function itself contains a loop over refs, storing the ref once costs less. A ref that
nothing around the function changes is stored once in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from refs import _jax
from refs._discharge.cells import Cell, merge
from refs._discharge.interpreter import Context
from refs._discharge.registry import register
from refs._discharge.stored_reads import READ
from refs._tracing import touch_analysis
from refs._tracing.derivative_rules import rules_may_touch_refs
from refs._tracing.discharged import are_parts_kept
from refs._types import ClosedJaxpr, Eqn, Value

_policies = jax.checkpoint_policies


@register(_jax.remat_p, runs_once=True)
def discharge_checkpoint(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    [closed] = _jax.jaxprs_in(eqn.params)
    if are_parts_kept():  # A reversible function stores nothing.
        return ctx.eval(closed, args)
    scope = ctx.scope((closed, args))
    keeps_reads = not _has_loops_over_refs(closed)
    params = _jax.checkpoint_params(eqn)
    policy: Any = params.policy
    prevent_cse: Any = params.prevent_cse
    if keeps_reads:
        reads = _policies.save_only_these_names(READ)
        policy = reads if policy is None else _either(reads, policy)
    if isinstance(prevent_cse, tuple):  # one flag for each operand
        flags = [f for f, a in zip(prevent_cse, args, strict=True) if not isinstance(a, Cell)]
        prevent_cse = (flags, True, True)

    def called(arrays: list[Value], state: list[Value], constants: list[Value]) -> Any:
        inside = scope.enter(state, constants)
        inside.ctx.keeps_reads, inside.ctx.repeats = keeps_reads, True
        return inside.run(closed, merge(args, arrays))

    has_open_rules = ctx.differentiated and rules_may_touch_refs(closed.jaxpr)
    checkpoint = _jax.old_checkpoint if has_open_rules else jax.checkpoint
    return scope.call(checkpoint(called, prevent_cse=prevent_cse, policy=policy), args)


def _either(one: Callable[..., bool], other: Callable[..., Any]) -> Callable[..., Any]:
    """Like `save_from_both_policies`, but a policy may also say where a value is to be stored."""
    return lambda *args, **params: one(*args, **params) or other(*args, **params)


def _has_loops_over_refs(closed: ClosedJaxpr) -> bool:
    return _jax.any_equation(
        closed,
        lambda eqn: (
            _jax.primitive_of(eqn) in _jax.loop_primitives
            and any(map(touch_analysis.holds_refs, _jax.jaxprs_in(eqn.params)))
        ),
    )
