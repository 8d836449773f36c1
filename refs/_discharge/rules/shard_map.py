"""Rule of `shard_map`: the state is sharded as the ref operand is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from refs import _jax
from refs._discharge.cells import Cell
from refs._discharge.interpreter import Context
from refs._discharge.registry import register
from refs._types import Eqn, Value
from refs.errors import RefValueError


@register(_jax.shard_map_p, runs_once=True)
def discharge_shard_map(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    [closed] = _jax.jaxprs_in(eqn.params)
    scope = ctx.scope((closed, args))
    spec_of: dict[int, Any] = {}
    for arg, spec in zip(args, eqn.params["in_specs"], strict=True):
        if isinstance(arg, Cell) and spec_of.setdefault(id(arg), spec) != spec:
            raise RefValueError(
                f"shard_map at {_jax.user_line(eqn)}: {arg.describe()} is passed twice with "
                f"different specs, {spec_of[id(arg)]} and {spec}"
            )
    array_specs = [
        s for a, s in zip(args, eqn.params["in_specs"], strict=True) if not isinstance(a, Cell)
    ]
    # A ref that the body only closes over is whole on every device.
    whole = jax.sharding.PartitionSpec()
    state_specs = [spec_of.get(id(c), whole) for c in scope.written]
    constant_specs = [spec_of.get(id(c), whole) for c in scope.read]
    constant_specs += [whole] * (len(scope.constants) - len(scope.read))

    mapped = jax.shard_map(
        scope.function(closed, args),
        mesh=eqn.params["mesh"],
        in_specs=(array_specs, state_specs, constant_specs),
        out_specs=(list(eqn.params["out_specs"]), state_specs),
        axis_names=eqn.params["newly_manual_axes"],
        check_vma=eqn.params["check_vma"],
    )
    return scope.call(mapped, args)
