#!/usr/bin/env python3
"""One command for each thing you do here; each installs what it needs first.

    python3 dev.py digits          run examples/digits.py
    python3 dev.py test            run the quick tests, in parallel: three minutes on two cores
    python3 dev.py test --all      run all tests: a quarter of an hour
    python3 dev.py test -k scan    other arguments go to pytest, which then gets nothing but them
    python3 dev.py coverage        run all tests, and list lines that none of them runs
    python3 dev.py coverage --branches    and branches, for twice the time
    python3 dev.py libraries       run programs of Equinox, Flax, diffrax ... over refs
    python3 dev.py lint            check style, formatting and types
    python3 dev.py docs            build the documentation into build/site
    python3 dev.py docs --serve    serve it at http://127.0.0.1:8000, built anew when a page changes
    python3 dev.py package         build wheel and sdist into dist, and try them out

The first call makes a virtual environment, .venv (another: python3 dev.py --venv DIR test), and
installs the project into it; later calls install only when pyproject.toml has changed, or when
a command needs more than what is there.
"""

# This file uses nothing but the standard library, and syntax that a much older Python can read:
# it must get far enough there to say which Python it needs.
import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
OLDEST = (3, 11)  # requires-python in pyproject.toml

# Command -> the extras of pyproject.toml that it needs, and what the environment's Python runs.
COMMANDS = {
    "digits": (["examples"], [["examples/digits.py"]]),
    "test": (["test"], [["-m", "pytest"]]),
    "coverage": (["test"], [["-m", "pytest", "--cov"]]),
    "libraries": (["test", "libraries"], [["-m", "pytest", "tests/libraries"]]),
    "lint": (
        ["lint"],
        [
            *(["-m", "ruff", "check"], ["-m", "ruff", "format", "--check"]),
            *(["-m", "pyright"], ["-m", "mypy"]),
        ],
    ),
    "docs": (["docs"], [["-m", "mkdocs", "build", "--strict"]]),
    "package": (["package"], [[".ci/package.py"]]),
}
# Docstrings are pages, too: --watch. Without --livereload some versions of click turn it off.
SERVE = ["-m", "mkdocs", "serve", "--livereload", "--watch", "refs"]
# A worker costs an import of JAX, so more than a few don't pay.
# Each has the tests of whole files, as long as there are enough: a file shares compiled programs.
PARALLEL = ["-n", "auto", "--maxprocesses", "4", "--dist", "worksteal"]


def main():
    if sys.version_info < OLDEST:
        this = sys.version.split()[0]
        fail(f"Python {OLDEST[0]}.{OLDEST[1]} or newer is needed; this is {this}.")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", metavar="DIR")
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments for what is run")
    options = parser.parse_args()

    extras, runs = COMMANDS[options.command]
    if options.args and len(runs) > 1:
        parser.error(options.command + " takes no arguments")
    args = options.args
    if options.command == "test" and not args:
        say("the quick tests: three minutes on two cores, five the first time (--all: 16 minutes)")
        os.environ.setdefault("HYPOTHESIS_PROFILE", "small")
        args = [*PARALLEL, "--quick"]
    elif (options.command, args) in (("test", ["--all"]), ("coverage", []), ("libraries", [])):
        args = PARALLEL
    elif (options.command, args) == ("coverage", ["--branches"]):
        args = [*PARALLEL, "--cov-branch"]
    elif options.command == "docs" and "--serve" in args:
        runs, args = [SERVE], [arg for arg in args if arg != "--serve"]
    python = environment(options.venv.absolute(), extras)
    # Each process that a test starts would compile the tests and the package again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Pyright looks for JAX beside the first `python` on PATH.
    os.environ["PATH"] = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    # Run all of them, so that one call shows everything there is to mend.
    return max([call([python, *command, *args]) for command in runs])


def environment(venv, extras):
    """The Python of the virtual environment at `venv`, with the project and `extras` installed."""
    python = venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        if importlib.util.find_spec("ensurepip") is None:
            fail(
                "this Python can't make virtual environments: it has no ensurepip. Install your "
                "system's package for it (python3-venv on Debian), or use another Python."
            )
        say(f"making a virtual environment in {venv}")
        # What is left of an environment whose Python has gone can't be repaired, only replaced.
        clear = ["--clear"] if (venv / "pyvenv.cfg").exists() else []
        if call([sys.executable, "-m", "venv", *clear, venv]):
            fail(f"no virtual environment could be made in {venv}; see above.")

    stamp = venv / "dev-py-installed.json"
    project = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    done = json.loads(stamp.read_text()) if stamp.exists() else {"project": None, "extras": []}
    if done["project"] != project or not set(extras) <= set(done["extras"]):
        wanted = sorted(set(extras) | set(done["extras"]))
        names = ", ".join(wanted)
        say(f"installing refs and what it needs for {names}; the first time takes a minute or two")
        target = f"{ROOT}[{','.join(wanted)}]"
        # Python compiles what it imports, a small part of what is installed.
        if call([python, "-m", "pip", "install", "-q", "--no-compile", "-e", target]):
            fail(f"pip failed; see above. If nothing else helps, delete {venv} and try again.")
        stamp.write_text(json.dumps({"project": project, "extras": wanted}))
    return python


def call(command):
    """Run `command` in the repository's root; its exit status."""
    process = subprocess.Popen([str(word) for word in command], cwd=str(ROOT))
    while True:
        try:
            status = process.wait()
        except KeyboardInterrupt:
            continue  # The tool got the Ctrl-C as well: let it finish in its own way.
        return status if status >= 0 else 128 - status


def say(message):
    print("dev.py: " + message, file=sys.stderr, flush=True)


def fail(message):
    say(message)
    sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
