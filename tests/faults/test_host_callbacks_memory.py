"""Callbacks over refs that keep what they are given, or touch it otherwise, and threads of them."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs.errors import CallbackError, RefEscapeError, RefStateError
from tests.faults.harness import OnPurpose, held, side_by_side, times, within_limit
from tests.faults.places import LARGE, PLACES, at_top, in_a_gradient, in_a_loop, in_jit, ref, steps

places = pytest.mark.parametrize("place", PLACES, ids=lambda f: f.__name__)


# --- Callbacks that keep what they are given ------------------------------------------------------

KEPT = {
    "itself": lambda x: x,
    "a view": lambda x: x[1:],
    "an iterator": iter,
    "a memoryview": memoryview,
    "another type": lambda x: x.view(np.uint8),
    "in a closure": lambda x: lambda: x,
    "in a cycle": lambda x: (cycle := [x], cycle.append(cycle), cycle)[-1],
}
escapes = pytest.mark.parametrize("kept", KEPT)


@pytest.mark.parametrize("place", PLACES[:4], ids=lambda f: f.__name__)
@escapes
def test_what_escapes_is_named(kept, place):
    r, keep = ref(), []

    def callback(x, y):
        keep.append(KEPT[kept](x))

    step = place(lambda r: refs.io_callback(callback, None, r, 1))
    with pytest.raises(
        RefEscapeError, match=r"`callback` at .* keeps .* ref `r` .*`array\.copy\(\)`"
    ):
        step(r)
    keep.clear()
    assert held(r) == 0


@pytest.mark.parametrize("place", [in_jit, in_a_loop], ids=lambda f: f.__name__)
def test_an_operand_that_escapes(place):
    r, keep = ref(), []
    step = place(lambda r, x: refs.io_callback(lambda r, x: keep.append(x), None, r, x + 1))
    with pytest.raises(RefEscapeError, match="keeps the memory of an argument"):
        step(r, jnp.ones(4))


@places
def test_garbage_does_not_count(place):
    r = ref()

    def callback(x):
        cycle = [x]
        cycle.append(cycle)
        x += 1

    place(lambda r: refs.io_callback(callback, None, r))(r)
    assert held(r) == steps(place)


@pytest.mark.parametrize("place", PLACES[:4], ids=lambda f: f.__name__)
def test_copies_and_results_may_be_kept(place):
    r, keep = ref(), []

    def callback(x, copied):
        keep.extend((x.copy(), copied, x.sum()))
        x += 1

    step = place(lambda r: refs.io_callback(callback, None, r, r.at[np.array([0, 1])]))
    for _ in range(2):
        step(r)
    assert len(keep) == 6 * steps(place)


# --- Callbacks that touch the ref that they were given --------------------------------------------

TOUCHES = {
    "read": lambda r: r[...],
    "np.asarray": np.asarray,
    "write": lambda r: r.__setitem__(..., 1),
    "swap": lambda r: refs.swap(r, ..., r[...]),
    "step": refs.jit(lambda r: r.at[...].add(1)),
    "callback": lambda r: refs.io_callback(lambda x: None, None, r),
    "view": lambda r: refs.io_callback(lambda x: None, None, r.at[0]),
    "free": refs.free_ref,
    "freeze": refs.freeze,
}


@pytest.mark.parametrize("place", [*PLACES[:4], in_a_gradient], ids=lambda f: f.__name__)
@pytest.mark.parametrize("touch", TOUCHES)
def test_touching_the_given_ref_is_refused(touch, place):
    r, host = ref(), []

    def callback(x):
        x += 1
        if host:
            TOUCHES[touch](r)

    step = place(lambda r: refs.io_callback(callback, None, r))
    step(r)
    host.append(True)
    with pytest.raises(RefStateError, match=r"ref `r` .* by a callback"):
        within_limit(lambda: step(r))
    assert held(r) == steps(place)
    host.clear()
    step(r)
    assert held(r) == 2 * steps(place)


# --- Threads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("place", [at_top, in_jit, in_a_loop], ids=lambda f: f.__name__)
def test_threads_with_shared_refs(place, ordered):
    """Each call of each thread counts, in every ref, whatever they were given together."""
    a, b, c = ref("a"), ref("b", 50_000), ref("c")
    rounds, threads = times(20, 300), 8

    def both(x, y):
        x += 1
        y += 1

    def one(y):
        y += 1

    step = place(lambda: refs.io_callback(both, None, a, b, ordered=ordered))
    other = place(lambda: (refs.io_callback(one, None, c, ordered=ordered), None)[1])
    mine = [ref(f"own{k}") for k in range(threads)]

    def program(k):
        def run():
            for _ in range(rounds):
                step()
                other()
                refs.io_callback(one, None, mine[k])

        return run

    side_by_side(*map(program, range(threads)))
    count = rounds * threads * steps(place)
    assert (held(a), held(b), held(c)) == (count, count, count)
    assert [held(r) for r in mine] == [rounds] * threads


def test_threads_some_of_whose_calls_fail():
    r = ref()
    failed, lock = [], threading.Lock()

    def callback(x, k):
        x += 1
        if k % 3 == 0:
            raise OnPurpose(str(int(k)))

    step = refs.jit(lambda k: refs.io_callback(callback, None, r, k))

    def program():
        for k in range(times(6, 300)):
            try:
                step(k)
            except CallbackError as error:
                with lock:
                    failed.append(str(error.__cause__) == str(k))

    side_by_side(*[program] * 8)
    n = times(6, 300)
    assert failed == [True] * (8 * len(range(0, n, 3)))
    assert held(r) == 8 * (n - len(range(0, n, 3)))


def test_a_reader_on_another_thread_waits():
    r, started, seen = ref(n=LARGE), threading.Event(), []

    def callback(x):
        x += 1
        started.set()
        for _ in range(50):
            x += 1
        x[...] = 7

    reader = threading.Thread(target=lambda: (started.wait(), seen.append(held(r))))
    reader.start()
    refs.io_callback(callback, None, r)
    reader.join(60)
    assert seen == [7]
