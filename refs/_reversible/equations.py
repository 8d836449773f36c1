"""Nodes of operations on arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax

from refs import _jax
from refs._indexing.sharded import sharded_as
from refs._reversible.inverses import INVERSES, Given, Inverse, type_of
from refs._reversible.nodes import (
    Lookup,
    Node,
    Operand,
    Solution,
    Step,
    Var,
    is_smooth,
    variables,
)
from refs._types import Eqn, Value
from refs.errors import NotReversibleError

if TYPE_CHECKING:
    from refs._reversible.backward import Backward
    from refs._reversible.plan import Plan

Pullback = Callable[[Sequence[Value]], Sequence[Value]]


class Equation(Node):
    """An equation without refs, as it is.

    Attributes:
      keeps_pullback: whether what evaluates it in the backward pass keeps its pullback, too.
    """

    keeps_pullback = True

    def __init__(
        self, eqn: Eqn, ins: Sequence[Operand], outs: Sequence[Var], line: str | None = None
    ):
        self.eqn, self.ins, self.outs = eqn, tuple(ins), tuple(outs)
        self.line = _jax.user_line(eqn) if line is None else line

    def run(self, values: Sequence[Value]) -> Sequence[Value]:
        with _jax.source_of(self.eqn), self.eqn.ctx.manager:
            return _jax.bind_eqn(self.eqn, values)

    def ways(self, known: Solution) -> Iterator[Step]:
        if not _jax.has_side_effects(self.eqn):  # Such an equation happens once.
            yield from self.own_way(known)
        inverse = INVERSES.get(self.eqn.primitive)
        if inverse is None or not all(v in known for v in self.outs):
            return
        unknown = [k for k, v in enumerate(self.ins) if v not in known]
        if unknown and (inverse.alone or len(unknown) == 1):
            for k in unknown:
                if self._is_invertible(inverse, k, known):
                    v = self.ins[k]
                    assert isinstance(v, Var)
                    others = [x for j, x in enumerate(self.ins) if j not in unknown]
                    deps = (*self.outs, *(() if inverse.alone else variables(others)))
                    yield Step(self, deps, (v,), self._inverted(inverse, k, unknown))

    def _is_invertible(self, inverse: Inverse, k: int, known: Solution) -> bool:
        operand = type_of(self.eqn.invars[k])
        is_found = inverse.places is None or k in inverse.places
        same_shape = (
            self.eqn.primitive not in _ELEMENTWISE
            or operand.shape == type_of(self.eqn.outvars[0]).shape
        )
        is_right = inverse.is_exact or not is_smooth(self.ins[k])
        is_right |= not known.is_exact and not (known.is_careful and inverse.loses)
        return is_found and same_shape and is_right and inverse.holds(self.eqn)

    def _inverted(
        self, inverse: Inverse, k: int, unknown: Sequence[int]
    ) -> Callable[[Lookup], list[Value]]:
        def compute(at: Lookup) -> list[Value]:
            hidden = range(len(self.ins)) if inverse.alone else unknown
            operands = [None if j in hidden else at(x) for j, x in enumerate(self.ins)]
            given = Given(self.eqn, k, operands, [at(v) for v in self.outs])
            return [self._of_type(inverse.find(given), k)]

        return compute

    def _of_type(self, found: Value, k: int) -> Value:
        """An operand that was found, of the operand's type."""
        aval = type_of(self.eqn.invars[k])
        return sharded_as(found.astype(aval.dtype), aval)

    def spread(self, plan: Plan) -> None:
        if self.eqn.primitive is not _jax.stop_gradient_p:
            super().spread(plan)

    def needs(self, plan: Plan) -> Iterable[Var]:
        active = tuple(k for k, v in enumerate(self.ins) if v in plan.active)
        of_jax = ValueError if self.eqn.primitive is _jax.while_p else ()
        try:
            plan.used[self] = used_by_pullback(self, active)
        except of_jax as error:
            raise NotReversibleError(
                f"reversible: the while_loop at {self.line} is one of lanes, which take different "
                "numbers of steps: use refs.reversible inside of the vmap, or a loop with a known "
                "number of steps"
            ) from error
        return variables(self.ins[k] for k in plan.used[self])

    def evaluate(self, run: Backward, values: Sequence[Value]) -> Sequence[Value]:
        if not (self.keeps_pullback and run.has_active(self)):
            return self.run(values)
        out, run.pullbacks[self] = self.linearized(run, values)
        return out

    def pull(self, run: Backward) -> None:
        cts = [run.take(v) for v in self.outs]
        if all(ct is None for ct in cts):
            return
        if self not in run.pullbacks:
            # Operands that the derivative doesn't depend on may be unknown.
            used = run.plan.used[self]
            values = [
                run.value(x) if k in used or not isinstance(x, Var) else run.zeros(x)
                for k, x in enumerate(self.ins)
            ]
            _, run.pullbacks[self] = self.linearized(run, values)
        smooth = [
            run.zeros(v) if ct is None else ct
            for v, ct in zip(self.outs, cts, strict=True)
            if is_smooth(v)
        ]
        active = [v for v in self.ins if run.is_active(v)]
        for v, ct in zip(active, run.pullbacks[self](smooth), strict=True):
            run.give(v, ct)

    def linearized(self, run: Backward, values: Sequence[Value]) -> tuple[list[Value], Pullback]:
        """The results, and the pullback from the smooth ones to the active operands."""
        return self._vjp(values, [k for k, v in enumerate(self.ins) if run.is_active(v)])

    def _vjp(self, values: Sequence[Value], active: Sequence[int]) -> tuple[list[Value], Pullback]:
        def fun(some: list[Value]) -> tuple[list[Value], list[Value]]:
            operands = list(values)
            for k, x in zip(active, some, strict=True):
                operands[k] = x
            out = list(self.run(operands))
            smooth = [x for v, x in zip(self.outs, out, strict=True) if is_smooth(v)]
            rest = [x for v, x in zip(self.outs, out, strict=True) if not is_smooth(v)]
            return smooth, rest

        smooth, pull, rest = jax.vjp(fun, [values[k] for k in active], has_aux=True)
        parts = {True: iter(smooth), False: iter(rest)}
        out = [next(parts[is_smooth(v)]) for v in self.outs]
        return out, lambda cts: pull(list(cts))[0]


