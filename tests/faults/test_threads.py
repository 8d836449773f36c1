"""Several threads on the same refs: every step counts once."""

import functools
import itertools
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs._buffers.waiting import current_buffer
from refs.errors import RefStateError
from tests.faults.harness import (
    LIMIT,
    Counters,
    add_one,
    held,
    is_caused_by,
    ref,
    repeat,
    side_by_side,
    times,
)

THREADS = 8
N = times(300, 10_000)
FEW = times(100, 10_000)  # of what takes longer


step = refs.jit(add_one)


# --- Steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_call_is_before", [True, False])
def test_steps_of_the_same_refs(first_call_is_before):
    counters = Counters()

    @refs.jit
    def step(first, rest, x):
        for r in (first, *rest):
            r[...] += x
        return first[...]

    first, *rest = counters.refs
    if first_call_is_before:
        step(first, rest, 0)

    def thread():
        return [int(step(first, rest, 1)) for _ in range(N)]

    results = side_by_side(*[thread] * THREADS)
    counters.agree_on(THREADS * N)
    # Each result is of the step that returned it, so no two are alike.
    assert sorted(itertools.chain(*results)) == list(range(1, THREADS * N + 1))


def test_steps_of_refs_closed_over():
    counters = Counters()

    step = refs.jit(lambda: add_one(*counters.refs))
    side_by_side(*[repeat(N, step)] * THREADS)
    counters.agree_on(THREADS * N)


def test_first_calls_at_once_leave_one_program():
    """Each thread makes one, as it finds none; later calls are as fast as if one had."""
    counters, traced, barrier = Counters(), [], threading.Barrier(THREADS)

    @refs.jit
    def step():
        traced.append(1)
        barrier.wait(LIMIT)
        add_one(*counters.refs)

    side_by_side(*[step] * THREADS)
    counters.agree_on(THREADS)
    [_] = step.lower.args[1].__self__.table.programs()
    assert len(traced) == THREADS


def test_steps_of_overlapping_refs():
    a, b, c = (ref(name) for name in "abc")
    # In every order: threads that wait for each other would deadlock.
    groups = (a, b), (b, c), (a, b, c), (c, b, a), (b, a), (c, a), (c, b), (b,)
    side_by_side(*[repeat(N, step, *group) for group in groups])
    assert [held(r) for r in (a, b, c)] == [5 * N, 7 * N, 5 * N]


def test_a_step_while_the_buffers_of_another_go():
    """An array that goes lets other threads run: here when a call has got new ones for them."""
    a, b = ref("a"), ref("b")
    step(a, b)
    others = []

    def meanwhile():
        others.append(threading.Thread(target=step, args=(a, b)))
        others[-1].start()
        time.sleep(0.01)

    weakref.finalize(current_buffer(a), meanwhile).atexit = False
    step(a, b)
    [other] = others
    other.join()
    assert [held(r) for r in (a, b)] == [3, 3]


