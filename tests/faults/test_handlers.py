"""Code that runs in the middle of a step, on its thread: handlers of signals and finalizers."""

import sys

import pytest

from tests.faults import handlers
from tests.faults.harness import in_child, times

pytestmark = pytest.mark.slow


def check(outcomes):
    """That nothing was lost, and that readers saw values, which were those before or after."""
    bad = {name: o for name, o in outcomes.items() if o["wrong"] or set(o["refs"]) != {o["steps"]}}
    assert not bad
    assert sum(o["read"] for o in outcomes.values()) > 0


def test_a_signals_handler_that_reads():
    check(in_child(handlers.read_by_a_signals_handler, times(20, 300)))


def test_a_handler_that_reads_at_every_place():
    check(in_child(handlers.read_at_every_place, times(250, 3000)))


@pytest.mark.skipif(
    sys.version_info < (3, 12),
    reason="Python 3.11 collects garbage amid C code, where JAX crashes, without refs too",
)
@pytest.mark.parametrize("how", ["gc", "weakref"])
def test_a_finalizer_that_reads(how):
    check(in_child(handlers.read_by_a_garbage_collector, times(5, 100), how))


def test_a_handler_that_writes_what_is_read():
    outcomes = in_child(handlers.write_at_every_place_of_a_read, times(40, 1000))
    assert all(o["held"] == o["written"] > 0 for o in outcomes.values())
    assert sum(o["busy"] for o in outcomes.values()) > 0


def test_a_signals_handler_that_writes():
    outcome = in_child(handlers.written_by_a_signals_handler, times(100, 2000))
    assert outcome["refs"] == outcome["expected"]
