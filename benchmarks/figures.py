"""What stands between the markers of a page: tables and numbers, made from the files of results.

A marker names a table of this file (`TEXTS`) or, as `<benchmark>.<section>`, any section of a file,
for a table that has all of it. Columns are those of the newest JAX of the file; the last one, if
there are others, is `refs` on the oldest. A plot has such a name too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path

from plots import bars, panels, power_of_ten, times
from results import Measurement, Row, Section, read

LEAST = 0.001  # µs: what is less is noise
NONE = "–"
TEXTS: dict[str, Callable[[Results], str]] = {}
PLOTS: dict[str, Callable[[Results], str]] = {}


class Results:
    """A folder of results."""

    def __init__(self, folder: Path) -> None:
        self.of = cache(lambda benchmark: read(folder / f"{benchmark}.json"))

    def newest(self, benchmark: str) -> Measurement:
        return self.of(benchmark)[-1]

    def oldest(self, benchmark: str) -> Measurement:
        return self.of(benchmark)[0]

    def pairs(self, benchmark: str, section: str, title: str, *ways: str) -> list[str]:
        """For each way, its figures of the oldest and the newest JAX: `4.5, 4.6`."""
        rows = [found.sections[section].rows[title] for found in self.of(benchmark)]
        return [", ".join(step(row, way) for row in rows if way in row) or NONE for way in ways]


def text(name: str) -> Callable[[Callable[[Results], str]], Callable[[Results], str]]:
    def add(make: Callable[[Results], str]) -> Callable[[Results], str]:
        TEXTS[name] = make
        return make

    return add


def content(name: str, results: Results) -> str:
    if name in TEXTS:
        return TEXTS[name](results)
    benchmark, _, section = name.partition(".")
    return whole_section(results.of(benchmark), section)


def plot(name: str, results: Results) -> str:
    if name in PLOTS:
        return PLOTS[name](results)
    benchmark, _, title = name.partition(".")
    found = results.newest(benchmark)
    section = found.sections[title]
    control = str(section.control)
    ratios = {
        row_title: {w: t.median / row[control].median for w, t in row.items() if w != control}
        for row_title, row in section.rows.items()
    }
    return bars(ratios, f"Time, as a multiple of “{control}” (jax {found.jax})")


# -- Cells ----------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("|  |", "| |")


def shown(x: float) -> str:
    """Two digits below ten, three above; no more than three decimals."""
    if x < 10:
        digits = 3 if x < 0.1 else 2 if x < 1 else 1
        return f"{x:.{digits}f}"
    return f"{float(f'{x:.3g}'):,.{1 if x < 100 and x % 1 else 0}f}"


def cell(row: Row, way: str, control: str | None = None) -> str:
    if way not in row:
        return NONE
    time = shown(row[way].median)
    if control in (None, way) or row[control].median <= 0:
        return time
    return f"{time} ({times(row[way].median / row[control].median)})"


def code(way: str) -> str:
    if not way.startswith(("refs", "jax.", "nnx.", "equinox.")):
        return way
    name, comma, rest = way.partition(", ")
    return f"`{name}`{comma}{rest}"


def whole_section(
    versions: Sequence[Measurement], title: str, of: Sequence[str] | None = None
) -> str:
    """All ways of a section, or those `of` these names."""
    section, *older = [found.sections[title] for found in versions[::-1]]
    oldest = older[-1] if older else Section(section.unit, {})
    named = [way for way in section.ways() if of is None or way in of]
    ways = sorted(named, key=lambda way: way != section.control)
    ours = [way for way in oldest.ways() if way.startswith("refs")]
    jax = versions[0].jax
    rows = (
        [
            code_title(row_title),
            *(cell(row, way, section.control) for way in ways),
            *(cell(oldest.rows.get(row_title, {}), way, section.control) for way in ours),
        ]
        for row_title, row in section.rows.items()
    )
    head = [section.unit, *map(code, ways), *(f"{code(way)}, jax {jax}" for way in ours)]
    return table(head, rows)


def code_title(title: str) -> str:
    return f"`{title}`" if "(" in title or "[" in title else title


# -- Calls ----------------------------------------------------------------------------------------


@text("dispatch.added")
def added_by_a_call(results: Results) -> str:
    """What `refs.jit` takes more than the jit by hand, of a call and of each of its refs."""

    def more(row: Row, control: str) -> float:
        return row["refs"].median - row[control].median

    section = results.newest("dispatch").sections["sizes"]
    one, *_ = found = {t: more(row, str(section.control)) for t, row in section.rows.items()}
    each = sorted((found[t] - found[one]) / 199 for t in found if t.startswith("200 refs"))
    return f"{shown(found[one])} µs a call, and {each[0]:.2f} to {each[-1]:.2f} µs for each ref"


@text("dispatch.view")
def added_by_a_view(results: Results) -> str:
    rows = results.newest("dispatch").sections["eager"].rows
    at, plain = rows["r.at[i].add(v)"]["refs"], rows["addupdate(r, i, v)"]["refs"]
    return f"{shown(at.median - plain.median)} µs"


@text("outside_jit.ratios")
def ratios_outside_of_jit(results: Results) -> str:
    rows = results.newest("outside_jit").sections["calls"].rows
    found = [r["refs"].median / r["jax, state by hand"].median for r in rows.values()]
    plain, (whole, *_) = [*found[:2], found[3]], found[2:]
    return (
        f"{min(plain):.1f} to {max(plain):.1f} times what `jax.grad` costs, and {whole:.1f} times"
    )


# -- Callbacks ------------------------------------------------------------------------------------

BUFFERS = "jax.buffer_callback"
CALLBACKS = ("refs.jit", "refs, eager", "jax.pure_callback", "jax.io_callback", BUFFERS)


@text("callbacks.table")
def callbacks(results: Results) -> str:
    found = results.newest("callbacks").sections
    calls, steps = found["top-level"].rows, found["in-a-loop"].rows
    places = (
        *((title, calls[title]) for title in calls),
        *((f"{title}, a step", steps[title]) for title in steps if title.startswith("one")),
    )
    rows = [[title, *(cell(r, w, CALLBACKS[0]) for w in CALLBACKS)] for title, r in places]
    for title, memory in found["memory"].rows.items():
        if title.startswith("one"):
            extra = [f"{memory[way].median:,.0f} MiB" for way in CALLBACKS]
            rows.append([f"extra memory for {title.rpartition(', ')[2]}", *extra])
    return table(["µs", *map(code, CALLBACKS)], rows)


def over_the_buffer(results: Results, place: str) -> float:
    row = smallest(results.newest("callbacks").sections[place])
    return row["refs.jit"].median - row[BUFFERS].median


def smallest(section: Section) -> Row:
    return next(iter(section.rows.values()))


@text("callbacks.step")
def added_by_a_callback(results: Results) -> str:
    return f"{over_the_buffer(results, 'in-a-loop'):.0f} µs"


@text("callbacks.call")
def added_by_its_call(results: Results) -> str:
    more = over_the_buffer(results, "top-level") - over_the_buffer(results, "in-a-loop")
    return f"{more:.0f} µs"


# -- In place -------------------------------------------------------------------------------------


@text("lowering.table")
def lowering(results: Results) -> str:
    versions = results.of("lowering")
    columns = [(found, way) for found in versions for way in ("refs", "jax.Ref")]
    rows = (
        [
            title,
            f"{row['by hand'].median:,.0f}",
            *(cell(found.sections["times"].rows[title], way, "by hand") for found, way in columns),
        ]
        for title, row in versions[-1].sections["equations"].rows.items()
    )
    head = ["ms, ratio to by hand", "equations", *(f"`{w}`, jax {m.jax}" for m, w in columns)]
    return table(head, rows)


def sizes(found: Measurement) -> list[str]:
    return [title for title in found.sections if title.isdecimal()]


@text("programs.table")
def programs(results: Results) -> str:
    new, old = results.newest("programs"), results.oldest("programs")
    small, large, *_ = sizes(new)
    section, copies = new.sections[large], new.sections["copies"].rows
    others = [way for way in section.ways() if way != "refs"]
    memory = "memory" if new.about["numba"] else "memory (Python)"
    names = [memory if way == "bound" else code(way) for way in others]
    head = ["µs a step", f"`refs`, {n(small)} → {n(large)}", *(f"{w}, {n(large)}" for w in names)]
    head.append("copies by hand")
    if old is not new:
        head.append(f"`refs`, jax {old.jax}")

    def pair(found: Measurement, title: str) -> str:
        rows = [found.sections[size].rows.get(title, {}) for size in sizes(found)[:2]]
        return " → ".join(step(row, "refs") for row in rows)

    def line(title: str, row: Row) -> Iterable[str]:
        yield title
        yield pair(new, title)
        yield from (step(row, way) for way in others)
        yield "{:.0f} → {:.0f}".format(*(copies[title][w].median for w in ("by hand", "refs")))
        if old is not new:
            yield pair(old, title)

    return table(head, (list(line(title, row)) for title, row in section.rows.items()))


def step(row: Row, way: str) -> str:
    return shown(max(LEAST, row[way].median)) if way in row else NONE


def n(size: str) -> str:
    """`10⁴`, or in digits what is no power of ten."""
    if size.strip("0") != "1":
        return f"{int(size):,}"
    return power_of_ten(len(size) - 1)


def plot_of_programs(results: Results) -> str:
    found = results.newest("programs")
    lines: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for size in sizes(found):
        for title, row in found.sections[size].rows.items():
            for way, time in row.items():
                point = float(size), max(LEAST, time.median)
                lines.setdefault(title, {}).setdefault(way, []).append(point)
    return panels(lines, f"µs a step, over the number of elements (jax {found.jax})")


PLOTS["programs.steps"] = plot_of_programs

# -- On a GPU -------------------------------------------------------------------------------------


@text("gpu.calls")
def calls_on_a_gpu(results: Results) -> str:
    ways = "by hand, donated", "jax.Ref", "refs", "refs.pack"  # The plot has other libraries, too.
    return whole_section(results.of("gpu"), "calls", ways)


@text("gpu.loops")
def loops_on_a_gpu(results: Results) -> str:
    found = results.newest("gpu")
    small, large = sizes(found)
    copies = found.sections["copies"].rows

    def line(title: str, row: Row) -> Iterable[str]:
        others = found.sections[small].rows[title]
        yield title
        yield from (f"{step(others, way)} → {step(row, way)}" for way in ("refs", *ways))
        yield "{:.0f} → {:.0f}".format(*(copies[title][w].median for w in ("by hand", "refs")))

    ways = "jax.Ref", "by hand"
    head = [f"µs a step, {n(small)} → {n(large)}", *map(code, ("refs", *ways)), "copies by hand"]
    rows = found.sections[large].rows.items()
    return table(head, (list(line(title, row)) for title, row in rows))


@text("gpu.moved")
def moved_on_a_gpu(results: Results) -> str:
    rows = results.newest("gpu").sections["moved"].rows
    return "; ".join(f"{row['refs'].median:.0f} in: {title}" for title, row in rows.items())


# -- Many devices ---------------------------------------------------------------------------------

OF_A_PROGRAM = "collectives", "arrays", "not by the other", "MB", "of moments", "aliased"


def programs_on_devices(results: Results, platform: str) -> str:
    """A line for each layout; more where its programs differ."""
    facts, versions = (*OF_A_PROGRAM, "temporary, MB"), results.of("scale")
    found: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for title in versions[-1].sections["lowering"].rows:
        layout, _, devices = title.rpartition(", ")
        for m in versions:
            rows = [m.sections[f"{platform}: {fact}"].rows[title] for fact in facts]
            cells = ("{:,.0f}, {:,.0f}".format(*(t.median for t in row.values())) for row in rows)
            found.setdefault((layout, *cells), []).append((devices.split()[0], m.jax))
    lines = []
    for (layout, *cells), programs in found.items():
        devices, jax = (list(dict.fromkeys(names)) for names in zip(*programs, strict=True))
        of_jax = f", jax {jax[0]}" if len(jax) < len(versions) else ""
        lines.append([f"{layout}: {', '.join(devices)} devices{of_jax}", *cells])
    return table(["by hand, `refs.jit`", *facts], lines)


for name in "GPUs", "CPUs":
    text(f"scale.{name}")(partial(programs_on_devices, platform=name))


# -- The README -----------------------------------------------------------------------------------


@text("digits.table")
def digits(results: Results) -> str:
    versions = results.of("digits")
    row = [{t: s.rows["digits"] for t, s in found.sections.items()} for found in versions]
    ways = {
        "state threaded by hand with `donate_argnums`": "by hand",
        "`jax.Ref` under `jax.jit`": "jax.Ref",
        "`refs.jit`": "refs",
    }
    lines = [
        ["test accuracy", *(f"{100 - r['errors']['refs'].median:.2f} %" for r in row)],
        ["training, with compilation", *(f"{r['training']['refs'].median:.1f} s" for r in row)],
        ["buffers that moved", *(f"{r['moved']['refs'].median:.0f} of 30" for r in row)],
    ]
    for title, way in ways.items():
        rates = [f"{1000 / r['steps'][way].median:,.0f}" for r in row]
        lines.append([f"steps a second, {title}", *rates])
    return table([versions[-1].machine, *(f"jax {found.jax}" for found in versions)], lines)


@text("compared.times")
def compared(results: Results) -> str:
    ways = "refs", "jax.Ref", "by hand"
    of_calls = "refs", "jax.Ref", "by hand, donated"
    large = sizes(results.newest("programs"))[1]
    calls = results.newest("callbacks").sections["top-level"].rows
    element = [title for title in calls if title.startswith("one")][-1]
    packed = next(iter(results.newest("packed").sections["calls"].rows))
    rows = {
        f"step that swaps neighbours among {n(large)} elements": (
            *("programs", large, "swap neighbours"),
            *ways,
        ),
        f"step of a gradient of reads and writes among {n(large)}": (
            *("programs", large, "gradient of random access"),
            *ways,
        ),
        "call that adds 1 to one small array": (
            *("dispatch", "sizes", "1 ref in a list"),
            *of_calls,
        ),
        "call that adds 1 to 200 small arrays in a tree": (
            *("dispatch", "sizes", "200 refs in a nested dict"),
            *of_calls,
        ),
        "the same arrays as one `refs.pack`, in a list": (
            *("packed", "calls", packed),
            *("refs.pack", NONE, "by hand"),
        ),
        "`state[i] = x`, eagerly": ("dispatch", "eager", "r[i] = v", *of_calls),
        f"callback that adds to {element.replace(', ', ' of ')} (`jax.pure_callback`)": (
            *("callbacks", "top-level", element),
            *("refs.jit", NONE, "jax.pure_callback"),
        ),
    }
    head = ["µs", "`refs.jit`", "`jax.Ref`, `jax.jit`", "threading, `donate_argnums`"]
    return table(head, ([title, *results.pairs(*of)] for title, of in rows.items()))
