"""Gradients without a tape: the backward pass undoes the updates of refs instead of storing them.

    python examples/reversible.py                  # about a minute on two CPU cores
    python examples/reversible.py --quick          # a quarter of a minute, smaller
    python examples/reversible.py orbit            # one of the parts alone

A function over refs whose updates can be undone, `a[...] += f(b[...])`, needs no memory for the
states in between: wrap the loop in `refs.reversible`, and `refs.grad` runs it backwards. Three
programs that need it, each of which checks itself:

    transformer        64 layers, trained on text; a gradient takes what it takes for 4 layers
    orbit              the gradient of a position after 100,000 steps, against finite differences
    hyperparameters    the gradient of a loss by each learning rate of the training before it

They are in `_reversible_transformer.py` and so on. With matplotlib there is a plot of memory, too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import _reversible_hyperparameters as hyperparameters
    import _reversible_orbit as orbit
    import _reversible_transformer as transformer
    from rich.console import Console
except ImportError as error:
    raise SystemExit(
        f"This example needs scikit-learn and rich ({error}). From the top of the checkout:\n"
        '    python -m pip install ".[examples]"'
    ) from error

import _reversible_memory as memory

PARTS = {
    "transformer": transformer.run,
    "orbit": orbit.run,
    "hyperparameters": hyperparameters.run,
}


def main(
    *,
    parts: Sequence[str] = (),
    quick: bool = False,
    out: Path | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Run the parts, or all; each raises an AssertionError if what it finds isn't right."""
    console = console or Console()
    results: dict[str, Any] = {}
    for name in dict.fromkeys(parts or PARTS):
        console.rule(name)
        began = time.perf_counter()
        results[name] = PARTS[name](console, quick=quick)
        console.print(f"{time.perf_counter() - began:.1f} s")
    if out is not None:
        path = out / "reversible.png"
        if memory.save_plot({name: result.memory for name, result in results.items()}, path):
            console.print(f"memory is drawn in {path}")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Gradients without a tape, with refs.reversible.")
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(PARTS) + "; or all")
    parser.add_argument("--quick", action="store_true", help="smaller, for a quick look")
    parser.add_argument("--out", type=Path, default=Path("build/reversible"), help="for the plot")
    settings = parser.parse_args()
    if unknown := {*settings.parts} - {*PARTS}:
        parser.error(f"no part {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    main(**vars(settings))
