"""State saved by other libraries, and restored in place. Over processes: `test_processes.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file, save_file

import refs


def make():
    return refs.tree.new_ref(
        {"w": jnp.arange(4096.0), "key": jax.random.key(5), "layers": [jnp.int8(3), jnp.ones(2)]}
    )


@refs.jit
def step(state):
    state["w"][...] += 1
    state["key"][...], _ = jax.random.split(state["key"][...])
    state["layers"][0][...] += 1


def values(state):
    got = refs.tree.get(state)
    return jax.tree.map(np.array, got | {"key": jax.random.key_data(got["key"])})


def assert_equal(state, expected):
    jax.tree.map(np.testing.assert_array_equal, values(state), expected)


@pytest.mark.as_released
@pytest.mark.parametrize("checkpointer", [ocp.StandardCheckpointer, ocp.PyTreeCheckpointer])
def test_orbax_saves_what_was_there_and_restores_in_place(tmp_path, checkpointer):
    state = make()
    saved = values(state)
    with checkpointer() as c:
        with refs.tree.borrow(state) as arrays:
            c.save(tmp_path / "state", arrays)
        for _ in range(3):  # It saves in the background.
            step(state)
        later = values(state)
        getattr(c, "wait_until_finished", lambda: None)()
        target = refs.tree.abstract(state)
        if checkpointer is ocp.PyTreeCheckpointer:
            args = ocp.checkpoint_utils.construct_restore_args(target)
            restored = c.restore(tmp_path / "state", item=target, restore_args=args)
            restored["key"] = jax.random.wrap_key_data(restored["key"])  # It has restored the bits.
        else:
            restored = c.restore(tmp_path / "state", target)
    assert_equal(state, later)
    where = state["w"].unsafe_buffer_pointer()
    refs.tree.set(state, restored)
    assert_equal(state, saved)
    assert state["w"].unsafe_buffer_pointer() == where
    del restored, arrays
    step(state)
    assert state["w"].unsafe_buffer_pointer() == where


def test_a_manager_of_checkpoints(tmp_path):
    state, kept = make(), {}
    with ocp.CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as m:
        for k in range(4):
            kept[k] = values(state)
            with refs.tree.borrow(state) as arrays:
                m.save(k, args=ocp.args.StandardSave(arrays))
            step(state)
        m.wait_until_finished()
        assert m.all_steps() == [2, 3]
        for k in m.all_steps():
            target = refs.tree.abstract(state)
            refs.tree.set(state, m.restore(k, args=ocp.args.StandardRestore(target)))
            assert_equal(state, kept[k])


def test_restored_into_packed_refs(tmp_path):
    state = make()
    with ocp.StandardCheckpointer() as c:
        with refs.tree.borrow(state) as arrays:
            c.save(tmp_path / "state", arrays)
        c.wait_until_finished()
        packed = refs.pack(jax.tree.map(jnp.zeros_like, refs.tree.get(state)))
        refs.tree.set(packed, c.restore(tmp_path / "state", refs.tree.abstract(packed)))
    assert_equal(packed, values(state))


def test_arrays_with_names(tmp_path):
    state = make()["layers"]
    leaves = jax.tree.leaves_with_path(state)
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    with refs.tree.borrow(state) as arrays:
        named = {n: np.asarray(x) for n, x in zip(names, arrays, strict=True)}
        save_file(named, tmp_path / "state")
        np.savez(tmp_path / "state.npz", **named)
    for found in (load_file(tmp_path / "state"), np.load(tmp_path / "state.npz")):
        expected = jax.tree.map(np.array, refs.tree.get(state))
        for ref in state:
            ref[...] = 0
        refs.tree.set(state, [found[n] for n in names])
        jax.tree.map(np.testing.assert_array_equal, refs.tree.get(state), expected)
