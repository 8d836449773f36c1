"""Programs over the devices of several processes, which the tests start and stop.

See `training.py` for what the processes run.
"""

import numpy as np
import pytest

from tests.devices.training import start

pytestmark = pytest.mark.slow


def losses(found):
    """The losses that all processes have seen."""
    assert all(status == 0 for status, _, _ in found), [said["stderr"] for _, said, _ in found]
    first, *others = [said["losses"] for _, said, _ in found]
    assert all(other == first for other in others)
    return first


@pytest.fixture(scope="module")
def of_one():
    return losses(start("train", 1, kind="dp"))


@pytest.mark.parametrize("kind, n", [("dp", 4), ("fsdp", 2)])
def test_training_over_processes_equals_that_in_one(of_one, kind, n):
    found = losses(start("train", n, kind=kind))
    np.testing.assert_allclose(found, of_one, rtol=1e-6)
    assert found[-1] < 0.4 * found[0]


def test_saved_on_four_and_restored_on_two_and_eight_devices(of_one, tmp_path):
    folder = str(tmp_path / "saved")
    saved = losses(start("save", 4, kind="fsdp", folder=folder))
    np.testing.assert_allclose(saved, of_one[10:20], rtol=1e-6)
    bits = []
    for n_processes, n_devices, kind in ((2, 2, "fsdp"), (1, 8, "fsdp"), (1, 4, "dp")):
        found = start("resume", n_processes, n_devices, kind=kind, folder=folder)
        np.testing.assert_allclose(losses(found), saved, rtol=1e-6)
        assert all(said["moved"] == 0 for _, said, _ in found)
        bits += [said["bits"] for _, said, _ in found]
    assert len(bits[0]) == 7
    assert all(b == bits[0] for b in bits)


@pytest.mark.parametrize("victim", [1, 0])
def test_when_a_process_is_killed_the_others_stop(victim):
    found = start("killed", 4, timeout=120, kind="fsdp", victim=victim)
    told = [said for status, said, _ in found if status == 3]
    assert found[victim][0] == -9
    # JAX itself aborts a process that hears of it before its step fails.
    assert all(status in (3, -6) for k, (status, _, _) in enumerate(found) if k != victim)
    for said in told:
        assert "Gloo" in said["error"]
        assert said["seconds"] < 30
        # Neither old nor new: an error at each use.
        assert all("Gloo" in seen for seen in said["seen"].values())


def test_a_callback_that_fails_on_one_process():
    (_, there, _), (_, here, _) = start("callback_fails", 2, where=1, agrees=False)
    assert here["error"].startswith("CallbackError: io_callback of `check`")
    [note] = here["notes"]
    assert note.startswith("This is what happened in process 1: its parts of ref `r` (created at ")
    assert "End all processes" in note
    assert here["r"] == [[1, 1], [1, 1]]
    assert here["total"] == 1
    # That process can't know: so the page says it.
    assert there["error"] is None
    assert there["r"] == [[2, 2], [2, 2]]


def test_processes_that_agree_write_all_or_none():
    for _, said, _ in start("callback_fails", 2, where=1, agrees=True):
        assert said["error"] is None
        assert said["r"] == [[1, 1], [1, 1]]
