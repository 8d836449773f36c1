"""Names what got slower, and what got faster, from one file of results to another.

    git show HEAD:benchmarks/results/dispatch.json > old.json
    python benchmarks/compare.py old.json benchmarks/results/dispatch.json

Compared are the ways that run code of `refs`, of each version of JAX that both files have. A figure
has changed if it differs by more than the noise of both; and if there is a control, by more than
the noise from what it would be had it changed as the control did. So a slower machine is no change.
The exit status is 1 if anything got slower.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from results import Measurement, Section, read
from stopwatch import Timing


@dataclass(frozen=True)
class Change:
    what: str
    unit: str
    old: Timing
    new: Timing

    @property
    def slower(self) -> bool:
        return self.new.median > self.old.median

    def __str__(self) -> str:
        times = " → ".join(f"{t.median:.4g} ± {t.noise:.2g}" for t in (self.old, self.new))
        return f"{'slower' if self.slower else 'faster'}: {self.what}: {times} {self.unit}"


def changes(old: Section, new: Section) -> Iterator[Change]:
    for title, row in new.rows.items():
        before = old.rows.get(title, {})
        for way in [way for way in row if way in before and "refs" in way]:
            sign = direction(before[way], row[way])
            control = new.control or ""
            if sign and control in row and control in before:
                as_control = scaled(before[way], before[control], row[control])
                sign *= direction(as_control, row[way]) == sign
            if sign:
                yield Change(f"{title}, {way}", new.unit, before[way], row[way])


def direction(old: Timing, new: Timing) -> int:
    """1 if the figure has grown, -1 if it has shrunk, 0 if that may be noise."""
    grown = new.median - old.median
    return 0 if abs(grown) <= old.noise + new.noise else 1 if grown > 0 else -1


def scaled(time: Timing, control: Timing, new_control: Timing) -> Timing:
    """What the figure would be, had it changed as its control did."""
    if min(control.median, new_control.median) <= 0:  # too short to be measured
        return time
    growth = new_control.median / control.median
    uncertain = control.noise / control.median + new_control.noise / new_control.median
    return Timing(time.median * growth, (time.noise + time.median * uncertain) * growth)


def compared(old: Measurement, new: Measurement) -> Iterator[Change | str]:
    if old.machine != new.machine:
        yield f"jax {new.jax}: other machines, {old.machine} and {new.machine}"
    for name, section in old.sections.items():
        here = new.sections.get(name, Section(section.unit, {}))
        gone = [title for title in section.rows if title not in here.rows]
        if gone:
            yield f"jax {new.jax}, {name}: not measured any more: {', '.join(gone)}"
        for change in changes(section, here):
            yield replace(change, what=f"jax {new.jax}, {name}: {change.what}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    options = parser.parse_args()
    before = {found.jax: found for found in read(options.old)}
    after = {found.jax: found for found in read(options.new)}
    both = [version for version in after if version in before]
    if not both:
        parser.error("the files have no version of JAX in common")
    found = [line for version in both for line in compared(before[version], after[version])]
    print(*found or ["Nothing has changed by more than the noise."], sep="\n")
    return int(any(isinstance(line, Change) and line.slower for line in found))


if __name__ == "__main__":
    sys.exit(main())
