"""The room where buffers change hands, by itself: cells of anything, and calls that are Python."""

import gc
import operator
import threading
import time

import jax.numpy as jnp
import pytest

import refs
from refs._buffers.exchange import Busy, call_reading, exchange, exchange_one
from refs._buffers.operations import end
from refs._buffers.records import called_back, mine, readers
from refs._buffers.waiting import current_buffer, patiently
from refs.errors import RefStateError
from tests.faults.harness import side_by_side
from tests.faults.interruptions import at_place, places

pytestmark = pytest.mark.as_released

OLD, NEW = "abc", "xyz"


def cells():
    return [[x] for x in OLD]


def renew(held, *_):
    return [*NEW], "rest"


def one_by_one(taken, call, operands=()):
    """As `exchange`, with a cell in each."""
    return [
        exchange_one(cell, lambda held, *_, k=k: ([call(held)[0][k]], "rest"), *operands)
        for k, cell in enumerate(taken)
    ][-1]


BOTH = pytest.mark.parametrize("trade", [exchange, one_by_one])


# --- What is exchanged ----------------------------------------------------------------------------


@BOTH
def test_cells_get_what_the_call_gives(trade):
    taken = cells()
    assert trade(taken, renew) == "rest"
    assert taken == [["x"], ["y"], ["z"]]


def test_the_call_is_given_what_was_taken_and_the_operands():
    seen = []

    def call(held, *operands):
        return held, ([*held], *operands)

    assert exchange(cells(), call, (seen, 1, 2), [["r"], ["s"]], seen) == (
        [*OLD],
        ["r", "s"],
        1,
        2,
    )
    assert exchange_one(["a"], call, 1, 2) == (["a"], 1, 2)


def test_cells_are_empty_meanwhile_and_those_that_are_read_are_not():
    taken, shown = cells(), [["r"]]

    def call(held, seen):
        assert not any(taken)
        assert shown == [["r"]]
        return held, None

    exchange(taken, call, (seen := [],), shown, seen)
    cell = ["a"]
    assert exchange_one(cell, lambda held: (held, [*cell])) == []
    assert cell == ["a"]


def test_no_cells_at_all():
    assert exchange([], lambda held: ([], "rest")) == "rest"


# --- Where something is amiss ---------------------------------------------------------------------


@pytest.mark.parametrize("empty", range(3))
def test_an_empty_cell(empty):
    taken = cells()
    taken[empty].clear()
    with pytest.raises(Busy):
        exchange(taken, pytest.fail)
    assert taken == [[] if k == empty else [x] for k, x in enumerate(OLD)]
    with pytest.raises(Busy):
        exchange_one(taken[empty], pytest.fail)
    with pytest.raises(Busy):
        call_reading(taken[empty], pytest.fail, None)
    assert taken[empty] == []


def test_one_cell_twice():
    taken = cells()
    with pytest.raises(Busy):
        exchange([*taken, taken[1]], pytest.fail)
    assert taken == cells()


def test_an_empty_cell_among_those_that_are_read():
    taken = cells()
    with pytest.raises(Busy):
        exchange(taken, pytest.fail, (seen := [],), [["r"], []], seen)
    with pytest.raises(Busy):  # It is taken by this very exchange.
        exchange(taken, pytest.fail, (seen := [],), [taken[2]], seen)
    assert taken == cells()


@BOTH
@pytest.mark.parametrize("error", [ValueError, IndexError, Busy, KeyboardInterrupt])
def test_a_call_that_raises(trade, error):
    taken = cells()

    def call(held, *_):
        raise error("on purpose")

    with pytest.raises(error, match="on purpose"):
        trade(taken, call)
    assert taken == cells()


def test_a_call_that_raises_leaves_what_is_in_its_hands():
    taken = cells()

    def call(held):
        held[:] = NEW
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        exchange(taken, call)
    assert taken == [["x"], ["y"], ["z"]]


def test_an_exchange_within_one():
    outer, inner = cells(), cells()

    def call(held):
        with pytest.raises(Busy):
            exchange(outer, pytest.fail)
        return held, exchange(inner, renew)

    assert exchange(outer, call) == "rest"
    assert (outer, inner) == (cells(), [["x"], ["y"], ["z"]])


# --- Interrupts -----------------------------------------------------------------------------------


def steps():
    """A step of each kind, and the cells that it renews."""
    taken, shown = cells(), [["r"], ["s"]]

    def reading():
        seen = []
        return exchange(taken, renew, (seen,), shown, seen)

    yield taken, lambda: exchange(taken, renew)
    yield taken, reading
    yield taken, lambda: one_by_one(taken, renew)
    # Where C code returns, signals are handled.
    yield taken, lambda: [call_reading(cell, operator.eq, None) for cell in taken]
    yield taken, lambda: [called_back(operator.itemgetter(0), cell) for cell in taken]


@pytest.mark.parametrize(
    "kind", range(5), ids=["exchange", "reading", "one by one", "look", "called back"]
)
def test_an_interrupt_at_every_place(kind):
    taken, step = [*steps()][kind]
    count = len(places(step, 10_000))
    assert count > 3
    for k in range(count):
        taken[:] = cells()
        at_place(k, step)
        found = "".join(x for cell in taken for x in cell)
        expected = {OLD, NEW} if kind < 2 else {OLD, "xbc", "xyc", NEW} if kind == 2 else {OLD}
        assert found in expected, k
        assert not mine.records
        assert not readers


def test_garbage_that_uses_the_refs():
    """A finalizer that runs amid an exchange can't have what that has, and does no harm."""
    r = refs.new_ref(jnp.zeros(3))
    said = []

    class Garbage:
        def __init__(self):
            self.me = self

        def __del__(self):
            try:
                r[...] = 1
            except RefStateError as error:
                said.append(str(error))

    def call(held):
        Garbage()
        gc.collect()
        return held, None

    exchange_one(r._store.cell, call)
    assert len(said) == 1
    assert "code that interrupted that call" in said[0]
    r[...] += 2
    assert (r[...] == 2).all()


# --- The end of a ref -----------------------------------------------------------------------------


def test_what_has_ended_has_an_empty_cell():
    r = refs.new_ref(7)
    assert int(end(r, "was ended")) == 7
    assert r._store.cell == []
    with pytest.raises(RefStateError, match="which was ended"):
        patiently(lambda: call_reading(r._store.cell, pytest.fail, None), read=[r])
    with pytest.raises(RefStateError, match="which was ended"):
        end(r, "was ended again")


def test_what_is_taken_ends_when_it_is_back():
    r = refs.new_ref(7)
    taken = threading.Event()

    def hold():
        exchange_one(r._store.cell, lambda held: (taken.set(), time.sleep(0.01), (held, None))[2])

    def stop():
        taken.wait()
        return end(r, "was ended")

    assert int(side_by_side(hold, stop)[1]) == 7


def test_a_look_gives_the_very_buffer():
    r = refs.new_ref(jnp.zeros(3))
    assert current_buffer(r) is r._store.cell[0]
