"""What the parts of `reversible.py` share: they measure the memory that gradients take.

measure      compiles a gradient in several ways and sizes, and asks XLA
table        shows it
save_plot    draws it, if matplotlib is installed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

# A function made by `refs.jit`, and the arguments to compile it for.
Program = tuple[Any, tuple[Any, ...]]
# The same compiled: by the way, and the size.
Compiled = dict[tuple[str, int], Any]


@dataclass(frozen=True)
class Memory:
    """Bytes of temporary memory, without arguments and results: for each way, one for each size.

    Attributes:
      unit: what the sizes count.
    """

    unit: str
    sizes: list[int]
    ways: dict[str, list[int]]


def measure(
    unit: str,
    sizes: Iterable[int],
    ways: Mapping[str, Callable[[int], Program]],
    console: Console,
) -> tuple[Memory, Compiled]:
    """Compiles each way's program for each size; `ways[name](size)` makes it."""
    sizes = [*sizes]
    pairs = [(name, size) for name in ways for size in sizes]
    found: dict[str, list[int]] = {name: [] for name in ways}
    compiled: Compiled = {}
    title = f"compiling, for {unit}"
    for name, size in track(pairs, title, console=console, transient=True):
        function, args = ways[name](size)
        compiled[name, size] = function.lower(*args).compile()
        found[name].append(compiled[name, size].memory_analysis().temp_size_in_bytes)
    return Memory(unit, sizes, found), compiled


def readable(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024 or unit == "MiB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"


def table(memory: Memory, title: str) -> Table:
    shown = Table(title=title)
    shown.add_column(memory.unit, justify="right")
    for name in memory.ways:
        shown.add_column(name, justify="right")
    for size, *row in zip(memory.sizes, *memory.ways.values(), strict=True):
        shown.add_row(f"{size:,}", *map(readable, row))
    return shown


def save_plot(memories: Mapping[str, Memory], path: Path) -> bool:
    """Draws memory against the size, a picture for each part, if matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(4.5 * len(memories), 4), layout="constrained")
    pictures = figure.subplots(1, len(memories), squeeze=False)[0]
    for axes, (title, memory) in zip(pictures, memories.items(), strict=True):
        for name, sizes in memory.ways.items():
            axes.loglog(memory.sizes, sizes, "o-", label=name)
        axes.set(title=title, xlabel=memory.unit, ylabel="bytes of temporary memory")
        axes.set_xticks(memory.sizes, [f"{size:,}" for size in memory.sizes])
        axes.set_xticks([], minor=True)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True
