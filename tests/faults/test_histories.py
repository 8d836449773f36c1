"""What refs have been through is not seen: random histories of operations, as NumPy has them."""

import pytest

from tests.faults import histories
from tests.faults.harness import in_child, times


def test_each_operation_on_refs_that_share_a_store_with_others():
    assert in_child(histories.each_way_after_sharing) == []


@pytest.mark.parametrize("seed", range(times(2, 50)))
def test_a_history(seed):
    steps = times(150, 1000)
    assert in_child(histories.run, seed, steps) == steps
