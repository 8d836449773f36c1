"""The lines on which a traced function touches its refs.

Around a transformed function that is called in another traced one, each ref is read once and
written once. These accesses are given the lines of the function's own, for `refs.explain`, for
errors and for profilers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from refs import _jax
from refs._tracing.facts import inner_calls
from refs._tracing.touch_analysis import Touch, own_touches
from refs._types import ClosedJaxpr, Eqn


class Lines:
    """Where a closed jaxpr touches refs.

    Args:
      closed: the jaxpr.
      inputs: for each of its inputs the name of a ref, or None.
      held: the names of the refs that it closes over, by the ref's id.
    """

    def __init__(self, closed: ClosedJaxpr, inputs: Sequence[Any], held: Mapping[int, Any]):
        self._first: dict[Any, Eqn] = {}
        self._read: dict[Any, Eqn] = {}
        self._last: dict[Any, Eqn] = {}
        for eqn, name, kind in _touches(closed, inputs, held):
            self._first.setdefault(name, eqn)
            if kind != Touch.WRITE:
                self._read.setdefault(name, eqn)
            if kind.changes:
                self._last[name] = eqn

    def of_read(self, name: Any) -> AbstractContextManager[None]:
        """A context whose equations have the line that reads a ref first, or else touches it."""
        return _at(self._read.get(name, self._first.get(name)))

    def of_write(self, name: Any) -> AbstractContextManager[None]:
        """A context whose equations have the line of the last change of a ref."""
        return _at(self._last.get(name))


def _at(eqn: Eqn | None) -> AbstractContextManager[None]:
    return nullcontext() if eqn is None else _jax.source_of(eqn)


def _touches(
    closed: ClosedJaxpr, inputs: Sequence[Any], held: Mapping[int, Any]
) -> Iterator[tuple[Eqn, Any, Touch]]:
    """What the equations of a jaxpr, and of those in it, do to refs with a name, in order."""
    jaxpr = closed.jaxpr
    names = [held.get(id(c)) for c in closed.consts]
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*names, *inputs), strict=True))
    own: dict[int, list[tuple[Any, Touch]]] = {}
    for eqn, v, kind in own_touches(jaxpr, closed.consts):
        own.setdefault(id(eqn), []).append((known.get(v), kind))
    for eqn in jaxpr.eqns:
        yield from ((eqn, name, kind) for name, kind in own.get(id(eqn), ()) if name is not None)
        for inner, operands in inner_calls(eqn):
            given = [None if isinstance(v, _jax.Literal) else known.get(v) for v in operands]
            yield from _touches(inner, given, held)
