"""A training step over refs on 64 devices moves what the step by hand moves: it is only compiled.

`docs/design/scale.md` has the figures for up to 1,024 devices.
"""

import json

import pytest

from tests.processes import run_with_devices

pytest.importorskip("rich")

pytestmark = pytest.mark.slow


def on_64_devices(what, *arguments):
    said = run_with_devices(64, "benchmarks/scale.py", "--child", what, json.dumps(arguments))
    return json.loads(said)


@pytest.fixture(scope="module")
def programs():
    """(layout, platform) -> the facts of the program by hand, and of that over refs."""
    found = on_64_devices("facts", 1)
    return {
        (layout, platform): (ways["by hand"], ways["refs.jit"])
        for layout, platforms in found.items()
        for platform, ways in platforms.items()
    }


def test_there_are_four_layouts_and_they_move_something(programs):
    assert len(programs) == 8
    assert all(by_hand["MB"] > 10 for by_hand, _ in programs.values())


def test_each_ref_has_an_alias(programs):
    for by_hand, over_refs in programs.values():
        assert over_refs["aliased"] == over_refs["written"] == by_hand["written"] == 26
        assert over_refs["state, MB"] == by_hand["state, MB"]


def test_no_moment_is_moved(programs):
    for case, (_, over_refs) in programs.items():
        assert over_refs["of moments"] == 0, case


def test_the_collectives_are_those_of_the_step_by_hand(programs):
    for (layout, platform), (by_hand, over_refs) in programs.items():
        if platform == "GPUs" or "explicit" in layout:
            assert over_refs["not by the other"] == by_hand["not by the other"] == 0, layout
        # On CPUs the conditions of fences are moved: some elements.
        assert over_refs["MB"] == pytest.approx(by_hand["MB"], abs=1e-4), (layout, platform)


def test_nothing_of_the_states_size_is_copied(programs):
    for case, (by_hand, over_refs) in programs.items():
        assert over_refs["temporary, MB"] <= 1.01 * by_hand["temporary, MB"], case


def test_an_access_to_a_part_moves_that_part():
    found = {title: row["refs.jit"][0] for title, row in on_64_devices("accesses").items()}
    whole = found.pop("r[ds(k, n / 2)] = rows")
    row = found.pop("r[k]")
    assert row < 1 < whole  # kilobytes
    assert set(found.values()) == {0}
