"""What a jaxpr does to refs, in order: each read, write and update, with its line and loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from refs import _jax
from refs._origin import Origin, origin_of
from refs._tracing.touch_analysis import Touch
from refs._tracing.touch_walk import steps
from refs._types import Aval, ClosedJaxpr, Eqn

_NO_LINE = "an unknown line"
_WORDS = {
    Touch.READ: "read",
    Touch.WRITE: "written",
    Touch.ACCUMULATE: "added to",
    Touch.MULTIPLY: "multiplied",
    Touch.MIN: "minimum taken",
    Touch.MAX: "maximum taken",
}


class Access(NamedTuple):
    """One access of the program, or the read and write that are one update.

    Attributes:
      ref: the number of the ref.
      what: "read", "written", "added to" …; "read, written" if both.
      line: the line of it.
      inside: the loops and branches around it, from the outermost.
      at: how many accesses and callbacks stand before it.
    """

    ref: int
    what: str
    line: str
    inside: tuple[str, ...]
    at: int


class Span(NamedTuple):
    """A loop or branch: what it is, and the accesses and callbacks in it, `first` to `last`."""

    what: str
    depth: int
    first: int
    last: int


class Called(NamedTuple):
    """A callback: the primitive, its line, the loops around it, and the refs that it is given."""

    what: str
    line: str
    inside: tuple[str, ...]
    refs: tuple[int, ...]
    at: int


class Accesses:
    """All accesses of a jaxpr.

    Attributes:
      made: the origin and type of each ref that the jaxpr makes, by its number, which follows those
        of the others.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        inputs: Sequence[int | None],
        number_of: Mapping[int, int],
        n_refs: int,
    ):
        """`inputs`: for each input the number of its ref; `number_of`, by the id of a ref that is
        closed over: its number.
        """
        self.accesses: list[Access] = []
        self._last: dict[int, Access] = {}  # by ref
        self.callbacks: list[Called] = []
        self.made: dict[int, tuple[Origin, Aval]] = {}
        self._n_refs, self._at = n_refs, 0
        self._spans: dict[Any, Span] = {}  # by the equations around
        for step in steps(closed, inputs, number_of, self._make):
            self._note(*step)
        self.spans = [*self._spans.values()]

    def _make(self, aval: Aval, source: int | None) -> int:
        made = (origin_of(aval), aval.inner_aval)
        # An inner function has made it and returned it: it has that one's final value and origin.
        if source is not None and self.made.get(source) == made:
            return source
        number = self._n_refs + len(self.made)
        self.made[number] = made
        return number

    def _note(self, eqn: Eqn, found: dict[int, Touch], around: tuple[tuple[Eqn, int], ...]) -> None:
        is_callback = _jax.is_called_callback(eqn.primitive)
        line = _jax.user_line(eqn, _NO_LINE)
        # What is made here and returned is read at the end, by no line.
        found = {k: kind for k, kind in found.items() if k < self._n_refs or line != _NO_LINE}
        if not found and not is_callback:
            return
        inside = self._spans_of(around)
        if is_callback:
            self.callbacks.append(Called(eqn.primitive.name, line, inside, tuple(found), self._at))
        for number, kind in found.items():
            what = ", ".join(word for one, word in _WORDS.items() if one & kind)
            before = self._last.get(number)
            # `r[i] += x` is traced to a read and a write, which are one update.
            is_second = before is not None and (number, what, line, inside) == before[:4]
            if not (is_second and what not in ("read", "written")):
                self._last[number] = Access(number, what, line, inside, self._at)
                self.accesses.append(self._last[number])
        self._at += 1

    def _spans_of(self, around: tuple[tuple[Eqn, int], ...]) -> tuple[str, ...]:
        """The loops and branches around an access, which reach as far as that."""
        inside: tuple[str, ...] = ()
        for k, (eqn, n) in enumerate(around, 1):
            if what := _span_of(eqn, n):
                known = self._spans.get(around[:k])
                first = known.first if known else self._at
                self._spans[around[:k]] = Span(what, len(inside), first, self._at)
                inside = (*inside, what)
        return inside


def _span_of(eqn: Eqn, k: int) -> str | None:
    """What a jaxpr in an equation is, if it is repeated, chosen or mapped."""
    line = _jax.user_line(eqn)
    if _jax.primitive_of(eqn) is _jax.scan_p:
        n, loop = _jax.scan_params(eqn).length, "fori_loop" if _jax.is_fori_loop(eqn) else "scan"
        return f"{loop} of {n:,} step{'s' * (n != 1)} at {line}"
    if eqn.primitive is _jax.while_p:
        loop = "fori_loop" if _jax.is_fori_loop(eqn) else "while_loop"
        return f"{'predicate of the ' if k == 0 else ''}{loop} at {line}"
    if eqn.primitive is _jax.cond_p:
        return f"branch {k} of {len(eqn.params['branches'])} at {line}"
    if eqn.primitive is _jax.shard_map_p:
        return f"shard_map at {line}"
    return None
