"""The programs of the gallery check themselves, and its page shows each with its picture."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.platforms import as_on_cpu

ROOT = Path(__file__).parent.parent
GALLERY = ROOT / "examples" / "gallery"
PAGE = ROOT / "docs" / "gallery.md"
PROGRAMS = sorted(path.stem for path in GALLERY.glob("[!_]*.py"))

# What `main` is given, so that a program takes a second or two; others run as they are.
SMALL = {
    "differentiable_plasticity": {"steps": 300},
    "donated_training": {"sizes": (100, 1000), "steps": 100},
    "gradient_accumulation": {"batch": 256, "parts": (1, 4)},
    "interpreter": {"n": 1000},
    "kv_cache": {"n": 20},
    "mcmc": {"chains": 100, "samples": 500},
    "memory_limit": {"size": 128},
    "pde_adjoint": {"iterations": 200},
    "prioritised_replay": {"draws": 40},
    "running_statistics": {"steps": 100},
}
MARKS = {
    "differentiable_plasticity": pytest.mark.slow,
    "gradient_stash": pytest.mark.slow,
    "kv_cache": pytest.mark.slow,
    "mcmc": pytest.mark.slow,
    "memory_limit": as_on_cpu,
    "pde_adjoint": pytest.mark.slow,
    "spectral_normalisation": pytest.mark.slow,
}


def load(name):
    """The program as a module that no other one sees."""
    spec = importlib.util.spec_from_file_location(f"gallery_{name}", GALLERY / f"{name}.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, ())) for name in PROGRAMS]
)
def test_program_checks_itself(name, monkeypatch, capsys):
    monkeypatch.syspath_prepend(GALLERY)
    program = load(name)
    assert program.__doc__
    program.main(**SMALL.get(name, {}))
    assert capsys.readouterr().out


def test_page_shows_each_program_and_its_picture():
    page = PAGE.read_text(encoding="utf-8")
    assert sorted(re.findall(r"^`python examples/gallery/(\w+)\.py`$", page, re.M)) == PROGRAMS
    pictures = re.findall(r"^!\[.+\]\(gallery/(\w+)\.svg\)$", page, re.M)
    assert sorted(pictures) == PROGRAMS
    for name in PROGRAMS:
        picture = ROOT / "docs" / "gallery" / f"{name}.svg"
        assert 0 < picture.stat().st_size < 40_000, picture
