"""The examples run, learn, stay in place, and agree with the controls they are timed against."""

from __future__ import annotations

import importlib
import io
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import refs

pytest.importorskip("sklearn")
rich_console = pytest.importorskip("rich.console")

EXAMPLES = str(Path(__file__).parent.parent / "examples")


@pytest.fixture(scope="module")
def digits():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("digits")


def test_digits_learns_in_place(digits):
    out = io.StringIO()
    console = rich_console.Console(file=out, width=100)
    result = digits.main(epochs=2, batch_size=32, compare=False, limit=600, console=console)

    assert len(result.losses) == 2 * (480 // 32)
    assert result.losses[0] == pytest.approx(np.log(10), rel=1e-5)
    assert np.mean(result.losses[-5:]) < 0.5 * result.losses[0]
    assert result.test_accuracy > 0.5
    assert int(result.net["batches"][...]) == len(result.losses)
    assert result.moved == 0
    assert "0 of 30 buffers moved" in out.getvalue()
    assert f"{result.test_accuracy:.2%}" in out.getvalue()


@pytest.mark.as_released
@pytest.mark.slow
def test_digits_explained(digits):
    """What the report says of the step is what the example promises, and what its HLO has."""
    net = refs.tree.new_ref(digits.init(0))
    batch = np.zeros((32, 8, 8), np.float32), np.zeros(32, int)
    report = digits.train_step.explain(net, *batch)
    assert len(report.refs) == 30
    does = {r.name: r.does for r in report.refs}
    assert does["net['rate']"] == "read"
    assert "written" not in does["net['batches']"]
    changed = [r for r in report.refs if r.does != "read"]
    assert len(changed) == 29
    assert all(r.keeps_memory for r in changed)
    # XLA puts weights in other orders for the convolutions, and keeps old ones for gradients.
    hlo = digits.train_step.lower(net, *batch).compile().as_text()
    copies = re.findall(r"= f32\[([\d,]+)\]\S* copy\(", hlo)
    sizes = [math.prod(map(int, dims.split(","))) for dims in copies]
    for move in report.moves:
        assert move.what == "copy"
        assert all(line.startswith("digits.py:") for line in move.lines)
    for size in {move.elements for move in report.moves}:
        times = sum(move.times for move in report.moves if move.elements == size)
        assert times == sizes.count(size)
    assert not report.callbacks
    size = sum(r.bytes for r in report.refs)
    assert report.memory.aliased == size - 4  # all but the rate
    line = report.refs[-1].lines[0].line
    assert line.startswith("digits.py:")


def test_digits_controls_compute_the_same(digits):
    baselines = importlib.import_module("_digits_baselines")
    data = digits.load(200)
    batch = next(data.minibatches(32, np.random.default_rng(0)))
    by_hand, native, ours = baselines.compare(digits.init(0), *batch, rounds=1, steps=2, check=5)

    assert ours.name == "refs.jit"
    np.testing.assert_allclose(ours.losses, by_hand.losses, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(ours.losses, native.losses, rtol=1e-3, atol=1e-5)
    assert ours.losses[-1] < ours.losses[0]
    assert (ours.moved, ours.cells) == (0, 30)
    assert len(ours.seconds_per_step) == 1
    assert baselines.table([by_hand, native, ours]).row_count == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 161}, "--batch-size must lie between 1 and 160"),
        ({"batch_size": 0}, "--batch-size must lie between 1 and 160"),
        ({"epochs": 0}, "--epochs must be at least 1"),
    ],
)
def test_digits_refuses_settings(digits, settings, message):
    with pytest.raises(SystemExit) as caught:
        digits.main(**{"compare": False, "limit": 200, **settings})
    assert str(caught.value) == message


@pytest.mark.parametrize("missing", ["sklearn.datasets", "rich.console"])
def test_digits_names_the_extra(digits, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "digits")
    with pytest.raises(SystemExit) as caught:
        importlib.import_module("digits")
    assert str(caught.value) == (
        "This example needs scikit-learn and rich (import of "
        f"{missing} halted; None in sys.modules). From the top of the checkout:\n"
        '    python -m pip install ".[examples]"'
    )
