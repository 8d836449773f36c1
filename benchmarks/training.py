"""The digits example: how well it learns, how long that takes, and its step in three styles.

    python benchmarks/training.py [--epochs N] [--rounds N]

From the top of the checkout, with `refs`, rich and scikit-learn installed. `examples/digits.py`
prints the same figures.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from results import Section, add_option, record
from rich.console import Console
from stopwatch import Timing

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import _digits_baselines
import digits

WAYS = {"threaded by hand": "by hand", "jax.ref, jax.jit": "jax.Ref", "refs.jit": "refs"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=21)
    add_option(parser)
    options = parser.parse_args()

    data = digits.load()
    trained = digits.train(data, epochs=options.epochs, batch_size=64, seed=0)
    batch = next(data.minibatches(64, np.random.default_rng(0)))
    styles = _digits_baselines.compare(digits.init(0), *batch, rounds=options.rounds)
    Console().print(_digits_baselines.table(styles))

    wrong = 100 * (1 - trained.test_accuracy)
    steps = {WAYS[s.name]: Timing.of(s.seconds_per_step) / 1e-3 for s in styles}
    record(
        "digits",
        {
            "errors": Section("% of the test images", {"digits": {"refs": Timing(wrong)}}),
            "training": Section("s", {"digits": {"refs": Timing(trained.seconds)}}),
            "moved": Section("buffers", {"digits": {"refs": Timing(trained.moved)}}),
            "steps": Section("ms a step", {"digits": steps}, "by hand"),
        },
        options,
    )


if __name__ == "__main__":
    main()
