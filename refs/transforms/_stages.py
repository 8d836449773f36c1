"""The stages of compilation of a `refs.jit` function, after `jax.stages`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from refs.errors import RefTypeError
from refs.transforms._dispatch import run_carefully
from refs.transforms._entry import Entry

_Prepare = Callable[[tuple[Any, ...], dict[str, Any]], "tuple[Entry, list[Any]]"]


class Traced:
    """A traced function over refs.

    Attributes:
      effectful_jaxpr: what the function does, with refs.
      jaxpr: the pure jaxpr that is compiled: state in, new state first among what comes out. In
        it, the program is one `in_place` equation: it is put in order when it is lowered.
      out_info: the result's shapes and dtypes.
    """

    def __init__(self, entry: Entry, flat: list[Any], prepare: _Prepare):
        self._entry, self._prepare = entry, prepare
        self._traced = entry.trace(flat)
        self.effectful_jaxpr = entry.transaction.traced.jaxpr
        self.jaxpr = self._traced.jaxpr
        self.out_info = entry.out_info

    def lower(self) -> Lowered:
        """Lowers to StableHLO."""
        return Lowered(self._entry, self._traced.lower(), self._prepare)


class Lowered:
    """A lowered function over refs; what it doesn't have itself, `jax.stages.Lowered` has.

    Attributes:
      out_info: the result's shapes and dtypes.
      written: names and birthplaces of the refs that are written; their values are the first
        parameters of the program, in this order.
    """

    def __init__(self, entry: Entry, lowered: Any, prepare: _Prepare):
        self._entry, self._lowered, self._prepare = entry, lowered, prepare
        self.out_info = entry.out_info
        self.written = [slot.origin for slot in entry.transaction.written]

    def compile(self, compiler_options: dict[str, Any] | None = None) -> Compiled:
        """Compiles for the devices that the refs are on."""
        return Compiled(self._entry, self._lowered.compile(compiler_options), self._prepare)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lowered, name)


class Compiled:
    """A compiled function over refs: call it as the function itself.

    What it doesn't have itself (`as_text`, `memory_analysis`, `cost_analysis` …),
    `jax.stages.Compiled` has.
    """

    def __init__(self, entry: Entry, compiled: Any, prepare: _Prepare):
        self._entry, self._compiled, self._prepare = entry, compiled, prepare
        self.out_info = entry.out_info

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        entry, flat = self._prepare(args, kwargs)
        if entry is not self._entry:
            raise RefTypeError(
                "a compiled function was called with arguments of other types, other aliases "
                "among its refs or other static values than it was compiled for"
            )
        return run_carefully(entry, flat, self._compiled)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)
