"""Do the tests find a mistake? Plants one after the other in a copy of the library, and runs them.

    python tests/planted_faults.py                      every fault, against the quick tests
    python tests/planted_faults.py NAME ... --tier all  these, against all tests
    python tests/planted_faults.py --likely             only the tests most likely to find each
    python tests/planted_faults.py --list               what there is
    python tests/planted_faults.py --json FILE          notes each result as a line of JSON;
                                                        with --continue, leaves out what has one
    python tests/planted_faults.py ... -- -n0           what follows `--` goes to pytest

The faults are in `planted_faults.txt`. A fault is found if a test fails that passes without it, or
if the tests no longer end. The exit status is 1 if one isn't found.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_suffix(".txt")

# A tier's Hypothesis profile and pytest's arguments: those of `dev.py test` and its `--all`.
PARALLEL = runpy.run_path(str(ROOT / "dev.py"))["PARALLEL"]
TIERS = {"quick": ("small", [*PARALLEL, "--quick"]), "all": ("ci", PARALLEL)}
# They look at the library's text, not at what it does.
OF_TEXT = ["tests/test_architecture.py", "tests/errors/test_errors.py::test_every_raise_has_a_case"]


class Fault(NamedTuple):
    """A mistake: `new` in the place of `old`, which stands in the file once.

    `likely` are the tests to begin with, and `what` says what goes wrong.
    """

    name: str
    file: str
    likely: tuple[str, ...]
    what: str
    old: str
    new: str

    def planted(self, text: str) -> str:
        """The file's text with the mistake.

        Raises:
          ValueError: if `old` doesn't stand there exactly once.
        """
        if (n := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: its old text stands {n} times in {self.file}")
        return text.replace(self.old, self.new)


def faults_in(text: str) -> list[Fault]:
    """The faults of a table: paragraphs of a head, a sentence, and lines with `-` and `+`."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        lines = [line for line in paragraph.splitlines() if not line.startswith("#")]
        if not lines:
            continue
        head, what, *changes = lines
        name, file, likely = (part.strip() for part in head.split("|"))
        old, new = (
            "\n".join(line[1:] for line in changes if line[0] == sign) for sign in ("-", "+")
        )
        found.append(Fault(name, file, tuple(likely.split()), what.strip(), old, new))
    return found


class Outcome(NamedTuple):
    """What a run of tests has shown: "passed", "failed", "hang" or "broken"; by which tests."""

    result: str
    failed: list[str]
    seconds: float


