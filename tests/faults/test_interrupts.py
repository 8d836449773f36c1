"""Ctrl-C at any moment: each ref keeps its old value or gets its new one, all of a call alike."""

import pytest

from tests.faults import tally
from tests.faults.harness import in_child, times
from tests.faults.interrupted_programs import CALLS, EAGER


def none_is_bad(tallies, record_property):
    """That nothing became of any ref but what should."""
    total = {key: sum(t[key] for t in tallies.values()) for key in next(iter(tallies.values()))}
    text = f"{total['interrupts']:,} interrupts: {total['lost']:,} lost, {total['torn']:,} torn"
    record_property("interrupts", text)
    print(text)
    bad = [f"{name}: {t}" for name, t in tallies.items() if any(list(t.values())[1:])]
    assert not bad, "\n".join([text, *bad])


@pytest.mark.parametrize(
    "names, n",
    [(CALLS, times(20, 250)), (EAGER, times(20, 250)), (["first_calls"], times(3, 250))],
    ids=["calls", "eager", "first_calls"],
)
def test_at_random_moments(names, n, record_property):
    none_is_bad(in_child(tally.at_random_moments, list(names), n), record_property)


@pytest.mark.parametrize("names", [CALLS, EAGER], ids=["calls", "eager"])
def test_at_every_place(names, record_property):
    none_is_bad(in_child(tally.at_every_place, list(names), times(250, 3000)), record_property)


def test_at_the_last_places_of_a_first_call(record_property):
    """When the program has run, and JAX hands its results through many functions."""
    none_is_bad(
        in_child(tally.at_the_last_places, ["first_calls"], times(20, 100)), record_property
    )
