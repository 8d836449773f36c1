"""The files of figures, `benchmarks/results/<name>.json`: written, read, and known to be stale.

A file has one measurement for each version of JAX; writing replaces that of the version in use.
The less a figure is, the better.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from stopwatch import Timing
from suite import BENCHMARKS, ROOT

FOLDER = ROOT / "benchmarks" / "results"
PACKAGES = ("jax", "jaxlib", "numpy", "numba")  # numba, because the bound is Python without

Row = Mapping[str, Timing]  # way -> figure


@dataclass(frozen=True)
class Section:
    """One table of figures.

    Attributes:
      unit: of all figures.
      rows: title -> way -> figure.
      control: the way that runs no code of `refs`, and the others are measured against.
    """

    unit: str
    rows: Mapping[str, Row]
    control: str | None = None

    def ways(self) -> list[str]:
        return list(dict.fromkeys(way for row in self.rows.values() for way in row))

    def encoded(self) -> dict[str, Any]:
        rows = {
            one_line(title): {one_line(way): self._figure(row, way) for way in row}
            for title, row in self.rows.items()
        }
        return {
            "unit": self.unit,
            "control": self.control and one_line(self.control),
            "rows": rows,
        }

    def _figure(self, row: Row, way: str) -> dict[str, float]:
        time, control = row[way], row.get(self.control or "")
        figure = {"median": rounded(time.median), "noise": rounded(time.noise)}
        if control and way != self.control and control.median > 0:
            figure["ratio"] = rounded(time.median / control.median)
        return figure

    @classmethod
    def decoded(cls, found: dict[str, Any]) -> Section:
        rows = {
            title: {way: Timing(x["median"], x["noise"]) for way, x in row.items()}
            for title, row in found["rows"].items()
        }
        return cls(found["unit"], rows, found["control"])


@dataclass(frozen=True)
class Measurement:
    """The figures of one version of JAX, and `about`: when, where and with what they were made."""

    about: dict[str, Any]
    sections: dict[str, Section]

    @property
    def jax(self) -> str:
        return self.about["jax"]

    @property
    def machine(self) -> str:
        machine = self.about["machine"]
        return machine.get("gpu") or "{cpu}, {cores} cores".format(**machine)


def one_line(name: str) -> str:
    """The names of ways have line breaks, for the heads of narrow columns."""
    return name.replace(".\n", ".").replace("\n", " ")


def rounded(x: float) -> float:
    return float(f"{x:.4g}")


# -- Written --------------------------------------------------------------------------------------


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help="write the figures to a file in it, too"
    )


def record(name: str, sections: Mapping[str, Section], options: argparse.Namespace) -> None:
    """Writes the figures, if `options` say so, into the benchmark's file."""
    if options.results is None:
        return
    file = options.results / f"{name}.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    settings = {k: v for k, v in vars(options).items() if k != "results" and v is not None}
    about = about_this_run(name) | {"settings": settings}
    figures = {title: section.encoded() for title, section in sections.items()}
    found[about["jax"]] = about | {"sections": figures}
    ordered = {version: found[version] for version in sorted(found, key=numbers)}
    text = json.dumps(ordered, indent=1, ensure_ascii=False)
    text = re.sub(r"\{\s+([^{}]*?)\s+\}", on_a_line, text)
    options.results.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n", encoding="utf-8")


def on_a_line(innermost: re.Match[str]) -> str:
    return "{" + re.sub(r"\s*\n\s*", " ", innermost[1]) + "}"


def numbers(version: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", version)]


def about_this_run(name: str) -> dict[str, Any]:
    return {
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "machine": {"cpu": cpu(), "cores": os.cpu_count(), "os": platform.system(), **gpu()},
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        "sources": BENCHMARKS[name].sources(),
    }


def commit() -> str:
    """The commit, with a plus if there are changes since."""
    changes = git("status", "--porcelain", "--", "refs", "examples", "benchmarks/*.py")
    return git("rev-parse", "--short", "HEAD") + "+" * bool(changes)


def git(*command: str) -> str:
    found = subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True)
    return found.stdout.strip()


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # an extra
        return None


def cpu() -> str:
    listed = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.*)", listed.read_text()) if listed.exists() else None
    return model[1] if model else platform.processor() or platform.machine()


def gpu() -> dict[str, str]:
    """What the figures are of, where it isn't the CPU."""
    import jax  # Who only reads results needn't have it.

    device = jax.devices()[0]
    return {} if device.platform == "cpu" else {"gpu": device.device_kind}


# -- Read -----------------------------------------------------------------------------------------


def read(file: Path) -> list[Measurement]:
    """The measurements of a file, that of the oldest JAX first."""
    found = []
    for about in json.loads(file.read_text(encoding="utf-8")).values():
        sections = about.pop("sections")
        sections = {title: Section.decoded(section) for title, section in sections.items()}
        found.append(Measurement(about, sections))
    return found


def notice(name: str, folder: Path = FOLDER, root: Path = ROOT) -> str:
    """Where the figures of a benchmark come from; and that they are old, if they are."""
    now = BENCHMARKS[name].sources(root)
    said = []
    for found in read(folder / f"{name}.json"):
        at = "jax {jax}: measured at commit {commit} on {date}".format(**found.about)
        if found.about["sources"] == now:
            said.append(f"{at}, {found.machine}.")
        else:
            said.append(f"{at}; what it measures has changed since.")
    return " ".join(said)
