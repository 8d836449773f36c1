"""The lines on which a traced function touches its refs.

Around a transformed function that is called in another traced one, each ref is read once and
written once. These accesses are given the lines of the function's own, for `refs.explain`, for
errors and for profilers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from refs import _jax
from refs._tracing.touch_analysis import Touch
from refs._tracing.touch_walk import steps
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
        for eqn, touches, _ in steps(closed, inputs, held):
            for name, kind in touches.items():
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