def test_steps_of_two_functions_over_one_ref():
    a = ref("a")
    other = refs.jit(lambda: a.at[...].add(2))
    side_by_side(*[repeat(N, step, a), repeat(N, other)] * (THREADS // 2))
    assert held(a) == 3 * N * THREADS // 2


def test_steps_of_each_threads_own_ref():
    own = [ref(f"own{k}") for k in range(THREADS)]
    side_by_side(*[repeat(N, step, r) for r in own])
    assert [held(r) for r in own] == [N] * THREADS


def _scan(add):
    refs.scan(lambda _, x: (None, add(x)), None, jnp.zeros(3))


@pytest.mark.parametrize(
    "adds, program",
    [
        (3, _scan),
        (2, lambda add: refs.vmap(add)(jnp.zeros(2))),
        (1, lambda add: refs.cond(True, add, add, 0.0)),
        (1, lambda add: refs.grad(add)(0.0)),
        (1, lambda add: refs.jacrev(add)(0.0)),
        (1, lambda add: refs.vjp(add, 0.0)),
        (1, lambda add: refs.jvp(add, (0.0,), (1.0,))),
        (1, lambda add: refs.linearize(add, 0.0)),
        (1, lambda add: refs.checkpoint(add)(0.0)),
    ],
    ids=["scan", "vmap", "cond", "grad", "jacrev", "vjp", "jvp", "linearize", "checkpoint"],
)
def test_transformations_at_top_level(adds, program):
    """Outside of `refs.jit` each is one operation as well, also beside other kinds of them."""
    a, b = ref("a"), ref("b", (3,))

    def add(x):
        a.at[...].add(1)
        b.at[...].add(1)
        return x

    n = times(10, 300)
    side_by_side(*[repeat(n, program, add)] * 3, repeat(n, step, a), repeat(n, step, b, a))
    assert (held(a), held(b)) == (3 * n * adds + 2 * n, 3 * n * adds + n)


def test_two_names_for_one_ref():
    a = ref("a")
    side_by_side(*[repeat(N, step, a, a)] * THREADS)
    assert held(a) == 2 * N * THREADS


# --- Eager operations -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "add",
    [
        lambda r: refs.addupdate(r, ..., 1),
        lambda r: r.at[...].add(1),
        lambda r: r.at[...].at[...].add(1),
        lambda r: [r.at[k].add(1) for k in (0, slice(1, None))],
    ],
    ids=["addupdate", "view", "nested view", "parts"],
)
def test_eager_additions(add):
    a = ref("a", (3,))
    side_by_side(*[repeat(FEW, add, a)] * THREADS)
    assert held(a) == FEW * THREADS


def test_eager_additions_beside_steps():
    a, b = ref("a"), ref("b")
    add = repeat(FEW, lambda: refs.addupdate(a, ..., 1))
    side_by_side(*[repeat(FEW, step, a, b), add] * (THREADS // 2))
    assert (held(a), held(b)) == (FEW * THREADS, FEW * THREADS // 2)


def test_each_value_swapped_in_is_swapped_out_once():
    a = ref("a", ())

    def thread(k):
        return lambda: [int(refs.swap(a, ..., 1 + k * N + i)) for i in range(N)]

    out = side_by_side(*[thread(k) for k in range(THREADS)])
    assert sorted([*itertools.chain(*out), held(a)]) == list(range(THREADS * N + 1))


def test_writes_of_the_whole():
    """Which of the values stays isn't defined; it is one of them."""
    a = ref("a")

    def thread(k):
        return repeat(N, lambda: a.__setitem__(..., jnp.full(100, k)))

    side_by_side(*[thread(k) for k in range(1, THREADS + 1)])
    assert held(a) in range(1, THREADS + 1)


# --- Refs that come and go ------------------------------------------------------------------------


def test_refs_made_and_dropped_meanwhile():
    a = ref("a")

    def thread():
        for _ in range(FEW):
            mine = ref("mine")
            step(mine, a)
            assert held(mine) == 1

    side_by_side(*[thread] * THREADS)
    assert held(a) == FEW * THREADS


def test_a_ref_that_is_frozen_meanwhile():
    a, begun, ended = ref("a"), threading.Semaphore(0), threading.Event()

    def steps():
        for k in itertools.count():
            too_late = ended.is_set()
            try:
                step(a)
            except RefStateError as error:
                return k, str(error)
            assert not too_late, "a step of a frozen ref"
            begun.release()

    def freeze():
        try:
            for _ in range(100):
                assert begun.acquire(timeout=LIMIT / 4)
            return refs.freeze(a)
        finally:
            ended.set()

    *ends, value = side_by_side(*[steps] * 3, freeze)
    counts, messages = zip(*ends, strict=True)
    assert all("which was frozen" in message for message in messages)
    assert np.unique(np.asarray(value)).tolist() == [sum(counts)]


# --- Programs that can fail -----------------------------------------------------------------------


def callback_step(fails=lambda: None):
    def host(x):
        fails()
        return np.asarray(x) + 1

    @refs.jit
    def step(*held):
        for r in held:
            r[...] = jax.pure_callback(host, jax.ShapeDtypeStruct(r.shape, r.dtype), r[...])

    return step


def test_callbacks_of_each_threads_own_ref():
    own, step = [ref(f"own{k}", (3,)) for k in range(THREADS)], callback_step()
    n = times(50, 1000)
    side_by_side(*[repeat(n, step, r) for r in own])
    assert [held(r) for r in own] == [n] * THREADS


def counted(n, program, *args):
    """Calls it n times; how often it went through. It may find a ref busy, and no other fault."""

    def run():
        done = 0
        for _ in range(n):
            try:
                program(*args)
                done += 1
            except Exception as error:
                if not is_caused_by(error, RefStateError):
                    raise
        return done

    return run


def test_callbacks_of_a_shared_ref():
    """Whether another thread waits or is told that the ref is busy: what was done counts."""
    a, n = ref("a", (3,)), times(50, 1000)
    slow = counted(n, callback_step(), a)
    quick = counted(n, step, a)
    done = side_by_side(*[slow, quick] * (THREADS // 2))
    assert held(a) == sum(done)


def test_callbacks_that_want_each_others_ref():
    a, b, n = ref("a", (3,)), ref("b", (3,)), times(20, 300)
    from_a = callback_step(lambda: refs.addupdate(b, ..., 1000))
    from_b = callback_step(lambda: refs.addupdate(a, ..., 1000))
    done = side_by_side(counted(n, from_a, a), counted(n, from_b, b))
    # What a callback did stays done, even where the call around it failed afterwards.
    assert [held(a) % 1000, held(b) % 1000] == done


def test_a_reader_beside_a_thread_that_always_writes():
    """It gets its turn when cells are full, though XLA gives the lock away when they are not."""
    a = ref("a")
    step(a, ref("b"))
    stop = threading.Event()

    def read():
        try:
            for _ in range(10):
                np.asarray(a)
        finally:
            stop.set()

    def write():
        b = ref("b")
        while not stop.is_set():
            step(a, b)

    side_by_side(read, write)


def test_forms_and_structures_that_are_new_in_the_middle():
    """While a thread adds programs, others call: each finds its own, or makes it."""
    step = refs.jit(lambda state, n: [r.addupdate(n) for r in jax.tree.leaves(state)] and None)
    r = refs.new_ref(0)
    made = [lambda: [r], lambda: (r,), lambda: {"r": r}, lambda: {"r": [r, r]}, lambda: r]

    def calls(k):
        for n in range(N):
            step(made[(k + n) % len(made)](), 1)

    side_by_side(*[functools.partial(calls, k) for k in range(THREADS)])
    twice = sum((k + n) % len(made) == 3 for k in range(THREADS) for n in range(N))
    assert int(r) == THREADS * N + twice
