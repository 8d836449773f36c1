"""A jaxpr and the refs that it closes over."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax

from refs._discharge.cells import Cell
from refs._discharge.interpreter import Context
from refs._discharge.lanes import Accumulator, Lanes
from refs._handles import access
from refs._handles.predicates import is_ref
from refs._lanes.lane_analysis import Contents
from refs._lanes.primitives import lane_set
from refs._origin import origin_of
from refs._tracing import derivative_rules, touch_analysis
from refs._tracing.names import one_name
from refs._tracing.touch_analysis import Rules, Touch
from refs._tracing.trace import unique
from refs._types import ClosedJaxpr, RefLike, Value


class Program(NamedTuple):
    """A closed jaxpr, seen as a function of state.

    Attributes:
      jaxpr: the effectful jaxpr; its constants may be refs.
      refs: the refs that it closes over, distinct, those of inner jaxprs included.
      const_refs: for each constant of `jaxpr`: its position in `refs`, or None for an array.
      position: the id of a ref, under any of its names -> its position in `refs`.
      is_differentiated: whether users' forward rules count, too.
    """

    jaxpr: ClosedJaxpr
    refs: list[RefLike]
    const_refs: tuple[int | None, ...]
    position: dict[int, int]
    is_differentiated: bool = False

    @staticmethod
    def of(jaxpr: ClosedJaxpr, is_differentiated: bool = False) -> Program:
        consts = [c for c in jaxpr.consts if is_ref(c)]
        touches = derivative_rules.touches if is_differentiated else touch_analysis.touches
        hidden = [ref for ref, _ in touches(jaxpr).hidden]
        mentioned = [*consts, *hidden]
        refs, places = unique([one_name(ref) for ref in mentioned])
        position = {id(ref): k for k, ref in enumerate(refs)}
        position |= {id(ref): k for ref, k in zip(mentioned, places, strict=True)}
        const_refs = tuple(position[id(c)] if is_ref(c) else None for c in jaxpr.consts)
        return Program(jaxpr, refs, const_refs, position, is_differentiated)

    def touches(
        self,
        same: dict[int, int],
        rules: Rules = Rules.NEVER_RUN,
        rules_outside: Rules = Rules.NEVER_RUN,
    ) -> tuple[list[Touch], list[Touch]]:
        """How the program touches each of `refs`, and each input.

        `rules_outside` says what derivative rules may do to one of `refs`, and `rules` to an input.

        `same` maps the position of an input to that of the same ref in `refs`: a touch of one is a
        touch of both.
        """
        found = touch_analysis.touches(self.jaxpr)
        if same or len(self.position) > len(self.refs):
            key = {name: id(self.refs[k]) for name, k in self.position.items()}
            inputs = {self.jaxpr.jaxpr.invars[i]: id(self.refs[k]) for i, k in same.items()}
            names = touch_analysis.Names(inputs, key)
            found = touch_analysis.touches_under(self.jaxpr.jaxpr, self.jaxpr.consts, names)
        if self.is_differentiated:
            found = derivative_rules.with_rules(self.jaxpr, found)
        refs = [Touch.NONE] * len(self.refs)
        for k, kind in zip(self.const_refs, found.consts, strict=True):
            if k is not None:
                refs[k] |= kind
        for ref, kind in found.hidden:
            refs[self.position[id(ref)]] |= kind
        inputs = list(found.inputs)
        for i, k in same.items():
            inputs[i] = refs[k] = inputs[i] | refs[k]
        return [*map(rules_outside.settle, refs)], [*map(rules.settle, inputs)]

    def by_identity(self, items: Sequence[Any]) -> dict[int, Any]:
        """`items`, one for each of `refs`, by the id of each of the ref's names."""
        return {ref: items[k] for ref, k in self.position.items()}

    @property
    def arrays(self) -> list[Value]:
        """The constants that aren't refs."""
        consts = zip(self.jaxpr.consts, self.const_refs, strict=True)
        return [c for c, k in consts if k is None]

    def run(
        self,
        ctx: Context,
        ref_cells: Sequence[Cell],
        inputs: Sequence[Any],
        arrays: Sequence[Value] | None = None,
    ) -> list[Any]:
        """Interprets the program, on a cell for each of `refs`, and values and cells as inputs.

        `arrays` replace the constants that aren't refs, if they are given.
        """
        _runs.set(_runs.get() + touch_analysis.uses_refs(self.jaxpr))
        ctx.cells |= self.by_identity(ref_cells)
        rest = iter(self.arrays if arrays is None else arrays)
        consts = [next(rest) if k is None else ref_cells[k] for k in self.const_refs]
        return ctx.eval_open(self.jaxpr.jaxpr, consts, inputs)


def discharges() -> int:
    """How many programs over refs were run: it grows where a traced function calls wrappers.

    The refs that the wrapped functions have made for themselves leave nothing else in the trace.
    """
    return _runs.get()


_runs: ContextVar[int] = ContextVar("_runs", default=0)


def run_in_lanes(
    program: Program,
    refs: Sequence[RefLike],
    arrays: Sequence[Value],
    inputs: Sequence[Value],
    lanes: Lanes,
) -> list[Value]:
    """Runs a program on the refs themselves, in a lane of `refs.vmap`.

    Its inputs are arrays, all of which may vary from lane to lane. `refs` and `arrays` replace its
    constants.
    """
    touches, _ = program.touches({}, rules_outside=Rules.MAY_READ)
    origins = [origin_of(jax.typeof(ref)) for ref in refs]
    contents = [Contents(o, False, touch) for o, touch in zip(origins, touches, strict=True)]
    analysis = lanes.analysis.again()
    analysis.run(program.jaxpr, program.by_identity(contents), [True] * len(inputs))
    cells = [
        Accumulator(ref, origin, touch.method) if touch.method else Cell(access.get(ref), origin)
        for ref, origin, touch in zip(refs, origins, touches, strict=True)
    ]
    for ref, cell in zip(refs, cells, strict=True):
        cell.target = ref
    ctx = Context(lanes=lanes._replace(analysis=analysis), rules=Rules.MAY_READ)
    out = program.run(ctx, cells, inputs, arrays)
    for ref, cell, touch in zip(refs, cells, touches, strict=True):
        if touch.changes and not touch.method:
            lane_set(ref, lanes.lane, cell.read())
    return out
