"""The table of how the time to prepare a program grows."""

from __future__ import annotations

from figures import Results, code, shown, table, text
from results import Measurement


@text("growth.table")
def growth(results: Results) -> str:
    versions = results.of("growth")
    columns = [(found, way) for found in versions for way in ("refs", "by hand")]

    def grown(found: Measurement, title: str, way: str) -> str:
        small, large = (found.sections[size].rows[title][way].median for size in ("small", "large"))
        return f"{shown(large)} ({large / small:.1f}x)"

    head = ["s at the larger size, ratio to the smaller"]
    head += [f"{code(way)}, jax {found.jax}" for found, way in columns]
    titles = versions[-1].sections["large"].rows
    return table(head, ([title, *(grown(m, title, way) for m, way in columns)] for title in titles))
