"""The benchmarks: how each is run, and which files its figures depend on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Attributes:
      script: its command, in `benchmarks/`.
      measures: folders and files of the repository. Figures are stale once one of them has changed.
      full: the arguments for figures to be shown, if they aren't the script's own defaults.
      quick: those for the smallest run, whose figures mean nothing. It has few of the programs:
        `tests/test_benchmark_programs.py` runs each.
      needs_gpu: whether other figures than these are only measured on a GPU.
    """

    script: str
    measures: tuple[str, ...]
    full: tuple[str, ...] = ()
    quick: tuple[str, ...] = ("--rounds", "2")
    needs_gpu: bool = False

    def sources(self, root: Path = ROOT) -> str:
        """A hash of what is measured, and of what measures it."""
        own = Path("benchmarks", self.script)
        names = (
            *(f"refs/{name}" if name.startswith("_") else name for name in self.measures),
            "benchmarks/stopwatch.py",
            (own.parent if own.parent.name != "benchmarks" else own).as_posix(),
        )
        found = hashlib.sha256()
        for name in names:
            path = root / name
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                found.update(file.relative_to(root).as_posix().encode())
                found.update(file.read_bytes())
        return found.hexdigest()[:16]


BENCHMARKS = {
    "dispatch": Benchmark(
        "dispatch/run.py",
        ("_buffers", "_handles", "_indexing", "_jit", "_transactions", "refs/random.py"),
    ),
    "programs": Benchmark(
        "programs/run.py",
        ("_derivatives", "_discharge", "_indexing", "_inplace", "_lanes", "_tracing"),
        full=("--also", "1000", "100000"),
        quick=(
            *("--sizes", "1024", "2048", "--steps", "8", "--rounds", "1"),
            *("--only", "swap", "random access", "LU"),
        ),
    ),
    "lowering": Benchmark(
        "lowering.py",
        (
            *("_derivatives", "_discharge", "_indexing", "_inplace", "_jit", "_tracing"),
            *("_transactions", "_transforms", "benchmarks/lowering_programs.py"),
            *("examples/digits.py", "examples/_digits_baselines.py"),
        ),
        quick=("--rounds", "1", "--first-rounds", "1", "--steps", "40", "--layers", "1"),
    ),
    "growth": Benchmark(
        "growth.py",
        (
            *("_derivatives", "_discharge", "_inplace", "_jit", "_lanes", "_reversible"),
            *("_tracing", "_transactions"),
        ),
        quick=("--rounds", "1", "--part", "0.02"),
    ),
    "callbacks": Benchmark(
        "callbacks.py",
        ("_buffers", "_callbacks", "_jit", "_transactions", "benchmarks/callbacks_ways.py"),
        quick=("--sizes", "4", "4096", "--rounds", "2", "--budget", "0.01", "--quick"),
    ),
    "gpu": Benchmark(
        "gpu.py",
        (
            *("_buffers", "_derivatives", "_discharge", "_handles", "_indexing", "_inplace"),
            *("_jit", "_lanes", "_tracing", "_transactions"),
            *("benchmarks/dispatch", "benchmarks/programs"),
        ),
        quick=(
            *("--sizes", "1024", "2048", "--steps", "4", "--rounds", "1"),
            *("--watched", "10", "--only", "swap", "calls"),
        ),
        needs_gpu=True,
    ),
    "lanes": Benchmark("lanes.py", ("_discharge", "_indexing", "_inplace", "_lanes")),
    "packed": Benchmark(
        "packed.py",
        ("_buffers", "_handles", "_inplace", "_jit"),
        quick=("--rounds", "2", "--sizes", "20", "--layers", "1"),
    ),
    "outside_jit": Benchmark(
        "outside_jit.py", ("_derivatives", "_discharge", "_transactions", "_transforms")
    ),
    "reversible": Benchmark(
        "reversible.py",
        (
            *("_derivatives", "_discharge", "_inplace", "_reversible", "_tracing"),
            *("_transforms", "benchmarks/reversible_programs.py"),
        ),
        quick=("--rounds", "1", "--layers", "4", "--steps", "100"),
    ),
    "scale": Benchmark(
        "scale.py",
        (
            *("_buffers", "_derivatives", "_discharge", "_indexing", "_inplace", "_jit"),
            *("_tracing", "_transactions", "benchmarks/scale_programs.py"),
        ),
        quick=("--rounds", "1", "--devices", "8", "--local", "2", "--layers", "1"),
    ),
    "digits": Benchmark(
        "training.py",
        (
            *("_buffers", "_discharge", "_indexing", "_inplace", "_jit"),
            *("examples/digits.py", "examples/_digits_baselines.py"),
        ),
        quick=("--epochs", "1", "--rounds", "2"),
    ),
}
