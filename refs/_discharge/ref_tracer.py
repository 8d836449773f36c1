"""Refs in a trace of this library's, `OpByOp`."""

from __future__ import annotations

from refs import _jax
from refs._discharge.cells import Cell
from refs._types import Aval, RefLike


class RefTracer(_jax.Tracer):
    """A ref that was made in an `OpByOp`, or stands for one that its function is given.

    Attributes:
      cell: the cell of a ref that was made.
      given: the ref that it stands for.
      argument: the name of the argument that it is.
    """

    __slots__ = ("argument", "cell", "given")

    def __init__(self, trace: _jax.Trace, aval: Aval, cell: Cell | None, given: RefLike = None):
        super().__init__(trace, aval)
        self.cell, self.given, self.argument = cell, given, ""

    def _origin_msg(self) -> str:
        trace = _jax.trace_of(self).parent
        return _jax.depends_on(trace, self.argument) if self.given is not None else ""


# Where JAX looks up the type by the class alone.
_jax.register_type_of(RefTracer, lambda tracer: tracer.aval)


class TouchedError(BaseException):
    """A guarded function touches a ref. No `Exception`: the user's code must not catch it."""
