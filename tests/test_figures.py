"""The figures of the documentation: kept in files, compared, and shown as the files have them."""

import argparse
import importlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import jax
import pytest

ROOT = Path(__file__).parent.parent

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "benchmarks"))
    results, compare, tables, plots, figures = (
        importlib.import_module(name)
        for name in ("results", "compare", "tables", "plots", "figures")
    )
BENCHMARKS, Section, Timing = results.BENCHMARKS, results.Section, results.Timing


def timings(**ways):
    return {way.replace("_", " "): Timing(*found) for way, found in ways.items()}


def section(**ways):
    return Section("µs", {"a call": timings(**ways)}, "by hand")


# --- Files ---


def record(folder, name="lanes", **sections):
    results.record(name, sections, argparse.Namespace(results=folder, rounds=3))
    return folder / f"{name}.json"


def test_what_is_recorded_is_read(tmp_path):
    calls = section(refs=(4.5, 0.1), by_hand=(3.0, 0.25))
    file = record(tmp_path, calls=calls)
    (found,) = results.read(file)
    assert found.sections == {"calls": calls}
    assert found.jax == jax.__version__
    assert found.about["settings"] == {"rounds": 3}
    assert found.about["sources"] == BENCHMARKS["lanes"].sources()
    figures = json.loads(file.read_text("utf-8"))[jax.__version__]["sections"]["calls"]["rows"]
    assert figures["a call"]["refs"] == {"median": 4.5, "noise": 0.1, "ratio": 1.5}


def test_other_versions_of_jax_are_kept_and_this_one_is_replaced(tmp_path, monkeypatch):
    versions = iter(["0.12.0", "0.9.3", "0.12.0"])
    for k in (1.0, 2.0, 3.0):
        current = next(versions)
        monkeypatch.setattr(results, "version", lambda _, current=current: current)
        file = record(tmp_path, calls=section(refs=(k, 0.0)))
    found = results.read(file)
    assert [m.jax for m in found] == ["0.9.3", "0.12.0"]
    assert [m.sections["calls"].rows["a call"]["refs"].median for m in found] == [2.0, 3.0]


def test_nothing_is_written_without_a_folder():
    results.record("lanes", {}, argparse.Namespace(results=None))


def test_names_of_ways_have_no_line_breaks():
    assert results.one_line("jax.\npure_callback") == "jax.pure_callback"
    assert results.one_line("by hand,\ndonated") == "by hand, donated"


@pytest.mark.parametrize(
    "rounds, figure",
    [
        ([3.0], (3.0, 0.0)),
        ([1.0, 2.0], (1.5, 0.25)),
        ([5.0, 1.0, 2.0, 3.0, 4.0], (3.0, 1.0)),
        ([2.0, 2.0, 2.0, 2.0, 90.0], (2.0, 0.0)),
    ],
)
def test_noise_is_half_the_width_of_the_middle_half(rounds, figure):
    assert Timing.of(rounds) == Timing(*figure)


# --- Compared ---

CONTROL = (3.0, 0.1)


@pytest.mark.parametrize(
    "old, new, control, said",
    [
        ((4.0, 0.1), (5.0, 0.2), CONTROL, "slower: a call, refs: 4 ± 0.1 → 5 ± 0.2 µs"),
        ((5.0, 0.2), (4.0, 0.1), CONTROL, "faster: a call, refs: 5 ± 0.2 → 4 ± 0.1 µs"),
        ((4.0, 0.5), (4.9, 0.5), CONTROL, None),  # noise
        ((4.0, 0.1), (8.0, 0.2), (6.0, 0.2), None),  # the machine is slower
        ((4.0, 0.1), (4.0, 0.1), (2.0, 0.1), None),  # and the control alone was luckier
        ((4.0, 0.1), (5.0, 0.1), (0.0, 0.1), "slower: a call, refs: 4 ± 0.1 → 5 ± 0.1 µs"),
    ],
)
def test_what_changed_by_more_than_the_noise_is_named(old, new, control, said):
    before, after = section(refs=old, by_hand=CONTROL), section(refs=new, by_hand=control)
    assert [str(change) for change in compare.changes(before, after)] == [said] * bool(said)


def test_only_ways_over_refs_are_compared():
    before, after = section(by_hand=(1.0, 0.1)), section(by_hand=(9.0, 0.1))
    assert not list(compare.changes(before, after))


def run(*command):
    """A command of the benchmarks: exit status and what it printed."""
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_the_command_fails_if_anything_got_slower(tmp_path):
    old, same = (section(refs=(4.0, 0.1), by_hand=CONTROL) for _ in range(2))
    new = section(refs=(5.0, 0.1), by_hand=CONTROL)
    files = [record(tmp_path / str(k), calls=s) for k, s in enumerate((old, same, new))]
    assert run("benchmarks/compare.py", files[0], files[1]) == (
        0,
        "Nothing has changed by more than the noise.\n",
    )
    status, said = run("benchmarks/compare.py", files[0], files[2])
    assert status == 1
    assert said == f"slower: jax {jax.__version__}, calls: a call, refs: 4 ± 0.1 → 5 ± 0.1 µs\n"


