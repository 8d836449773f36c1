"""Functions that the discharge rules of `custom_jvp` and `custom_vjp` share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from refs import _jax
from refs._discharge.cells import Cell, merge, root
from refs._discharge.interpreter import Context
from refs._discharge.scope import Scope
from refs._tracing import touch_analysis
from refs._tracing.facts import can_fail
from refs._tracing.touch_analysis import Rules, Touch
from refs._types import ClosedJaxpr, Jaxpr, Value
from refs.errors import RefValueError


def eval_rule(
    ctx: Context, jaxpr: Jaxpr, consts: Sequence[Value], args: Sequence[Value], where: str
) -> list[Any]:
    """`ctx.eval_open` of a user's derivative rule, which no analysis of lanes has seen.

    So the rule may only accumulate into a ref that lanes share and accumulate into.
    """
    for x, kind in _touched(jaxpr, consts, args):
        if x.method and kind != Touch.NONE and kind.method != x.method:
            raise RefValueError(
                f"vmap: the derivative rule of the custom function at {where} reads or overwrites "
                f"{x.describe()}, which all lanes share and the function only accumulates into: "
                "only accumulate in the rule, too"
            )
    return ctx.eval_open(jaxpr, consts, args)


def changed_by(jaxpr: Jaxpr, consts: Sequence[Value], args: Sequence[Value]) -> list[Cell]:
    """The cells that a derivative rule changes."""
    return [x for x, kind in _touched(jaxpr, consts, args) if kind.changes]


def _touched(
    jaxpr: Jaxpr, consts: Sequence[Value], args: Sequence[Value]
) -> Iterator[tuple[Cell, Touch]]:
    found = touch_analysis.jaxpr_touches(jaxpr, consts[: len(jaxpr.constvars)])
    for x, kind in zip((*consts, *args), (*found.consts, *found.inputs), strict=True):
        if isinstance(x, Cell):
            yield x, Rules.NEVER_RUN.settle(kind)


def through(
    scope: Scope,
    closed: ClosedJaxpr,
    args: Sequence[Value],
    given: tuple[list[Value], list[Value], list[Value]],
    smooth: Sequence[int],
    where: str,
) -> Callable[[list[Value]], list[Value]]:
    """A custom function as a function from part of its state to that part of its new state.

    It is evaluated besides the function's rule, to be differentiated, and has no other effect.

    Args:
      scope: the function's scope.
      closed: its jaxpr.
      args: its operands, values and cells.
      given: its (arrays, state, constants).
      smooth: the positions of the part in the state.
      where: where the function is called, for messages.
    """
    arrays, state, constants = given
    if can_fail(closed):
        raise RefValueError(
            f"the derivative of what refs hold goes through the custom function at {where}, which "
            "calls back into Python, and would once more: call back outside of it, or write the "
            "refs there"
        )

    def part(values: list[Value]) -> list[Value]:
        full = [*state]
        for k, value in zip(smooth, values, strict=True):
            full[k] = value
        inside = scope.enter(full, constants, is_silent=True)
        inside.ctx.eval(closed, inside.args(merge(args, arrays)))
        return [inside.state[k] for k in smooth]

    return part


def check_given(
    scope: Scope,
    args: Sequence[Value],
    constants: Sequence[Value],
    moves: Sequence[bool],
    where: str,
) -> None:
    """Raises if the derivative depends on a ref that a custom function reads and isn't given.

    Its rule says nothing about that, so the derivative would be zero. JAX refuses to differentiate
    a value that a custom function closes over.

    Args:
      scope: the function's scope.
      args: its operands, values and cells.
      constants: the values of the refs that it only reads.
      moves: for each of these: whether the value is differentiated.
      where: where the function is called, for messages.

    Raises:
      RefValueError: if there is such a ref.
    """
    given = {id(root(a)) for a in args if isinstance(a, Cell)}
    for cell, value, moving in zip(scope.read, constants, moves, strict=True):
        if moving and is_smooth(value) and id(root(cell)) not in given and not scope.is_held(cell):
            raise RefValueError(
                f"derivative with respect to the contents of {cell.describe()} through the custom "
                f"function at {where}, which closes over the ref and reads it: its rule says "
                "nothing about that, and the derivative would be zero. Pass the value or the ref "
                "to the function as an argument; if it is to be a constant, pass "
                "`jax.lax.stop_gradient(ref[...])`"
            )


def is_smooth(x: Value) -> bool:
    """Whether a value, or a symbolic zero, has a dtype with derivatives."""
    dtype = x.aval.dtype if _jax.is_symbolic_zero(x) else x.dtype
    return jnp.issubdtype(dtype, jnp.inexact)
