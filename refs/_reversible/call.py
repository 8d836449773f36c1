"""A reversible function as JAX sees it: a pure function with a derivative of its own."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import zero_from_primal

from refs import _jax
from refs._reversible.backward import Backward, Kept, agree
from refs._reversible.linear import LinearMap, linear_map_p
from refs._reversible.nodes import Node, Var, is_smooth, value_of, variables
from refs._reversible.plan import Plan
from refs._reversible.primitive import Settings
from refs._reversible.program import Program
from refs._reversible.scans import Scan
from refs._reversible.solve import solve
from refs._reversible.versions import Read
from refs._types import Value


class Forward(NamedTuple):
    """What the forward pass hands to the backward pass."""

    inputs: list[Value]
    last: list[Value]
    saved: list[Value]
    kept: dict[str, Any]


def differentiable(
    make: Callable[[], Program],
    settings: Settings,
    plain: Callable[[list[Value]], list[Value]],
) -> Callable[[list[Value]], list[Value]]:
    """The function of the inputs of a program, which `make` makes, to its outputs.

    `plain` does the same, but for the rounding of the exact mode.
    """
    made = functools.cache(make)
    run = plain if settings.fixed is None else lambda inputs: _outputs(made(), inputs)

    @jax.custom_jvp
    def call(inputs: list[Value]) -> list[Value]:
        return run(inputs)

    def call_jvp(primals: Any, tangents: Any) -> Any:
        [inputs], [along], program = primals, tangents, made()
        moving = [
            k
            for k, (v, t) in enumerate(zip(program.body.inputs, along, strict=True))
            if is_smooth(v) and not _jax.is_symbolic_zero(t)
        ]
        plan = Plan(program.body)
        plan.spread(program.body.inputs[k] for k in moving)
        out, forward = _forward(program, settings, inputs)
        varied = [k for k, v in enumerate(program.body.outputs) if v in plan.varied]
        fixed, tree = jax.tree.flatten(forward)
        linear = LinearMap(
            len(fixed),
            [_jax.tangent_type(out[k]) for k in varied],
            lambda fixed, some: _along(plain, tree.unflatten(fixed), moving, varied, some),
            lambda fixed, cts: _back(program, settings, tree.unflatten(fixed), moving, varied, cts),
        )
        found = linear_map_p.bind(*fixed, *(along[k] for k in moving), linear=linear)
        of_out = [zero_from_primal(x, symbolic_zeros=True) for x in out]
        for k, t in zip(varied, found, strict=True):
            of_out[k] = t
        return out, of_out

    call.defjvp(call_jvp, symbolic_zeros=True)
    return call


def _outputs(program: Program, inputs: Sequence[Value]) -> list[Value]:
    env = program.body.run(inputs)
    return [_jax.output(value_of(env, v)) for v in program.body.outputs]


def _forward(
    program: Program, settings: Settings, inputs: Sequence[Value]
) -> tuple[list[Value], Forward]:
    """The outputs, and what the backward pass is given."""
    body = program.body
    anchors: list[list[Value]] = []

    def evaluate(node: Node, values: Sequence[Value]) -> Sequence[Value]:
        if settings.anchors is None or not isinstance(node, Scan):
            return node.run(values)
        out, buffers = node.run_anchored(values, settings.anchors)
        anchors.append(buffers)
        return out

    env = body.run(inputs, evaluate)
    out = [_jax.output(value_of(env, v)) for v in body.outputs]
    kept: dict[str, Any] = {}
    if settings.tolerance is not None:
        kept = {"values": [env[v] for v in program.checked], "anchors": anchors}
    last = [env[v] for v in variables(program.last)]
    return out, Forward(list(inputs), last, [env[v] for v in body.saved], kept)


def _along(
    plain: Callable[[list[Value]], list[Value]],
    forward: Forward,
    moving: Sequence[int],
    varied: Sequence[int],
    tangents: Sequence[Value],
) -> list[Value]:
    """Forward mode: the plain function's."""

    def some(values: list[Value]) -> list[Value]:
        inputs = list(forward.inputs)
        for k, x in zip(moving, values, strict=True):
            inputs[k] = x
        out = plain(inputs)
        return [out[k] for k in varied]

    _, found = jax.jvp(some, ([forward.inputs[k] for k in moving],), (list(tangents),))
    return found


