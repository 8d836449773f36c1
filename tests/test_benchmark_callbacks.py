"""Each way that `benchmarks/callbacks.py` measures computes what plain NumPy does."""

import importlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rich.console")

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    callbacks = importlib.import_module("callbacks")
    ways = importlib.import_module("callbacks_ways")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("n", [1, 8, 1000])
@pytest.mark.parametrize("title", ways.PROGRAMS)
def test_every_way_agrees_with_numpy(title, n):
    found = ways.checked(ways.PROGRAMS[title](n), n)
    assert list(found) == list(ways.WAYS)
    assert np.asarray(found[ways.OURS].state()[...]).any()


def test_a_way_that_computes_something_else_is_an_error(monkeypatch):
    program = ways.one_element(8)
    monkeypatch.setitem(ways.WAYS, ways.BY_HAND, lambda p, n: ways.threaded(lambda x, k: x, n))
    with pytest.raises(AssertionError, match="one element, jnp,\nby hand, 8 elements"):
        ways.checked(program, 8)


@pytest.mark.parametrize("title", ways.PROGRAMS)
def test_a_ref_lends_its_own_memory(title):
    program = ways.PROGRAMS[title](1000)
    assert ways.pointers(ways.WAYS[ways.OURS], program, 1000) == (True, True)
    assert ways.pointers(ways.WAYS[ways.EAGER], program, 1000) == (True,)
    assert ways.pointers(ways.WAYS[ways.PURE], program, 1000) == (False, False)


def test_a_callback_in_other_memory_is_noticed():
    def elsewhere(watched, n):
        touch = watched.touch
        return ways.jitted_refs(replace(watched, touch=lambda x, k: touch(x.copy(), k)), n)

    assert ways.pointers(elsewhere, ways.one_element(8), 8) == (False, False)


def test_the_tables(capsys):
    callbacks.main(["--sizes", "4", "4096", "--rounds", "3", "--quick"])
    printed = capsys.readouterr().out
    assert "one element, 4 B, top level" in printed
    assert "whole buffer, 4 KiB, in a loop" in printed
    assert "yes / yes" in printed
    assert "One element of 4 KiB, in a loop:" in printed
    assert "peak memory" not in printed


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_a_copy_shows_in_the_peak():
    n = 2**24
    assert callbacks.peak(ways.OURS, "one element", n)["top level"] < 4 * n / 2
    assert callbacks.peak(ways.PURE, "one element", n)["top level"] > 4 * n


def test_sizes_are_of_floats(capsys):
    with pytest.raises(SystemExit):
        callbacks.main(["--sizes", "6"])
    assert "multiples of 4 bytes" in capsys.readouterr().err
