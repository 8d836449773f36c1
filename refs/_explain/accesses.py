"""What a jaxpr does to refs, in order: each read, write and update, with its line and loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from refs import _jax
from refs._origin import Origin, origin_of
from refs._tracing.facts import inner_calls
from refs._tracing.touch_analysis import Touch, own_touches
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
      made: the origin and type of each ref that the jaxpr makes; their numbers follow the others.
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
        self.spans: list[Span] = []
        self.callbacks: list[Called] = []
        self.made: list[tuple[Origin, Aval]] = []
        self._number_of, self._n_refs, self._at = number_of, n_refs, 0
        self._walk(closed, inputs, ())

    def _walk(
        self, closed: ClosedJaxpr, inputs: Sequence[int | None], inside: tuple[str, ...]
    ) -> None:
        jaxpr = closed.jaxpr
        constants = [
            self._number_of[id(c)] if isinstance(c, _jax.NativeRef) else None for c in closed.consts
        ]
        numbers: dict[Any, int | None] = dict(
            zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *inputs), strict=True)
        )
        own: dict[int, dict[int, Touch]] = {}  # by equation: what it does to which refs
        for eqn, v, kind in own_touches(jaxpr, closed.consts):
            number = numbers.get(v)
            if number is None:  # It is made here.
                number = numbers[v] = self._make(v.aval)
            found = own.setdefault(id(eqn), {})
            found[number] = found.get(number, Touch.NONE) | kind
        for eqn in jaxpr.eqns:
            called = list(inner_calls(eqn))
            if called:
                self._walk_calls(eqn, called, numbers, inside)
            else:
                self._note(eqn, own.get(id(eqn), {}), inside)

    def _make(self, aval: Any) -> int:
        self.made.append((origin_of(aval), aval.inner_aval))
        return self._n_refs + len(self.made) - 1

    def _walk_calls(
        self,
        eqn: Eqn,
        called: Sequence[tuple[ClosedJaxpr, Sequence[Any]]],
        numbers: dict[Any, int | None],
        inside: tuple[str, ...],
    ) -> None:
        for k, (closed, operands) in enumerate(called):
            given = [None if isinstance(v, _jax.Literal) else numbers.get(v) for v in operands]
            what = _span_of(eqn, k)
            first, place = self._at, len(self.spans)
            self._walk(closed, given, (*inside, what) if what else inside)
            if what and self._at > first:
                self.spans.insert(place, Span(what, len(inside), first, self._at - 1))

    def _note(self, eqn: Eqn, found: dict[int, Touch], inside: tuple[str, ...]) -> None:
        line = _jax.user_line(eqn, _NO_LINE)
        if _jax.is_called_callback(eqn.primitive):
            self.callbacks.append(Called(eqn.primitive.name, line, inside, tuple(found), self._at))
        # What is made here and returned is read at the end, by no line.
        found = {k: kind for k, kind in found.items() if k < self._n_refs or line != _NO_LINE}
        if not found and not _jax.is_called_callback(eqn.primitive):
            return
        for number, kind in found.items():
            what = ", ".join(word for one, word in _WORDS.items() if one & kind)
            before = next((a for a in reversed(self.accesses) if a.ref == number), None)
            # `r[i] += x` is traced to a read and a write, which are one update.
            is_second = before is not None and (number, what, line, inside) == before[:4]
            if not (is_second and what not in ("read", "written")):
                self.accesses.append(Access(number, what, line, inside, self._at))
        self._at += 1


def _span_of(eqn: Eqn, k: int) -> str | None:
    """What a jaxpr in an equation is, if it is repeated, chosen or mapped."""
    line = _jax.user_line(eqn)
    if eqn.primitive is _jax.scan_p:
        n = eqn.params["length"]
        return f"scan of {n:,} step{'s' * (n != 1)} at {line}"
    if eqn.primitive is _jax.while_p:
        return f"{'predicate of the ' if k == 0 else ''}while_loop at {line}"
    if eqn.primitive is _jax.cond_p:
        return f"branch {k} of {len(eqn.params['branches'])} at {line}"
    if eqn.primitive is _jax.shard_map_p:
        return f"shard_map at {line}"
    return None
