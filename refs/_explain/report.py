"""The report of `refs.explain`: what it says, as data and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from refs._explain.accesses import Span
from refs._explain.page import NO_MOVES, in_bytes, page_of, part_of_page


@dataclasses.dataclass(frozen=True)
class LineOfRef:
    """What a function does to a ref on a line.

    Attributes:
      what: "read", "written", "added to", "multiplied", "minimum taken", "maximum taken".
      line: `file.py:12`.
      inside: the loops and branches around it, from the outermost.
      at: its place among all accesses and callbacks, in the order of the program.
    """

    what: str
    line: str
    inside: tuple[str, ...]
    at: int


@dataclasses.dataclass(frozen=True)
class ExplainedRef:
    """A ref, and what the function does to it.

    Attributes:
      name: its name, or its path among the arguments; None if it has neither.
      created: the line that made it.
      dtype, shape, bytes: those of its value, all devices together.
      role: "argument", "closed over" or "made inside".
      does: what is done to it, in a word or several; "not touched" if nothing is.
      keeps_memory: whether its new value is where the old one was; None if it isn't written, and
        for a ref that the function makes.
      lines: each access.
    """

    name: str | None
    created: str | None
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    role: str
    does: str
    keeps_memory: bool | None
    lines: tuple[LineOfRef, ...]

    @property
    def type(self) -> str:
        """`float32[2,3]`."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class ExplainedMove:
    """Copies or collectives of one kind that are left in the compiled program.

    Attributes:
      what: "copy" or "collective".
      dtype, elements, bytes: the size of one.
      times: how many there are.
      in_loop: whether each step of a loop makes them; otherwise they are made once a call.
      refs: the refs that are as large.
      lines: the lines that they are for.
      why: why it is made.
      instead: what to write.
    """

    what: str
    dtype: str
    elements: int
    bytes: int
    times: int
    in_loop: bool
    refs: tuple[str, ...]
    lines: tuple[str, ...]
    why: str
    instead: str

    def __str__(self) -> str:
        often = "each step of a loop" if self.in_loop else "a call"
        # Of those in branches not all are made.
        times = "once" if self.times == 1 else f"in {self.times} places, each at most once"
        lines = f", for {', '.join(self.lines)}" if self.lines else ""
        return (
            f"{self.what} of {self.elements:,} elements of {self.dtype} ({in_bytes(self.bytes)}), "
            f"{times} {often}{lines}: as many as {' and '.join(self.refs)}"
        )


@dataclasses.dataclass(frozen=True)
class ExplainedMemory:
    """Bytes of one device. `peak` is what the program needs at most, as XLA has planned it.

    Attributes:
      arguments, results: the operands, the values of refs included; and what is returned.
      aliased: the part of the results that takes the memory of arguments.
      temporaries: what else is needed meanwhile.
      ideal: the peak without temporaries.
    """

    arguments: int
    results: int
    aliased: int
    temporaries: int

    @property
    def ideal(self) -> int:
        return self.arguments + self.results - self.aliased

    @property
    def peak(self) -> int:
        return self.ideal + self.temporaries


@dataclasses.dataclass(frozen=True)
class ExplainedCallback:
    """A callback: its primitive, its line, the loops around it, and the refs that it is given."""

    what: str
    line: str
    inside: tuple[str, ...]
    refs: tuple[str, ...]
    at: int

    def __str__(self) -> str:
        given = f", given {', '.join(self.refs)}" if self.refs else ""
        return f"{self.what} at {self.line}{_within(self.inside)}{given}"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `refs.explain` has found. It prints as a table.

    Attributes:
      function: the name of the function.
      platform: the platform that it is compiled for.
      jax: the version of JAX.
      refs: the refs, in the order of the arguments, then those closed over, then those made inside.
      moves: the copies and collectives that move as much as a ref has, of 16 KiB or more.
      kept: the refs that each call copies before it runs, because a callback may raise.
      memory: what the program needs; None where XLA doesn't say.
      callbacks: the callbacks.
      loops: the loops and branches in which refs are used.
      before, after: the jaxpr of the function over refs, and the pure one that is compiled.
    """

    function: str
    platform: str
    jax: str
    refs: tuple[ExplainedRef, ...]
    moves: tuple[ExplainedMove, ...]
    kept: tuple[str, ...]
    memory: ExplainedMemory | None
    callbacks: tuple[ExplainedCallback, ...]
    loops: tuple[Span, ...]
    before: str
    after: str

    def to_dict(self) -> dict[str, Any]:
        """The report as dictionaries, lists, strings and numbers, which `json` takes."""
        found = dataclasses.asdict(self)
        if self.memory is not None:
            found["memory"] |= {"ideal": self.memory.ideal, "peak": self.memory.peak}
        found["loops"] = [span._asdict() for span in self.loops]
        return found

    def to_html(self) -> str:
        """The report as one page of HTML, which needs no other file."""
        return page_of(self)

    def __str__(self) -> str:
        return "\n".join(f"{title}\n{text}" for title, text in self._parts())

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        parts = [Text(f"{title}\n{text}") for title, text in self._parts()]
        if not self.refs:
            return Group(*parts)
        table = Table()
        for word in _HEAD:
            table.add_column(word, overflow="fold")
        for r in self.refs:
            table.add_row(*map(Text, _row(r)))
        return Group(Text(self._title, style="bold"), table, *parts[1:])

    def _repr_html_(self) -> str:
        return part_of_page(self)

    @property
    def _title(self) -> str:
        return f"{self.function} on {self.platform}, jax {self.jax}"

    def _parts(self) -> list[tuple[str, str]]:
        refs = _aligned([_HEAD, *map(_row, self.refs)]) if self.refs else "  It touches no refs."
        parts = [(self._title, refs), ("copies", "\n".join(self._told_moves()))]
        if self.callbacks:
            parts.append(("callbacks", "\n".join(f"  {c}" for c in self.callbacks)))
        if self.memory is not None:
            parts.append(("memory of a device", f"  {self._told_memory(self.memory)}"))
        return parts

    def _told_moves(self) -> Iterable[str]:
        for move in self.moves:
            yield f"  {move}\n    why: {move.why}\n    instead: {move.instead}"
        if self.kept:
            yield (
                f"  {', '.join(self.kept)}: copied before each call, because a callback may raise; "
                "see the page Callbacks"
            )
        if not self.moves and not self.kept:
            yield f"  {NO_MOVES}"

    def _told_memory(self, m: ExplainedMemory) -> str:
        return (
            f"{in_bytes(m.arguments)} of arguments, {in_bytes(m.results)} of results, of which "
            f"{in_bytes(m.aliased)} in the arguments' place, {in_bytes(m.temporaries)} of "
            f"temporaries: {in_bytes(m.peak)} at most, {in_bytes(m.ideal)} without temporaries"
        )


_HEAD = ("ref", "created", "type", "memory", "does", "in place", "where")


def _row(r: ExplainedRef) -> tuple[str, ...]:
    kept = {True: "yes", False: "no", None: "–"}[r.keeps_memory]
    lines = dict.fromkeys(
        f"{x.line} ({' in '.join(what.split(' at ')[0] for what in reversed(x.inside))})"
        if x.inside
        else x.line
        for x in r.lines
    )
    return (
        *(r.name or "–", r.created or "–", r.type, in_bytes(r.bytes)),
        *(r.does, kept, ", ".join(lines)),
    )


def _within(inside: Sequence[str]) -> str:
    return f" in {', '.join(inside)}" if inside else ""


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join("  " + line for line in lines)
