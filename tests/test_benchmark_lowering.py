"""Each way of training in `benchmarks/lowering.py` takes the same step."""

import importlib
from pathlib import Path

import jax
import numpy as np
import pytest

import refs

pytest.importorskip("rich")
pytest.importorskip("sklearn")

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    programs = importlib.import_module("lowering_programs")
pytestmark = pytest.mark.slow


def test_every_way_of_a_transformer_agrees_with_the_one_by_hand():
    program = programs.transformer(1)
    step = jax.jit(program.ways[programs.BY_HAND])
    first, loss = step(program.state, *program.args)
    second, less = step(first, *program.args)
    assert less < loss
    for way in (programs.OURS, programs.INSIDE, programs.NATIVE):
        jit, new_ref = (
            (jax.jit, jax.new_ref) if way == programs.NATIVE else (refs.jit, refs.new_ref)
        )
        state, step = jax.tree.map(new_ref, program.state), jit(program.ways[way])
        losses = [step(state, *program.args) for _ in range(2)]
        # Not the parameters: where a gradient is only noise, Adam moves by the whole rate. The
        # second loss depends on all others.
        np.testing.assert_allclose(losses, [loss, less], rtol=1e-5, err_msg=way)
        assert state["count"][...] == second["count"] == 2
        for moment in "mean", "square":
            both = jax.tree.leaves(state[moment]), jax.tree.leaves(second[moment])
            for ours, theirs in zip(*both, strict=True):
                np.testing.assert_allclose(ours[...], theirs, rtol=1e-3, atol=1e-6, err_msg=way)
