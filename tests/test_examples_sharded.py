"""The sharded example learns in place, and its resumed run takes the saved run's steps."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
import pytest

import refs

EXAMPLES = Path(__file__).parent.parent / "examples"
PROGRAM = str(EXAMPLES / "sharded_training.py")


def run(*command):
    # The example makes the devices that it needs, whatever the tests run on; executables are kept.
    cache = "JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE"
    inherited = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("XLA_", "JAX_")) or k.startswith(cache)
    }
    return subprocess.run(
        [sys.executable, *command],
        env={**inherited, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_it_learns_in_place_and_resumes(tmp_path):
    small = ["--steps", "60", "--again", "5", "--width", "64", "--depth", "1", "--seed", "3"]
    done = run(PROGRAM, *small, "--checkpoint", str(tmp_path))
    assert done.returncode == 0, done.stderr

    before, after = (json.loads((tmp_path / f"{p}.json").read_text()) for p in ("train", "resume"))
    assert len(before["losses"]) == 60
    np.testing.assert_allclose(after["losses"], before["losses"][-5:], rtol=1e-4)
    assert before["state"] == after["state"]
    assert np.mean(before["losses"][-5:]) < 0.6 * before["losses"][0]
    assert (before["moved"], before["shards"]) == (0, 8 * before["refs"])
    assert (after["moved"], after["shards"]) == (0, 4 * after["refs"])
    # A device has half of what is split, and all of the rest.
    assert 0.5 < before["bytes_of_device"] / before["bytes"] < 0.7
    assert after["bytes_of_device"] == before["bytes_of_device"]

    shown = done.stdout
    numbers = re.findall(r"(?:validation loss|that counts .*?) *│ ([\d.]+)", shown)
    validation, single, _ = map(float, numbers)
    assert validation == pytest.approx(before["valid"], abs=1e-3)
    assert validation < single
    assert f"0 of {8 * before['refs']} shards moved" in shown
    assert f"0 of {4 * before['refs']} shards moved" in shown
    assert "equal, bit for bit" in shown
    assert "The resumed run takes the same steps as the one that was saved." in shown


@pytest.mark.slow
def test_the_control_computes_the_same(tmp_path):
    small = ["--steps=12", "--again=2", "--width=32", "--depth=1", "--devices=4", "--compare"]
    done = run(PROGRAM, *small, "--checkpoint", str(tmp_path))
    assert done.returncode == 0, done.stderr
    compared = json.loads((tmp_path / "compare.json").read_text())
    (by_hand, _), (ours, seconds) = compared["threaded by hand"], compared["refs.jit"]
    np.testing.assert_allclose(ours, by_hand, rtol=1e-3)
    assert ours[-1] < ours[0]
    assert len(seconds) == len(ours) - 1
    assert re.search(r"refs\.jit +│ +[\d.]+ │ +[\d.]+ │", done.stdout)


@pytest.fixture
def model(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("_sharded_model")


def test_the_cache_changes_nothing(model):
    params = refs.tree.new_ref(model.init(jax.random.key(0), 32, 2))
    tokens = np.frombuffer(b"for i in range(3)", np.uint8)[None]
    whole = refs.jit(model.forward)(params, tokens)
    by_array = jax.jit(model.forward)(refs.tree.get(params), tokens)

    @refs.jit
    def in_parts():
        room = jax.numpy.zeros((2, 1, model.CONTEXT, model.HEADS, 8))
        cache = {"k": refs.new_ref(room), "v": refs.new_ref(room)}
        cuts = [0, 5, 6, 17]
        parts = [model.forward(params, tokens[:, a:b], cache, a) for a, b in pairwise(cuts)]
        return jax.numpy.concatenate(parts, axis=1)

    np.testing.assert_allclose(by_array, whole, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(in_parts(), whole, rtol=1e-4, atol=1e-5)


def test_a_written_text_begins_with_the_prompt(model):
    params = refs.tree.new_ref(model.init(jax.random.key(0), 32, 1))
    prompt = np.frombuffer(b"The ", np.uint8)
    written = bytes(np.asarray(model.generate(params, prompt, jax.random.key(0))))
    assert written.startswith(b"The ")
    assert len(written) == model.CONTEXT
    assert len(set(written)) > 20  # drawn, not zeros


def test_no_paragraph_is_trained_on_and_validated(model):
    train, valid = (part.tobytes().split(b"\n\n")[1:-1] for part in model.load())
    assert len(train) > 5 * len(valid) > 0
    assert not {*train} & {*valid}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--devices", "6"], "--devices must be 4, 8, 16 or 32"),
        (["--steps", "20"], "--again must lie between 1 and --steps - 1"),
        (["--width", "30"], "--width must be a multiple of 4"),
        (["--depth", "0"], "--depth must be at least 1"),
        (["--prompt", ""], "--prompt must have 1 to 127 bytes"),
    ],
)
def test_it_refuses_settings(flags, message):
    done = run(PROGRAM, *flags)
    assert done.returncode == 2
    assert done.stderr.endswith(f"error: {message}\n")


@pytest.mark.slow
def test_it_names_the_package_that_is_missing():
    hidden = (
        "import runpy, sys; sys.modules['orbax.checkpoint'] = None; runpy.run_path(sys.argv[1])"
    )
    done = run("-c", hidden, PROGRAM)
    assert done.returncode == 1
    assert done.stderr.startswith("This example needs orbax-checkpoint and rich (import")
    assert done.stderr.endswith("    python -m pip install orbax-checkpoint rich\n")
