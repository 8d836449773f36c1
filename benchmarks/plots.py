"""The plots of the documentation, as SVG: the same figures always make the same file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

COLOURS = {
    "refs": "#0072b2",
    "refs.jit": "#0072b2",
    "jax.Ref": "#d55e00",
    "by hand": "#e69f00",
    "bound": "#333333",
}
OTHERS = ("#56b4e9", "#009e73", "#cc79a7", "#8a6d3b", "#7f7f7f")
# Lines often lie on each other: the later ones let the earlier ones be seen.
WIDTHS = {"refs": 5}
DASHES = {"by hand": "6 3", "bound": "2 3"}
STYLE = "text { font: 12px sans-serif; fill: #333 } .grid { stroke: #ddd } .axis { stroke: #333 }"

Lines = Mapping[str, Sequence[tuple[float, float]]]  # way -> points


def colours(ways: Iterable[str]) -> dict[str, str]:
    others = iter(OTHERS * 9)
    return {way: COLOURS.get(way) or next(others) for way in ways}


def svg(width: float, height: float, parts: Iterable[str], title: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(title)}">'
    )
    white = f'<rect width="{width:g}" height="{height:g}" fill="#fff"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", white, *parts, "</svg>\n"])


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def legend(colour: Mapping[str, str], x: float, y: float) -> Iterable[str]:
    for way, fill in colour.items():
        yield f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="10" height="10" fill="{fill}"/>'
        yield text(x + 15, y, way)
        x += 35 + 7 * len(way)


def exponents(values: Sequence[float]) -> range:
    """Those of the powers of ten from one at most the least value to one at least the largest."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return range(low, max(high, low + 1) + 1)


def power(exponent: int) -> str:
    """In digits what is short so: 10, 0.1, 10³."""
    if -3 <= exponent <= 2:
        return f"{10.0**exponent:g}"
    return power_of_ten(exponent)


def power_of_ten(exponent: int) -> str:
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


# -- Bars: ratios to a control --------------------------------------------------------------------


def bars(rows: Mapping[str, Mapping[str, float]], title: str) -> str:
    """A bar for each ratio, from 1 to the right if it is larger and to the left if it is less."""
    ways = list(dict.fromkeys(way for row in rows.values() for way in row))
    colour = colours(ways)
    left, width, bar, gap, top = 300, 820, 11, 9, 52
    across = exponents([1, *(x for row in rows.values() for x in row.values())])

    def at(x: float) -> float:
        return left + (width - left - 70) * (math.log10(x) - across[0]) / (across[-1] - across[0])

    parts, y = [text(10, 18, title), *legend(colour, 10, 38)], float(top)
    for row_title, row in rows.items():
        parts.append(text(left - 12, y + bar * len(row) / 2 + 4, row_title, "end"))
        for way, ratio in row.items():
            start, end = sorted([at(1), at(ratio)])
            parts.append(
                f'<rect x="{start:.1f}" y="{y:.1f}" width="{end - start:.1f}" '
                f'height="{bar - 2}" fill="{colour[way]}"/>'
            )
            parts.append(text(max(end, at(1)) + 4, y + bar - 2, times(ratio)))
            y += bar
        y += gap
    for exponent in across:
        x = at(10.0**exponent)
        parts.insert(0, line(x, top - 4, x, y, "grid" if exponent else "axis"))
        parts.append(text(x, y + 14, power(exponent), "middle"))
    return svg(width, y + 24, parts, title)


def times(ratio: float) -> str:
    """`1.38x`, `11x`, `6,100x`: a ratio with the digits that say something."""
    if ratio < 10:
        return f"{ratio:.2f}x"
    return f"{float(f'{ratio:.2g}'):,.0f}x"


# -- Lines: a panel for each program, all with the same axes ---------------------------------------


def panels(programs: Mapping[str, Lines], title: str) -> str:
    ways = list(dict.fromkeys(way for lines in programs.values() for way in lines))
    colour = colours(ways)
    points = [p for lines in programs.values() for line in lines.values() for p in line]
    xs, ys = exponents([x for x, _ in points]), exponents([y for _, y in points])
    width, height, margin, top, across = 205.0, 150.0, 45.0, 70.0, 4
    parts = [text(10, 18, title), *legend(colour, 10, 40)]
    for k, (program, lines) in enumerate(programs.items()):
        left = margin + k % across * (width + 20)
        upper = top + k // across * (height + 50)

        def at(x: float, y: float, left: float = left, upper: float = upper) -> tuple[float, float]:
            return (
                left + width * (math.log10(x) - xs[0]) / (xs[-1] - xs[0]),
                upper + height * (ys[-1] - math.log10(y)) / (ys[-1] - ys[0]),
            )

        parts.append(text(left, upper - 6, program))
        for e in ys:
            y = at(1, 10.0**e)[1]
            parts += [line(left, y, left + width, y, "grid")]
            if k % across == 0 and (e - ys[0]) % 2 == 0:
                parts.append(text(left - 5, y + 4, power(e), "end"))
        for e in xs:
            parts.append(text(at(10.0**e, 1)[0], upper + height + 15, power(e), "middle"))
        for way, found in lines.items():
            drawn = " ".join("{:.1f},{:.1f}".format(*at(*p)) for p in sorted(found))
            dash = DASHES.get(way, "none")
            parts.append(
                f'<polyline points="{drawn}" fill="none" stroke="{colour[way]}" '
                f'stroke-width="{WIDTHS.get(way, 1.8)}" stroke-dasharray="{dash}"/>'
            )
    rows = -(-len(programs) // across)
    return svg(margin + across * (width + 20), top + rows * (height + 50), parts, title)
