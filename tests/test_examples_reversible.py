"""The examples of reversible functions: their gradients are right, and take no memory a step."""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn")
rich_console = pytest.importorskip("rich.console")

EXAMPLES = str(Path(__file__).parent.parent / "examples")
PROGRAM = str(Path(EXAMPLES) / "reversible.py")


@pytest.fixture(scope="module")
def reversible():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("reversible")


@pytest.fixture
def console():
    return rich_console.Console(file=io.StringIO(), width=100)


def run(reversible, name, console):
    """A part's quick form, which has checked itself, and what it shows."""
    results = reversible.main(parts=[name], quick=True, console=console)
    assert list(results) == [name]
    shown = " ".join(console.file.getvalue().split())
    assert results[name].summary in shown
    return results[name], shown


@pytest.mark.slow
def test_the_transformer_learns_in_memory_that_depth_does_not_change(reversible, console):
    result, shown = run(reversible, "transformer", console)
    assert result.memory.sizes == [2, 8]
    plain, layer, ours = result.memory.ways.values()
    assert plain[1] > 2.5 * plain[0]
    assert plain[1] > layer[1] > ours[1]
    assert ours[1] == pytest.approx(ours[0], rel=0.05)
    assert result.apart < 1e-4
    assert len(result.losses) == 12
    assert "the budget is 8.0 MiB" in shown


@pytest.mark.slow
def test_the_orbit_is_flown_back(reversible, console):
    result, shown = run(reversible, "orbit", console)
    for name, sizes in result.memory.ways.items():
        assert (sizes[-1] > 10 * sizes[0]) == (name == "plain")
    for time in result.expected:
        assert result.off("plain", time) < 1e-3
        assert result.off("Fixed(bits=28)", time) < 1e-3
    assert "4,000" in shown


def test_the_orbits_reference(reversible):
    """Kepler: each orbit comes back to where it began, and its first velocity says only when.

    There the planet flies in the direction of the second coordinate, so the first one stands still.
    """
    orbit = importlib.import_module("_reversible_orbit")
    speed = float(orbit.VELOCITY[1])
    axis = 1 / (2 - speed**2)
    period = 2 * np.pi * axis**1.5
    late = 3 * axis * period * speed  # the derivative of the period by the speed
    assert np.abs(orbit.differences(20_000, period)).max() < 1e-3 * late
    assert np.abs(orbit.differences(20_000, period + 1)).max() > 0.1 * late


@pytest.mark.slow
def test_the_gradient_by_the_learning_rates(reversible, console):
    result, shown = run(reversible, "hyperparameters", console)
    tape, inexact, exact = result.gradients
    assert result.off(tape) == 0
    assert result.off(exact) < 1e-4
    assert np.isnan(result.gradients[inexact]).all()
    assert result.rates.shape == (100,)
    assert len(result.losses) == 6
    assert result.losses == sorted(result.losses, reverse=True)
    assert result.test_losses[1] < result.test_losses[0]
    assert "5 changes of 100 learning rates" in shown


def test_the_plot(reversible, tmp_path):
    memory = importlib.import_module("_reversible_memory")
    measured = memory.Memory("steps", [1, 10], {"plain": [2**10, 2**20], "reversible": [512, 512]})
    path = tmp_path / "new" / "reversible.png"
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    assert memory.save_plot({"a part": measured, "another": measured}, path) == has_matplotlib
    assert path.exists() == has_matplotlib
    console = rich_console.Console(file=io.StringIO(), width=100)
    console.print(memory.table(measured, "A title"))
    shown = console.file.getvalue()
    assert all(text in shown for text in ("A title", "1.0 KiB", "1.0 MiB", "512 bytes"))


def program(*command):
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
    return subprocess.run(
        [sys.executable, *command],
        env={**inherited, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_it_refuses_parts():
    done = program(PROGRAM, "orbit", "nonsense")
    assert done.returncode == 2
    assert done.stderr.endswith(
        "error: no part nonsense; the parts are transformer, orbit, hyperparameters\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["sklearn.datasets", "rich.console"])
def test_it_names_the_extra(missing):
    hidden = (
        f"import runpy, sys; sys.modules[{missing!r}] = None; sys.path.insert(0, sys.argv[2]); "
        "runpy.run_path(sys.argv[1])"
    )
    done = program("-c", hidden, PROGRAM, EXAMPLES)
    assert done.returncode == 1
    assert done.stderr.startswith("This example needs scikit-learn and rich (import of")
    assert done.stderr.endswith('    python -m pip install ".[examples]"\n')