def _back(
    program: Program,
    settings: Settings,
    forward: Forward,
    moving: Sequence[int],
    varied: Sequence[int],
    cts: Sequence[Value],
) -> list[Value]:
    """Reverse mode: what is known at the end is undone, and the cotangents pulled back."""
    body, n = program.body, program.n_written
    wanted = [
        (v, _jax.as_array(ct))
        for v, ct in zip((body.outputs[k] for k in varied), cts, strict=True)
        if not _jax.is_symbolic_zero(ct)
    ]
    plan = Plan(body)
    plan.spread(body.inputs[k] for k in moving)
    plan.want(variables(v for v, _ in wanted))
    plan.settle(solve(body, program.given, settings.fixed is not None))
    known = [*forward.inputs[n:], *forward.last, *forward.saved]
    env = dict(zip(program.given, known, strict=True))
    kept = None
    if settings.tolerance is not None:
        scans: list[Node] = [node for node in program.loops if isinstance(node, Scan)]
        anchors = forward.kept["anchors"]
        kept = Kept(
            dict(zip(program.checked, forward.kept["values"], strict=True)),
            settings.tolerance,
            dict(zip(scans, anchors, strict=False)),
            settings.anchors,
        )
    run = Backward(plan, env, kept=kept)
    for v, ct in wanted:
        run.give(v, ct)
    run.pull()
    if kept is not None:
        run.flags += agree(_found_first(program, run, kept), kept.tolerance)
    found = [_jax.typed_like(run.cotangent(body.inputs[k]), forward.inputs[k]) for k in moving]
    if flags := run.flags:
        is_right = functools.reduce(operator.and_, map(_agreed, flags))
        found = _poisoned(is_right, found)
    return found


def _agreed(flag: Value) -> Value:
    """A flag, true if it is on all devices of a `shard_map`, which share cotangents."""
    axes = tuple(_jax.varying_axes(flag))
    return lax.pmin(flag.astype(jnp.int32), axes) > 0 if axes else flag


def _poisoned(is_right: Value, cts: list[Value]) -> list[Value]:
    """The cotangents; NaN unless `is_right`.

    A loop of no or one step leaves them where they are: a selection, even a branch, has XLA copy
    them, and those of scanned weights are as large as these.
    """

    def poison(fixed: Sequence[Value], cts: Sequence[Value]) -> list[Value]:
        def spoil(loop: Any) -> Any:
            nan = [_jax.vary_as(jnp.full_like(ct, jnp.nan), ct) for ct in loop[1]]
            return jnp.asarray(True), nan

        return lax.while_loop(lambda loop: ~loop[0], spoil, (fixed[0], list(cts)))[1]

    def back(fixed: Sequence[Value], cts: Sequence[Value]) -> list[Value]:
        return poison(fixed, [*map(_jax.instantiate, cts)])

    types = [jax.typeof(ct) for ct in cts]
    return linear_map_p.bind(is_right, *cts, linear=LinearMap(1, types, poison, back))


def _found_first(program: Program, run: Backward, kept: Kept) -> list[tuple[Value, Value, Value]]:
    """The states at the beginning that were found: all that follow from what was."""
    pairs = zip(program.first, program.last, strict=True)
    states = {v.state for v in run.needed if v.state is not None and v not in run.solution.given}
    states |= {
        v.state
        for node in run.plan.body.nodes
        if isinstance(node, Read) and _is_undone(run, node)
        for v in variables(node.ins[:1])
    }
    return [
        (run.value(v), kept.values[v], run.value(last))
        for v, last in pairs
        if isinstance(v, Var)
        and v not in run.solution.given
        and v in run.solution
        and v.state in states
        and run.env.get(v) is not kept.values[v]
    ]


def _is_undone(run: Backward, read: Read) -> bool:
    """Whether what a ref held is needed and follows from what was made of it, by an inverse."""
    [out] = read.outs
    step = run.solution.steps.get(out) if out in run.needed else None
    if step is None:
        return False
    is_read = step.node.rank < 2 and all(v in run.solution.given for v in step.deps[:1])
    return not is_read
