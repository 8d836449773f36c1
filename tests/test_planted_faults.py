"""The table of planted faults can be planted, and `planted_faults.py` tells which are found."""

import json
import shutil
import subprocess
import sys
from collections import Counter

import pytest

from tests.planted_faults import ROOT, TABLE, faults_in

FAULTS = faults_in(TABLE.read_text(encoding="utf-8"))
LEAST = 2  # in each package


def test_each_fault_can_be_planted():
    """A change of the library may ask for another one: take a mistake that is as easily made."""
    for fault in FAULTS:  # No parameters, as the quick tests would take three.
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        planted = fault.planted(text)
        assert planted != text, fault.name
        compile(planted, fault.file, "exec")
        assert fault.likely, fault.name
        for test in fault.likely:
            file, _, name = test.partition("::")
            assert (ROOT / file).exists(), test
            assert not name or f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), test


def test_the_faults_are_spread_over_the_library():
    assert len({f.name for f in FAULTS}) == len(FAULTS) >= 60
    lines: Counter[str] = Counter()
    for path in (ROOT / "refs").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        lines[path.parent.relative_to(ROOT).as_posix()] += text.count("\n")
    here = Counter(f.file.rpartition("/")[0] for f in FAULTS)
    share = {folder: len(FAULTS) * n / lines.total() for folder, n in lines.items()}
    assert not [folder for folder, n in share.items() if here[folder] < max(LEAST, n / 2)]


MODULE = """def double(x):
    return x + x


def wait():
    stays = False
    while stays:
        pass


def unused():
    return 1
"""
TESTS = """import m


def test_double():
    assert m.double(2) == 4 == m.double(1) + 2


def test_wait():
    m.wait()


def test_that_fails_anyway():
    assert False
"""
FAULTS_OF_MODULE = """
doubled | m.py | test_m.py::test_double
  It is no longer twice as much.
-return x + x
+return x + 2

waits | m.py | test_m.py::test_wait
  It never ends.
-stays = False
+stays = True

unseen | m.py | test_m.py::test_double
  Nobody calls it.
-return 1
+return 2

no-module | m.py | test_m.py::test_double
  It can't be imported.
-def unused():
+def unused(:
"""
CONFTEST = """
import m


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true")
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None, reason="it copies the files that git knows")
def test_what_is_found_of_a_small_project(tmp_path):
    """Found, hanging, not found, and no module at all; a test that fails anyway finds nothing."""
    for name, text in {
        "m.py": MODULE,
        "refs.py": "",
        "conftest.py": CONFTEST,
        "test_m.py": TESTS,
        "tests/planted_faults.txt": FAULTS_OF_MODULE,
        "tests/planted_faults.py": TABLE.with_suffix(".py").read_text(encoding="utf-8"),
        "dev.py": (ROOT / "dev.py").read_text(encoding="utf-8"),
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True)

    def run(*options: str) -> list[tuple[str, str, bool]]:
        command = [sys.executable, "tests/planted_faults.py", "--json", "found.txt", *options]
        done = subprocess.run(
            [*command, "--", "-n0"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        # The status is 1 where one isn't found.
        assert done.returncode == ("unseen" in options), done.stdout + done.stderr
        rows = map(json.loads, (tmp_path / "found.txt").read_text().splitlines())
        return [(row["fault"], row["result"], row["likely"]) for row in rows]

    run("--likely", "waits", "--longest", "2")
    run("--likely", "doubled", "unseen", "no-module")
    # What was not found by the likely tests alone is looked for again.
    assert run("--continue", "waits", "unseen", "no-module") == [
        ("waits", "hang", True),
        ("doubled", "found", True),
        ("unseen", "not found", True),
        ("no-module", "broken", True),
        ("unseen", "not found", False),
        ("no-module", "broken", False),
    ]
    assert (tmp_path / "m.py").read_text() == MODULE
