"""A parser of optimized HLO: which arrays it copies, where, and for which line of the user's."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{$")
_INSTRUCTION = re.compile(
    r"^  (?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[\w\-]+)\((?P<rest>.*)$"
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_COPIES = ("copy", "copy-start")
_COLLECTIVES = tuple(
    op + suffix
    for op in ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
    for suffix in ("", "-start")
)
_STACK_FRAME = re.compile(r"stack_frame_id=(\d+)")


class Instruction(NamedTuple):
    """One instruction. `arrays`: for each array in its result, dtype and number of elements."""

    name: str
    op: str
    arrays: list[tuple[str, int]]
    rest: str  # the operands and attributes, as printed

    def called(self) -> list[str]:
        """The computations that it runs."""
        found = _CALLED.findall(self.rest)
        for names in _BRANCHES.findall(self.rest):
            found += [name.strip().lstrip("%") for name in names.split(",")]
        return found


class Move(NamedTuple):
    """A copy of an array of `size` elements, or a collective that gives each device as many.

    Attributes:
      in_loop: whether a loop repeats it.
      is_permutation: whether it is a collective that exchanges what devices have.
      is_of_transpose: whether it is a copy that puts a transposed array in another order.
      line: the line of the user's that it is for.
    """

    dtype: str
    size: int
    in_loop: bool
    is_collective: bool
    is_permutation: bool
    is_of_transpose: bool
    line: str | None

    @property
    def bytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)
        return self.size * max(int(bits[0]) // 8 if bits else 1, 1)


class Module(NamedTuple):
    """An optimized HLO module, as far as copies need it.

    Attributes:
      text: the module, printed.
      computations: name -> instructions.
      in_loops: the names of the computations that loops run, directly or through others.
    """

    text: str
    computations: dict[str, list[Instruction]]
    in_loops: set[str]

    @staticmethod
    def parse(text: str) -> Module:
        computations: dict[str, list[Instruction]] = {}
        current: list[Instruction] = []
        for line in text.splitlines():
            if match := _INSTRUCTION.match(line):
                arrays = _arrays(match["type"])
                current.append(Instruction(match["name"], match["op"], arrays, match["rest"]))
            elif match := _COMPUTATION.match(line):
                current = computations[match[1]] = []
        looped = [
            name
            for instructions in computations.values()
            for i in instructions
            if i.op == "while"
            for name in i.called()
        ]
        in_loops: set[str] = set()
        while looped:
            name = looped.pop()
            if name not in in_loops:
                in_loops.add(name)
                looped += [c for i in computations.get(name, ()) for c in i.called()]
        return Module(text, computations, in_loops)

    def aliases(self) -> set[int]:
        """The numbers of the array parameters whose memory an output reuses."""
        header = self.text.split("\n", 1)[0]
        numbers = re.findall(r"\((\d+), \{[\d, ]*\}, (?:may|must)-alias\)", header)
        n_tokens = len(self._parameters()) - len(self.parameters())
        return {int(k) - n_tokens for k in numbers}

    def parameters(self) -> dict[int, tuple[str, int]]:
        """For each array parameter, by number: its dtype and its number of elements."""
        # Tokens, which put effects in order, come first.
        return dict(enumerate(array for array in self._parameters() if array[0] != "token"))

    def _parameters(self) -> list[tuple[str, int]]:
        layout = re.search(r"entry_computation_layout=\{\((.*?)\)->", self.text)
        return _arrays(layout[1] if layout else "")

    def moves(self) -> list[Move]:
        """The copies of arrays, and the collectives."""
        return [
            Move(
                dtype,
                size,
                name in self.in_loops,
                i.op not in _COPIES,
                i.op.startswith(("collective-permute", "all-to-all")),
                any(i.rest.startswith(f"%{o.name})") for o in instructions if o.op == "transpose"),
                self._line_for(i, instructions),
            )
            for name, instructions in self.computations.items()
            for i in instructions
            if i.op in _COPIES + _COLLECTIVES
            # What starts a copy returns its operand, too.
            for dtype, size in (i.arrays[:1] if i.op in _COPIES else i.arrays)
        ]

    def _line_for(self, copy: Instruction, others: Sequence[Instruction]) -> str | None:
        """The line that needs a copy: that of a user of it, of itself, or of its source."""
        takes = re.compile(rf"%{re.escape(copy.name)}\b")
        users = [i for i in others if i.op not in ("tuple", "while") and takes.search(i.rest)]
        sources = [i for i in others if re.search(rf"%{re.escape(i.name)}\b", copy.rest)]
        return next(filter(None, map(self.line_of, [*users, copy, *sources])), None)

    def line_of(self, instruction: Instruction) -> str | None:
        """`file.py:12` of the code that an instruction comes from, if the module says."""
        if match := _STACK_FRAME.search(instruction.rest):
            return self._frame(int(match[1]))
        return None

    def _frame(self, number: int) -> str | None:
        frame = re.search(rf"^{number} \{{file_location_id=(\d+)", self._table("StackFrames"), re.M)
        place = frame and re.search(
            rf"^{frame[1]} \{{file_name_id=(\d+).*? line=(\d+)", self._table("FileLocations"), re.M
        )
        file = place and re.search(rf'^{place[1]} "(.*)"', self._table("FileNames"), re.M)
        return f"{file[1].rsplit('/', 1)[-1]}:{place[2]}" if file and place else None

    def _table(self, title: str) -> str:
        match = re.search(rf"^{title}\n(.*?)\n\n", self.text, re.M | re.S)
        return match[1] if match else ""


def _arrays(text: str) -> list[tuple[str, int]]:
    return [
        (dtype, math.prod(int(d) for d in dims.split(",") if d))
        for dtype, dims in _ARRAY.findall(text)
    ]
