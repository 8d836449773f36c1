"""The report of `refs.explain` as one page of HTML that needs no other file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from refs._explain.accesses import Span
    from refs._explain.report import ExplainedMemory, ExplainedRef, Explanation

_STYLE = """
.refs-explain { font: 14px/1.5 system-ui, sans-serif; color: #1d2433; background: #fff;
  padding: 12px; --line: #d6dbe6; --soft: #f3f5fa; --read: #2463c7; --write: #c2410c;
  --add: #15803d; }
.refs-explain h1 { font-size: 20px; margin: 0 0 4px } .refs-explain h2 { font-size: 16px;
  margin: 24px 0 6px } .refs-explain p { margin: 4px 0 }
.refs-explain table { border-collapse: collapse } .refs-explain th, .refs-explain td { text-align:
  left; vertical-align: top; padding: 3px 12px 3px 0; border-bottom: 1px solid var(--line) }
.refs-explain .wide { overflow-x: auto } .refs-explain pre { background: var(--soft); padding: 10px;
  overflow-x: auto; font-size: 12px } .refs-explain summary { cursor: pointer }
.refs-explain .muted { opacity: .7 } .refs-explain .move { border-left: 4px solid var(--write);
  padding: 2px 12px; margin: 8px 0 } .refs-explain .bar { fill: var(--soft); stroke: var(--line) }
.refs-explain text { fill: currentColor; font-size: 12px } .refs-explain .loop { fill: #8090b0;
  fill-opacity: .13 } .refs-explain .read { fill: none; stroke: var(--read); stroke-width: 2 }
.refs-explain .write { fill: var(--write) } .refs-explain .add { fill: var(--add) }
@media (prefers-color-scheme: dark) { .refs-explain { color: #e3e8f2; background: #14181f;
  --line: #39424f; --soft: #1f2530; --read: #7fb0ff; --write: #fb923c; --add: #4ade80; } }
"""

NO_MOVES = "none of a ref's size, 16 KiB or more"
_STEP, _ROW, _TOP = 26, 26, 8  # in pixels: of one access, of one ref, above the first
_MOST_ROWS, _MOST_STEPS = 100, 400  # a picture of more is no picture


def page_of(report: Explanation) -> str:
    """A whole page."""
    title = escape(f"refs.explain: {report.function}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark"></head>\n'
        f'<body style="margin: 16px">\n{part_of_page(report)}\n</body></html>\n'
    )


def part_of_page(report: Explanation) -> str:
    """The same for a place in another page, a notebook's for instance."""
    parts = [
        f"<style>{_STYLE}</style>",
        '<div class="refs-explain">',
        f"<h1><code>{escape(report.function)}</code></h1>",
        f'<p class="muted">compiled for {escape(report.platform)} by jax {escape(report.jax)}</p>',
        *_refs(report.refs),
        *_life(report),
        "<h2>Copies</h2>",
        *_moves(report),
        *_callbacks(report),
        *([] if report.memory is None else _memory(report.memory)),
        "<h2>Jaxprs</h2>",
        *_folded("before: the function over refs", report.before),
        *_folded("after: the pure function that is compiled", report.after),
        "</div>",
    ]
    return "\n".join(parts)


def _refs(refs: Sequence[ExplainedRef]) -> Iterable[str]:
    if not refs:
        yield "<p>It touches no refs.</p>"
        return
    head = ("ref", "created", "type", "memory", "role", "does", "in place")
    yield '<h2>Refs</h2><div class="wide"><table><tr>'
    yield "".join(f"<th>{word}</th>" for word in head) + "</tr>"
    for r in refs:
        kept = {True: "yes", False: "<b>no</b>", None: "–"}[r.keeps_memory]
        cells = [escape(x) for x in (r.name or "–", r.created or "–", r.type)]
        cells += [in_bytes(r.bytes), r.role, r.does, kept]
        yield f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    yield "</table></div>"


def _life(report: Explanation) -> Iterable[str]:
    """The life of each ref: its accesses from left to right, and the loops that they are in."""
    rows = [r for r in report.refs if r.lines][:_MOST_ROWS]
    if not rows:
        return
    n = 1 + max(line.at for r in rows for line in r.lines)
    if n > _MOST_STEPS:
        yield f"<p>{n:,} accesses: too many for a picture.</p>"
        return
    names = [r.name or f"a ref of {r.created or 'an unknown line'}" for r in rows]
    left = 20 + 7 * max(map(len, names))
    width, height = left + _STEP * n + 20, _TOP + _ROW * len(rows) + 8
    yield "<h2>The life of each ref</h2>"
    yield (
        '<p class="muted">From left to right, in the order of the program: <b>○</b> read, <b>■</b> '
        "written, <b>▲</b> added to, or updated likewise. Shaded: loops and branches. Point at a "
        "mark for its line.</p>"
    )
    yield f'<div class="wide"><svg width="{width}" height="{height}" role="img">'
    for span in report.loops:
        yield _loop(span, left, height)
    for k, (r, name) in enumerate(zip(rows, names, strict=True)):
        yield from _row(r, name, left, _TOP + _ROW * k + _ROW // 2, left + _STEP * n)
    yield "</svg></div>"


def _loop(span: Span, left: int, height: int) -> str:
    x, inset = left + _STEP * span.first, 2 * span.depth
    return (
        f'<rect class="loop" x="{x + inset}" y="{2 + inset}" height="{height - 4 - 2 * inset}" '
        f'width="{_STEP * (span.last - span.first + 1) - 2 * inset}" rx="4">'
        f"<title>{escape(span.what)}</title></rect>"
    )


def _row(r: ExplainedRef, name: str, left: int, y: int, right: int) -> Iterable[str]:
    first = min(line.at for line in r.lines) if r.role == "made inside" else 0
    x = left + _STEP * first
    yield f'<text x="4" y="{y + 4}">{escape(name)}</text>'
    yield f'<rect class="bar" x="{x}" y="{y - 4}" width="{right - x}" height="8" rx="4"/>'
    for line in r.lines:
        where = "".join(f", in {what}" for what in line.inside)
        title = f"<title>{escape(f'{name}: {line.what} at {line.line}{where}')}</title>"
        yield _mark(line.what, left + _STEP * line.at + _STEP // 2, y, title)


def _mark(what: str, x: int, y: int, title: str) -> str:
    if what == "read":
        return f'<circle class="read" cx="{x}" cy="{y}" r="6">{title}</circle>'
    if "written" in what:
        return f'<rect class="write" x="{x - 6}" y="{y - 6}" width="12" height="12">{title}</rect>'
    return f'<path class="add" d="M{x - 7} {y + 6} L{x} {y - 7} L{x + 7} {y + 6} Z">{title}</path>'


def _moves(report: Explanation) -> Iterable[str]:
    for move in report.moves:
        yield (
            f'<div class="move"><p>A {escape(str(move))}.</p><p><b>Why:</b> {escape(move.why)}.</p>'
            f"<p><b>Instead:</b> {escape(move.instead)}</p></div>"
        )
    if report.kept:
        yield (
            f"<p>Copied before each call, because a callback may raise: "
            f"{escape(', '.join(report.kept))}.</p>"
        )
    if not report.moves and not report.kept:
        yield f"<p>{NO_MOVES}</p>"


def _callbacks(report: Explanation) -> Iterable[str]:
    if report.callbacks:
        yield "<h2>Callbacks</h2><ul>"
        yield from (f"<li>{escape(str(c))}</li>" for c in report.callbacks)
        yield "</ul>"


def _memory(m: ExplainedMemory) -> Iterable[str]:
    rows = [
        ("arguments, the values of refs included", m.arguments),
        ("results", m.results),
        ("of these in the arguments' place", m.aliased),
        ("temporaries", m.temporaries),
        ("at most", m.peak),
        ("without temporaries", m.ideal),
    ]
    yield "<h2>Memory of a device</h2><table>"
    for what, n in rows:
        yield f"<tr><td>{escape(what)}</td><td>{in_bytes(n)}</td></tr>"
    yield "</table>"


def _folded(title: str, text: str) -> Iterable[str]:
    yield f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def in_bytes(n: int) -> str:
    """A number of bytes, in a unit that fits: 1.5 MiB."""
    size, unit = float(n), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{n} B" if unit == "B" else f"{size:,.1f} {unit}"
