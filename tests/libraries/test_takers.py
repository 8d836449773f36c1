"""What libraries make of a ref that look at a value's type, and what docs/with/ says to write."""

import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs


def test_einops_takes_values() -> None:
    einops = pytest.importorskip("einops")
    w = refs.new_ref(jnp.arange(6.0).reshape(2, 3))
    rows = refs.jit(lambda: einops.reduce(w[...], "a b -> a", "sum"))
    np.testing.assert_array_equal(rows(), [3, 12])
    with pytest.raises(RuntimeError, match="Tensor type unknown to einops"):
        einops.rearrange(w, "a b -> b a")


def test_tensorboard_takes_numbers(tmp_path: Any) -> None:
    tensorboard = pytest.importorskip("tensorboardX")
    loss, steps, w = refs.new_ref(0.5), refs.new_ref(3), refs.new_ref(jnp.ones(3))
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("loss", float(loss), int(steps))
        writer.add_histogram("w", w[...], int(steps))
        with pytest.raises(NotImplementedError, match="expected numpy array"):
            writer.add_scalar("loss", loss, int(steps))


def test_tqdm_shows_and_walks() -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    w, loss = refs.new_ref(jnp.arange(6.0).reshape(2, 3)), refs.new_ref(0.5)
    with tqdm(w, file=io.StringIO()) as bar:
        assert [float(row.sum()) for row in bar] == [3, 12]
        bar.set_postfix(loss=float(loss))
        assert "loss=0.5" in str(bar)


def test_orbax_writes_the_values_of_refs_and_restores_them_to_none(tmp_path: Any) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    state = {"w": refs.new_ref(jnp.arange(3.0), name="w")}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "refs", state)
        checkpointer.wait_until_finished()
        with pytest.raises(ValueError, match="Unsupported type"):
            checkpointer.restore(tmp_path / "refs", state)
        state["w"][...] = 0
        found = checkpointer.restore(tmp_path / "refs", refs.tree.abstract(state))
    refs.tree.set(state, found)
    np.testing.assert_array_equal(state["w"], np.arange(3.0))
    assert not isinstance(found["w"], jax.Array)