class Runner:
    """A copy of the repository's files, in which tests run.

    Attributes:
      longest: how many seconds the likely tests may take.
      known: the tests of the whole tier that fail without a fault; None before that was tried.
    """

    def __init__(self, folder: Path, python: str, tier: str, longest: float, more: Sequence[str]):
        self.folder, self.python, self.longest, self.more = folder, python, longest, more
        profile, self.options = TIERS[tier]
        self.log = folder.parent / "failed.txt"
        # A test may run this: the processes started here are neither its workers nor measured.
        others = "COVERAGE_", "PYTEST_"
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(others)} | {
            "PYTHONPATH": str(folder),
            "HYPOTHESIS_PROFILE": profile,
            "PLANTED_FAULTS_LOG": str(self.log),
        }
        self.known: list[str] | None = None
        self._seconds = 0.0
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
        )
        for name in map(os.fsdecode, listed.stdout.split(b"\0")):
            if name and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        said = subprocess.run(
            [python, "-c", "import refs; print(refs.__file__)"],
            env=self.env, cwd=folder, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert Path(said.strip()).is_relative_to(folder), f"tests would import {said}"

    def write(self, file: str, text: str) -> None:
        """Replaces a file. Python compares the seconds and sizes of a compiled one, no more."""
        path = self.folder / file
        path.write_text(text, encoding="utf-8")
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()
        shutil.rmtree(self.folder / ".hypothesis", ignore_errors=True)

    def run(
        self, tests: Sequence[str], leave_out: Sequence[str], longest: float | None, *options: str
    ) -> Outcome:
        """Runs tests; without any, the whole tier."""
        self.log.write_text("")
        left_out = [f"--deselect={test}" for test in (*OF_TEXT, *leave_out)]
        plugin = ["-p", "tests.planted_faults", "-p", "no:cacheprovider"]
        command = [
            *(self.python, "-m", "pytest", "-q", *plugin, *options),
            *(*self.options, *left_out, *self.more, *tests),
        ]
        begun = time.monotonic()
        # In files, as a grandchild that is left over would keep a pipe open.
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command, cwd=self.folder, env=self.env,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                status = process.wait(longest)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            said = output.read().decode(errors="replace")
        seconds = time.monotonic() - begun
        failed = list(dict.fromkeys(self.log.read_text().splitlines()))
        if failed or status is None:
            return Outcome("failed" if failed else "hang", failed, seconds)
        if status in (0, 5):  # 5: there are no tests.
            return Outcome("passed", [], seconds)
        if status > 0:  # Something can't be imported, or pytest doesn't take the arguments.
            print(said[-3000:], file=sys.stderr)
        return Outcome("broken" if status > 0 else "failed", [f"exit status {status}"], seconds)

    def likely(self, fault: Fault) -> Outcome:
        """Runs the tests most likely to find a fault."""
        return self.run(fault.likely, self.known or (), self.longest, "-x")

    def rest(self, fault: Fault) -> Outcome:
        """Runs the rest of the tier."""
        assert self.known is not None
        longest = 2 * self._seconds + self.longest
        return self.run((), (*self.known, *fault.likely), longest, "-x")

    def passes(self, test: str) -> bool:
        """Whether a test passes now, by itself."""
        return self.run([test], (), self.longest, "-n0").result == "passed"

    def try_without(self) -> None:
        """Runs the tier without a fault."""
        _, self.known, self._seconds = self.run((), (), None)


def search(runner: Runner, fault: Fault, only_likely: bool) -> dict[str, Any]:
    """Plants a fault, and looks for it: what is to be noted of it."""
    text = (runner.folder / fault.file).read_text(encoding="utf-8")
    if not only_likely and runner.known is None:
        print("the tier without a fault ... ", end="", flush=True)
        runner.try_without()
        print(f"{runner._seconds:.0f} s; fails anyway: {', '.join(runner.known or ()) or 'none'}")
    steps = [runner.likely] if only_likely else [runner.likely, runner.rest]
    seconds, said, by = 0.0, "not found", ""
    for step in steps:
        runner.write(fault.file, fault.planted(text))
        try:
            found = step(fault)
        finally:
            runner.write(fault.file, text)
        seconds += found.seconds
        if found.result == "passed":
            continue
        by = " ".join(found.failed[:1])
        # A test that fails without the fault, too, says nothing.
        if found.result == "failed" and not by.startswith("exit") and not runner.passes(by):
            said = f"not found: {by} fails anyway"
            continue
        said = "found" if found.result == "failed" else found.result
        break
    is_by_likely = said in ("found", "hang") and step == runner.likely
    return {
        "fault": fault.name, "result": said, "by": by, "seconds": round(seconds, 1),
        "likely": only_likely or is_by_likely,
    }  # fmt: skip


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # The tests end, too.
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults; all of them without any")
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    parser.add_argument("--tier", choices=TIERS, default="quick")
    parser.add_argument("--likely", action="store_true", help="run no other tests")
    parser.add_argument(
        "--longest", type=float, default=900, metavar="S",
        help="seconds after which likely tests count as hanging; others get twice their time more",
    )  # fmt: skip
    parser.add_argument("--python", default=sys.executable, metavar="PY")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--continue", action="store_true", dest="goes_on")
    options = parser.parse_args(words[:at])
    more = words[at + 1 :]
    if options.goes_on and not options.json:
        parser.error("--continue needs --json")
    faults = faults_in(TABLE.read_text(encoding="utf-8"))
    if unknown := {*options.names} - {f.name for f in faults}:
        parser.error(f"no fault is called {', '.join(sorted(unknown))}")
    faults = [f for f in faults if not options.names or f.name in options.names]
    if options.list:
        for f in faults:
            print(f"{f.name:32} {f.file}\n{'':32} {f.what}")
        return 0

    of_run = {"tier": options.tier, "python": options.python}
    rows: list[dict[str, Any]] = []
    if options.goes_on and options.json.exists():
        known = map(json.loads, options.json.read_text(encoding="utf-8").splitlines())
        rows = [row for row in known if of_run.items() <= row.items() and _is_final(row, options)]
    done = {row["fault"] for row in rows}
    with tempfile.TemporaryDirectory(prefix="planted-faults-") as folder:
        place = Path(folder).resolve() / "copy"
        place.mkdir()
        runner = Runner(place, options.python, options.tier, options.longest, more)
        for k, fault in enumerate(faults, 1):
            if fault.name in done:
                continue
            print(f"{k}/{len(faults)} {fault.name} ... ", end="", flush=True)
            row = search(runner, fault, options.likely) | of_run
            print(f"{row['result']}, {row['seconds']:.0f} s {row['by']}", flush=True)
            rows.append(row)
            if options.json:
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    return _tell([row for row in rows if row["fault"] in {f.name for f in faults}])


def _is_final(row: dict[str, Any], options: argparse.Namespace) -> bool:
    """Whether a fault needn't be looked for again."""
    return row["result"] in ("found", "hang") or options.likely or not row["likely"]


def _tell(rows: Sequence[dict[str, Any]]) -> int:
    print()
    for row in rows:
        print(f"{row['fault']:32} {row['result'].upper():10} {row['seconds']:6.0f} s  {row['by']}")
    n_found = sum(row["result"] in ("found", "hang") for row in rows)
    print(f"{n_found} of {len(rows)} found")
    return int(n_found < len(rows))


# --- As a plugin of pytest: notes which tests fail, in the process that gathers all reports ---


def pytest_runtest_logreport(report: Any) -> None:
    _note(report)


def pytest_collectreport(report: Any) -> None:
    _note(report)


def _note(report: Any) -> None:
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ["PLANTED_FAULTS_LOG"], "a", encoding="utf-8") as file:
            file.write(report.nodeid + "\n")


if __name__ == "__main__":
    sys.exit(main())
