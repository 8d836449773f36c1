"""Rules of the primitives that run one jaxpr once; that of `checkpoint` has a file of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from refs import _jax
from refs._discharge.cells import Cell, split
from refs._discharge.interpreter import Context
from refs._discharge.registry import register
from refs._discharge.scope import Scope
from refs._types import Eqn, Value


@register(*_jax.inlined_call_primitives, runs_once=True)
def discharge_call(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    [closed] = _jax.jaxprs_in(eqn.params)
    return ctx.eval(closed, args)


@register(_jax.jit_p, runs_once=True)
def discharge_jit(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    params = _jax.jit_params(eqn.params)
    scope = ctx.scope((params.jaxpr, args))

    def make() -> Callable[..., Any]:
        called = scope.function(params.jaxpr, args)
        called.__name__ = called.__qualname__ = params.name
        return jax.jit(called, **_jit_options(params, args, scope))

    # A jaxpr called again, over refs that alias in the same pattern, is discharged only once. One
    # that holds refs as constants is not: these are cells of this particular context.
    key = (
        id(params.jaxpr),
        _alias_pattern(args),
        len(scope.written),
        len(scope.constants),  # the refs that are only read, and scalars of lanes
    )
    called = ctx.memoised(key, params.jaxpr, make) if scope.portable else make()
    return scope.call(called, args)


@register(*_jax.metadata_call_primitives, runs_once=True)
def discharge_metadata_call(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    [closed] = _jax.jaxprs_in(eqn.params)
    scope = ctx.scope((closed, args))
    operands = (split(args), scope.state, scope.constants)
    pure = jax.make_jaxpr(scope.function(closed, args))(*operands)
    params = _jax.replace_jaxpr(eqn.params, pure, len(scope.written))
    if "exclude_mask" in params:  # one flag for each operand
        flags = _by_operand(args, params["exclude_mask"], scope, False)
        params["exclude_mask"] = tuple(jax.tree.leaves(flags))
    leaves = jax.tree.leaves(operands)
    out = _jax.bind(eqn.primitive, leaves, params)
    scope.update(out[len(out) - len(scope.written) :])
    return out[: len(out) - len(scope.written)]


def _alias_pattern(args: Sequence[Value]) -> tuple[int | None, ...]:
    """For each cell the position where it comes first, for each array None."""
    first: dict[int, int] = {}
    return tuple(
        first.setdefault(id(a), k) if isinstance(a, Cell) else None for k, a in enumerate(args)
    )


def _jit_options(params: _jax.JitParams, args: Sequence[Value], scope: Scope) -> dict[str, Any]:
    options: dict[str, Any] = {"inline": params.inline, "keep_unused": params.keep_unused}
    shardings = (*params.in_shardings, *params.out_shardings)
    if not all(_jax.is_unspecified(s) for s in shardings):
        arrays, state, constants = _by_operand(args, params.in_shardings, scope, None)
        options["in_shardings"] = (arrays, state, constants)
        options["out_shardings"] = (list(params.out_shardings), state)
    return options


def _by_operand(
    args: Sequence[Value], given: Sequence[Any], scope: Scope, otherwise: Any
) -> tuple[list[Any], list[Any], list[Any]]:
    """What is given for each operand, as lists for arrays, state and constants of the pure call.

    `otherwise` is for a ref that is closed over, and for a scalar of lanes.
    """
    of_cell = {id(a): x for a, x in zip(args, given, strict=True)}
    arrays = [x for a, x in zip(args, given, strict=True) if not isinstance(a, Cell)]
    state, read = (
        [of_cell.get(id(c), otherwise) for c in cs] for cs in (scope.written, scope.read)
    )
    return arrays, state, read + [otherwise] * (len(scope.constants) - len(read))