def test_other_machines_and_rows_that_are_gone_are_named(tmp_path):
    (old,) = results.read(record(tmp_path, calls=section(refs=(4.0, 0.1))))
    about = old.about | {"machine": {"cpu": "another", "cores": 64, "os": "Linux"}}
    machines, gone = compare.compared(old, replace(old, about=about, sections={}))
    assert machines.endswith(f"other machines, {old.machine} and another, 64 cores")
    assert gone.endswith("calls: not measured any more: a call")


# --- The documentation ---


def test_the_documentation_says_what_the_results_say():
    files = list(tables.files(ROOT, figures.Results(results.FOLDER)))
    assert {ROOT / "README.md", ROOT / "docs/benchmarks.md"} <= {file for file, _ in files}
    for file, right in files:
        assert file.read_text("utf-8") == right, f"{file.name}: run benchmarks/tables.py"
        # Markdown takes a comment that starts a line for the end of the paragraph.
        assert not re.search(r"^<!-- figures: \S+ -->.", right, re.M), file.name


def test_a_changed_figure_is_found(tmp_path):
    (tmp_path / "docs").mkdir()
    found = figures.Results(results.FOLDER)
    page = "<!-- figures: lanes.calls --><!-- end of figures -->\nA call takes 5 µs."
    right = tables.renewed(page, found)
    assert right.endswith("|\n<!-- end of figures -->\nA call takes 5 µs.")
    assert tables.renewed(right, found) == right
    digit = next(c for c in reversed(right[: right.rindex("|")]) if c.isdigit() and c != "0")
    wrong = "0".join(right.rsplit(digit, 1))
    (tmp_path / "README.md").write_text(wrong, "utf-8")
    assert list(tables.files(tmp_path, found)) == [(tmp_path / "README.md", right)]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_what_a_benchmark_measures_exists(name):
    assert len(BENCHMARKS[name].sources()) == 16


def copied(tmp_path, name):
    """The files that a benchmark's figures depend on, elsewhere."""
    for file in [*ROOT.glob("refs/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]:
        to = tmp_path / file.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(file.read_bytes())
    assert BENCHMARKS[name].sources(tmp_path) == BENCHMARKS[name].sources()


def test_figures_older_than_what_they_measure_are_said_to_be_so(tmp_path):
    copied(tmp_path, "lanes")
    about = results.read(record(tmp_path, calls=section(refs=(4.0, 0.1))))[0].about
    at = "jax {jax}: measured at commit {commit} on {date}".format(**about)
    fresh = results.notice("lanes", tmp_path, tmp_path)
    assert fresh == f"{at}, {results.cpu()}, {about['machine']['cores']} cores."
    (tmp_path / "refs/_jit/jit.py").write_text("# it isn't measured by this benchmark\n")
    assert results.notice("lanes", tmp_path, tmp_path) == fresh
    (tmp_path / "refs/_lanes/primitives.py").write_text("# it is\n")
    stale = results.notice("lanes", tmp_path, tmp_path)
    assert stale == f"{at}; what it measures has changed since."


def test_the_notice_stands_under_the_table_and_not_in_a_sentence():
    spec = importlib.util.spec_from_file_location("docs_figures", ROOT / "docs/figures.py")
    hook = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        spec.loader.exec_module(hook)
    table = "<!-- figures: lanes.calls -->\n| 5 |\n<!-- end of figures -->"
    page = f"{table}\nIt takes <!-- figures: dispatch.view -->5 µs<!-- end of figures --> more.\n"
    found = hook.on_page_markdown(page)
    assert found == page.replace(table, f"{table}\n\n*{results.notice('lanes')}*\n")


# --- Plots ---


def test_bars_start_at_one_and_have_their_ratio():
    svg = plots.bars({"a <call>": {"refs": 0.5, "jax.Ref": 1200.0}}, "Time")
    drawn = ElementTree.fromstring(svg)
    words = [node.text for node in drawn.iter() if node.tag.endswith("text")]
    assert {"Time", "refs", "jax.Ref", "a <call>", "0.50x", "1,200x"} <= {*words}
    _, *rects = [node.attrib for node in drawn.iter() if node.tag.endswith("rect")]
    left, right = rects[2:]  # after the legend's
    assert float(left["x"]) + float(left["width"]) == pytest.approx(float(right["x"]), abs=0.2)


def test_a_panel_has_a_line_for_each_way():
    lines = {"refs": [(10.0, 1.0), (1000.0, 1.0)], "by hand": [(10.0, 1.0), (1000.0, 100.0)]}
    drawn = ElementTree.fromstring(plots.panels({f"p{k}": lines for k in range(5)}, "Steps"))
    found = [node.attrib["points"] for node in drawn.iter() if node.tag.endswith("polyline")]
    assert len(found) == 10
    flat, steep = ([p.split(",")[1] for p in points.split()] for points in found[:2])
    assert flat[0] == flat[1] == steep[0] != steep[1]


# --- All of it ---


@pytest.fixture(scope="module")
def quick_results(tmp_path_factory):
    """Each benchmark, run at its smallest size."""
    pytest.importorskip("rich")
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("results")
    status, said = run("benchmarks/run.py", "--quick", "--results", str(folder))
    assert status == 0, said
    return figures.Results(folder)


@pytest.mark.slow
def test_every_benchmark_runs_into_files_that_the_pages_accept(quick_results):
    for name in BENCHMARKS:
        assert quick_results.newest(name).jax == jax.__version__
    for file, made in tables.files(ROOT, quick_results):
        assert made, file