# Their operands may be scalars beside arrays.
_ELEMENTWISE = {p for p in INVERSES if p.name in ("add", "add_any", "sub", "mul", "div", "xor")}


def used_by_pullback(node: Equation, active: tuple[int, ...]) -> list[int]:
    """The operands whose values the pullback to the active operands depends on."""
    smooth = [v for v in node.outs if is_smooth(v)]
    avals = [v.aval for v in node.eqn.invars]
    key = _key(node.eqn, active)
    if key in _used:
        return _used[key]

    def pulled(values: list[Value], cts: list[Value]) -> Any:
        _, pull = node._vjp(values, active)
        return pull(cts)

    cts = [_jax.AbstractArgument(v.aval) for v in smooth]
    traced = jax.make_jaxpr(pulled)([*map(_jax.AbstractArgument, avals)], cts)
    if any(isinstance(c, _jax.Tracer) for c in traced.consts):
        raise NotReversibleError(
            f"reversible: the derivative rule of `{node.eqn.primitive}` at {node.line} closes over "
            "a value that is computed outside of it, and runs when that is gone: pass the value to "
            "the custom function as an argument"
        )
    wanted = {v for v in traced.jaxpr.outvars if not isinstance(v, _jax.Literal)}
    for eqn in reversed(traced.jaxpr.eqns):
        if any(v in wanted for v in eqn.outvars):
            wanted |= {v for v in eqn.invars if not isinstance(v, _jax.Literal)}
    used = [k for k, v in enumerate(traced.jaxpr.invars[: len(avals)]) if v in wanted]
    if key is not None:
        _used[key] = used
    return used


def _key(eqn: Eqn, active: tuple[int, ...]) -> Any:
    """What the result of `used_by_pullback` depends on; None for a call."""
    if _jax.jaxprs_in(eqn.params):  # A memo would keep them alive.
        return None
    return (eqn.primitive, tuple(eqn.params.items()), active, *map(type_of, eqn.invars))


_used: dict[Any, list[int]] = {}
