"""The tests that need several devices: in one process for each number of devices."""

import re

import pytest

from tests.processes import PYTEST, run_with_devices

QUICK = {
    8: [
        "tests/handles/test_host_memory.py",
        "tests/handles/test_placement.py",
        "tests/handles/test_placement_made.py",
        "tests/handles/test_placement_restored.py",
        "tests/test_tree.py",
    ],
}
SLOW = {
    4: [
        "tests/buffers/test_devices.py",
        *(
            f"tests/callbacks/test_transforms.py::{name}"
            for name in (
                "test_each_device_calls_with_its_part",
                "test_a_device_whose_call_fails",
                "test_without_a_mesh",
            )
        ),
        "tests/jit/test_disable_jit.py",
        "tests/jit/test_shardings.py",
        "tests/reversible/test_shard_map.py",
        "tests/test_explicit_mesh.py",
        *(
            f"tests/test_random.py::{name}"
            for name in (
                "test_all_devices_draw_the_same",
                "test_lanes_on_devices",
                "test_lanes_that_devices_divide",
            )
        ),
        "tests/transforms/test_shard_map.py",
        "tests/transforms/test_shard_map_writes.py",
    ],
    8: ["tests/indexing/test_indexing_sharded.py", "tests/inplace/test_sharded.py"],
}
# What can't be done on a CPU: test_host_memory reads no parts of an axis that devices share.
SKIPPED = {"tests/handles/test_host_memory.py": 2}


def run_on(n, tests):
    said = run_with_devices(n, *PYTEST, *tests)
    skipped = re.search(r"(\d+) skipped", said)
    assert int(skipped[1] if skipped else 0) == sum(SKIPPED.get(test, 0) for test in tests), said


@pytest.mark.parametrize("n", QUICK)
def test_on(n):
    run_on(n, QUICK[n])


@pytest.mark.slow
@pytest.mark.parametrize("n", SLOW)
def test_on_with_all_the_others(n):
    run_on(n, SLOW[n])
