"""Who waits for whom where buffers change hands: readers, callbacks, and what never comes."""

import threading
import time

import jax
import jax.numpy as jnp
import pytest

import refs
from refs._buffers.exchange import Busy, call_reading, exchange, exchange_one
from refs._buffers.records import called_back
from refs._buffers.several import replaced
from refs._buffers.waiting import patiently
from refs.errors import RefStateError
from tests.faults.harness import side_by_side, within_limit

# --- Readers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "exchange_in", [exchange_one, lambda cell, call: exchange([cell], call)], ids=["one", "several"]
)
def test_who_writes_waits_for_who_reads(exchange_in):
    cell, reads, order = ["a"], threading.Event(), []

    def read():
        def call(buffer, _):
            reads.set()
            time.sleep(0.01)
            order.append(buffer)

        call_reading(cell, call, None)

    def write():
        reads.wait()
        patiently(lambda: exchange_in(cell, lambda held: (["b"], order.append("written"))))

    side_by_side(read, write)
    assert order == ["a", "written"]
    assert cell == ["b"]


def test_who_writes_waits_for_a_reader_with_callbacks():
    """As long as no callback waits for anything."""
    cell, reads, order = ["a"], threading.Event(), []

    def read():
        def call(held, seen):
            reads.set()
            time.sleep(0.05)
            order.extend(seen)
            return held, None

        exchange([], call, (seen := [],), [cell], seen, calls_back=True)

    def write():
        reads.wait()
        patiently(lambda: exchange_one(cell, lambda held: (["b"], order.append("written"))))

    side_by_side(read, write)
    assert order == ["a", "written"]


def test_readers_do_not_wait_for_readers():
    cell = ["a"]

    def read(buffer, _):
        return buffer + within_limit(lambda: call_reading(cell, lambda b, _: b, None))

    assert call_reading(cell, read, None) == "aa"


def test_what_its_own_reader_would_write():
    """It would wait for itself: it is told so, and not at once, for another might read."""
    r = refs.new_ref(jnp.zeros(3), name="r")

    def write(buffer, _):
        r[0] = 1

    with pytest.raises(RefStateError, match=r"`r`.*is reading right now, by code that interrupted"):
        call_reading(r._store.cell, write, None)
    assert not r[...].any()


# --- Who waits for whom ---------------------------------------------------------------------------


def test_it_waits_until_a_cell_is_full_again():
    r = refs.new_ref(0)
    taken, may_go_on = threading.Event(), threading.Event()

    def hold():
        def call(held):
            taken.set()
            may_go_on.wait()
            return held, None

        exchange_one(r._store.cell, call)

    def write():
        taken.wait()
        threading.Timer(0.01, may_go_on.set).start()
        r[...] += 1

    side_by_side(hold, write)
    assert int(r[...]) == 1


@pytest.mark.parametrize("calls_back", [False, True])
def test_a_callback_does_not_wait_for_a_call_that_waits_for_it(calls_back):
    r, other = refs.new_ref(0, name="r"), refs.new_ref(0)

    def use():
        return called_back(lambda: r[...])

    def call(held, _):
        if not calls_back:  # Then it ends, whatever others do.
            threading.Timer(0.01, ended.set).start()
        elsewhere.start()
        ended.wait()
        return held, None

    said = []

    def elsewhere_use():
        try:
            said.append(int(use()))
        except RefStateError as error:
            said.append(str(error))
        ended.set()

    ended, elsewhere = threading.Event(), threading.Thread(target=elsewhere_use)
    exchange([r._store.cell, other._store.cell], call, ([],), calls_back=calls_back)
    elsewhere.join()
    assert said == [0] or (calls_back and "updating right now, by a callback" in said[0])


def test_a_callback_may_not_write_what_its_call_reads():
    r = refs.new_ref(0, name="r")

    def call(held, seen):
        assert called_back(lambda: int(r[...])) == 0
        with pytest.raises(
            RefStateError, match=r"`r`.* by a callback, while a call with callbacks"
        ):
            called_back(r.__setitem__, ..., 1)
        return held, None

    exchange([], call, (seen := [],), [r._store.cell], seen, calls_back=True)


# --- What isn't there -----------------------------------------------------------------------------


def test_a_wait_for_a_handle_of_jax():
    native, attempts = jax.new_ref(jnp.zeros(3)), []

    def attempt():
        attempts.append(None)
        if len(attempts) < 3:
            raise Busy
        return "done"

    assert patiently(attempt, [native], [native]) == "done"


def test_a_copy_of_a_value_that_is_lost():
    """Another thread's program may have been given it; here nobody gives it back."""
    r, other = refs.new_ref(jnp.zeros(3), name="r"), refs.new_ref(jnp.ones(3))
    r._store.cell[0].delete()
    with pytest.raises(RefStateError, match=r"`r`.*whose value was lost"):
        replaced([other], [r], lambda state, constants: (state, constants), calls_back=False)
    assert other[0] == 1
