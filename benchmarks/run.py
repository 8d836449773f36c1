"""Runs the benchmarks, each in a process of its own, and writes `benchmarks/results/<name>.json`.

    python benchmarks/run.py                   # all of them: the machine should be idle
    python benchmarks/run.py --only dispatch
    python benchmarks/run.py --quick --results build/results

From the top of the checkout, with `refs`, rich and scikit-learn installed, and numba, for the loops
over plain memory. Without a GPU, `gpu` is left out. A file keeps what was measured on other
versions of JAX. `tables.py` then renews the tables and plots of the documentation, and `compare.py`
says what got slower.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from results import FOLDER
from suite import BENCHMARKS, ROOT


def run(name: str, folder: Path, quick: bool) -> bool:
    """Whether the benchmark ran to its end."""
    benchmark = BENCHMARKS[name]
    script = ROOT / "benchmarks" / benchmark.script
    settings = benchmark.quick if quick else benchmark.full
    start = time.perf_counter()
    command = [sys.executable, str(script), *settings, "--results", str(folder)]
    failed = subprocess.run(command, check=False).returncode
    took = f"{time.perf_counter() - start:.0f} s"
    print(f"{name}: {'FAILED after' if failed else 'done in'} {took}", file=sys.stderr, flush=True)
    return not failed


def has_gpu() -> bool:
    """Asked in another process, because JAX takes most of a card's memory when it starts."""
    question = "import jax, sys; sys.exit(jax.default_backend() == 'cpu')"
    return subprocess.run([sys.executable, "-c", question], check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--quick", action="store_true", help="smallest sizes: does all of it run?")
    parser.add_argument("--results", type=Path, default=FOLDER, metavar="FOLDER")
    options = parser.parse_args()
    names = [options.only] if options.only else list(BENCHMARKS)
    if not options.quick and not has_gpu():
        names = [name for name in names if not BENCHMARKS[name].needs_gpu]
    # All of them are run, so that one that can't run here doesn't hide the others.
    done = [run(name, options.results, options.quick) for name in names]
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
