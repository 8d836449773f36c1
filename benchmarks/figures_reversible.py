"""What stands between the markers for the figures of `reversible.py`; `tables.py` imports it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from figures import NONE, PLOTS, Results, code, shown, table, text
from plots import panels
from results import Measurement, Row

FORWARD, OURS = "forward, by hand", "refs.reversible"


# -- Memory and time -------------------------------------------------------------------------------


def memory_and_time(results: Results, name: str) -> str:
    """The temporaries of each way, and its time as a multiple of the forward pass's."""
    new, old = results.newest("reversible"), results.oldest("reversible")
    section = new.sections[name]
    columns = [(new, way) for way in section.ways()] + [(old, OURS)] * (old is not new)

    def cell(found: Measurement, title: str, way: str) -> str:
        memory = found.sections[name].rows.get(title, {})
        if way not in memory:
            return NONE
        times = found.sections[f"{name}-times"].rows[title]
        return f"{shown(memory[way].median)}, {times[way].median / times[FORWARD].median:.1f}"

    head = [
        f"{section.unit}, time ÷ forward",
        *(head_of(found, way, new) for found, way in columns),
    ]
    rows = ([title, *(cell(m, title, way) for m, way in columns)] for title in section.rows)
    return table(head, rows)


def head_of(found: Measurement, way: str, newest: Measurement) -> str:
    return code(way) + f", jax {found.jax}" * (found is not newest)


for name in "revnet", "hessian", "orbits":
    text(f"reversible.{name}")(partial(memory_and_time, name=name))

PANELS = {
    "revnet": "RevNet, gradient",
    "hessian": "RevNet, Hessian times vector",
    "orbits": "leapfrog, gradient",
}


def plot_of_memory(results: Results) -> str:
    found = results.newest("reversible")
    lines: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name, panel in PANELS.items():
        section = found.sections[name]
        for title, row in section.rows.items():
            steps = float(title.split()[0].replace(",", ""))
            for way in [way for way in row if not way.startswith(f"{OURS}, ")]:
                size = row[way].median * (1024 if section.unit == "MiB" else 1)
                lines.setdefault(panel, {}).setdefault(way, []).append((steps, size))
    return panels(
        lines, f"KiB beside arguments and results, over layers or steps (jax {found.jax})"
    )


PLOTS["reversible.memory"] = plot_of_memory


# -- What is restored ------------------------------------------------------------------------------


def heads(ways: Iterable[str]) -> list[str]:
    """`float` for what has no name of a mode."""
    return [way.partition(", ")[2] or "float" for way in ways]


@text("reversible.exactness")
def exactness(results: Results) -> str:
    """How many bits differ, and by how much at most; NaN if the gradient is, at tolerance 0."""
    sections = results.newest("reversible").sections
    refused = sections["refused"]

    def cell(title: str, way: str, is_nan: bool) -> str:
        bits, drift = (sections[k].rows[title].get(way) for k in ("bits", "drift"))
        if bits is None or drift is None:
            return "NaN"
        off = f"{bits.median:,.0f} ({drift.median:.0e})" if bits.median else "0"
        return off + ", NaN" * is_nan

    rows = (
        [t, *(cell(t, w, x.median > 0) for w, x in row.items())] for t, row in refused.rows.items()
    )
    return table(["bits that differ", *heads(refused.ways())], rows)


@text("reversible.expanding")
def expanding(results: Results) -> str:
    """The error of a gradient without the check, and what the check makes of it."""
    sections = results.newest("reversible").sections
    refused = sections["expanding-refused"]

    def cell(errors: Row, way: str, is_nan: bool) -> str:
        return f"{errors[way].median:.0e}" + " → NaN" * is_nan if way in errors else "NaN"

    rows = (
        [t, *(cell(sections["expanding"].rows.get(t, {}), w, x.median > 0) for w, x in row.items())]
        for t, row in refused.rows.items()
    )
    return table(["error of the gradient", *heads(refused.ways())], rows)
