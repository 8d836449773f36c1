"""Renews the figures of the documentation from `benchmarks/results`: tables, numbers and plots.

    python benchmarks/tables.py           # writes README.md and docs/
    python benchmarks/tables.py --check   # only says what isn't as the results say

Between `<!-- figures: NAME -->` and `<!-- end of figures -->` stands `figures.content(NAME)`; the
plot `figures/NAME.svg`, to which a page links, is `figures.plot(NAME)`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import figures_growth  # noqa: F401, it registers its tables
import figures_reversible  # noqa: F401, the same
from figures import Results, content, plot
from results import FOLDER
from suite import ROOT

MARKED = re.compile(
    r"(?P<start><!-- figures: (?P<name>\S+) -->)(?P<content>.*?)(?P<end><!-- end of figures -->)",
    re.S,
)
PLOT = re.compile(r"\(figures/(\S+)\.svg\)")


def renewed(page: str, results: Results) -> str:
    """The text of a page with the figures of the results."""

    def new(match: re.Match[str]) -> str:
        found = content(match["name"], results)
        around = "\n" if "\n" in found else ""
        return f"{match['start']}{around}{found}{around}{match['end']}"

    return MARKED.sub(new, page)


def files(root: Path, results: Results) -> Iterator[tuple[Path, str]]:
    """Each file that has figures, and what is to be in it."""
    for page in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        if MARKED.search(text):
            yield page, renewed(text, results)
        for name in PLOT.findall(text):
            yield page.parent / "figures" / f"{name}.svg", plot(name, results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if anything is old"
    )
    parser.add_argument("--results", type=Path, default=FOLDER, metavar="FOLDER")
    options = parser.parse_args()
    old = 0
    for file, right in files(ROOT, Results(options.results)):
        if not file.exists() or file.read_text(encoding="utf-8") != right:
            old += 1
            print(
                file.relative_to(ROOT), "isn't as the results say" if options.check else "renewed"
            )
            if not options.check:
                file.parent.mkdir(exist_ok=True)
                file.write_text(right, encoding="utf-8")
    return int(options.check and old > 0)


if __name__ == "__main__":
    sys.exit(main())
