"""Waiting until a ref's value is computed, and for nothing else."""

import threading
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import refs
from refs.errors import RefStateError


@pytest.fixture
def ref():
    return refs.new_ref(jnp.arange(3.0), name="state")


WAITS = [jax.block_until_ready, lambda tree: {"r": tree["r"].block_until_ready()}]


@pytest.mark.parametrize("wait", WAITS)
def test_waiting_for_a_value(wait):
    """XLA computes beside Python, from the second call on."""
    x = jnp.ones((800, 800))
    r = refs.new_ref(x)
    slow = refs.jit(lambda: r.at[...].set(x @ x @ x @ x))
    slow(), slow()
    assert wait({"r": r}) == {"r": r}
    assert r._store.cell[0].is_ready()


def test_a_thread_that_waits_is_in_nobodys_way(ref, monkeypatch):
    """Another one writes while it waits: the buffer that it waits for is deleted."""
    array, writers = type(jnp.zeros(1)), []
    wait = array.block_until_ready

    def written_meanwhile(buffer):
        if not writers and buffer is ref._store.cell[0]:
            writers.append(threading.Thread(target=refs.addupdate, args=(ref, 0, 1), daemon=True))
            writers[0].start()
            writers[0].join(30)
            assert buffer.is_deleted()
        return wait(buffer)

    refs.addupdate(ref, 0, 0)
    monkeypatch.setattr(array, "block_until_ready", written_meanwhile)
    before = float(ref[0])
    assert ref.block_until_ready() is ref
    assert len(writers) == 1
    assert float(ref[0]) == before + 1


def test_waiting_for_a_program_that_has_failed(ref, monkeypatch):
    """As on a GPU; on a CPU it fails at once."""
    fail = mock.Mock(side_effect=RuntimeError("on purpose"))
    monkeypatch.setattr(type(jnp.zeros(1)), "block_until_ready", fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        ref.block_until_ready()
    fail.assert_called_once()


def test_waiting_for_what_is_gone(ref):
    refs.freeze(ref)
    packed = refs.pack([jnp.ones(3), jnp.ones(3)])
    refs.freeze(packed[0])
    for tree in ([ref], packed):
        with pytest.raises(RefStateError, match="frozen"):
            jax.block_until_ready(tree)
    assert packed[1].block_until_ready() is packed[1]


def test_waiting_inside_a_trace(ref):
    def program(r):
        r[0] = 5
        return jax.block_until_ready(r)[0]

    assert refs.jit(program)(ref) == refs.jit(lambda: program(ref))() == 5
