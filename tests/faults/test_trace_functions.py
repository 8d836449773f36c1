"""Threads under a Python trace function, as a debugger has one: every step counts once.

With it, threads switch between any two lines of Python, or any two instructions, and not only where
functions are called. This one gives the other thread its turn at some of ours, which it draws.
"""

import functools
import random
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs.errors import RefStateError
from tests.faults.harness import Counters, add_one, ref, repeat, side_by_side, times

N = times(40, 1000)  # of each of two threads
OURS = tuple(f"{refs.__path__[0]}/{name}" for name in ("_buffers", "_handles", "_jit", "tree.py"))


class Switching:
    def __init__(self, is_fine, seed):
        self.is_fine, self.draw = is_fine, random.Random(seed).random

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        frame.f_trace_opcodes = self.is_fine
        if event != "call" and self.draw() < (0.02 if self.is_fine else 0.1):
            time.sleep(1e-5)
        return self


def two_threads(is_fine, *programs):
    """What both return."""

    def run(k, program):
        before = sys.gettrace()
        sys.settrace(Switching(is_fine, k))
        try:
            return program()
        finally:
            sys.settrace(before)

    return side_by_side(*(functools.partial(run, k, p) for k, p in enumerate(programs)))


@pytest.fixture(params=[False, True], ids=["lines", "instructions"])
def is_fine(request):
    return request.param


# --- Steps of both --------------------------------------------------------------------------------

compiled = refs.jit(lambda rs: add_one(*rs))
compiled_one = refs.jit(add_one)


def swapped(r):
    """Others may come between the two, but every value that is put in comes out once."""
    r.addupdate(r.swap(jnp.zeros(r.shape, jnp.int32)) + 1)


STEPS = {
    "eager": lambda rs: [r.addupdate(1) for r in rs],
    "at an index": lambda rs: [r.at[...].add(jnp.ones(r.shape, jnp.int32)) for r in rs],
    "swap": lambda rs: [swapped(r) for r in rs],
    "one in a call": lambda rs: [compiled_one(r) for r in rs],
    "several in a call": compiled,
    "a loop": lambda rs: refs.while_loop(is_first, counting(rs), 0),
}


def is_first(k):
    return k < 1


@functools.cache
def counting(rs):
    return lambda k: (add_one(*rs), k + 1)[1]


@pytest.mark.parametrize("packed", [0, 2], ids=["own", "packed"])
@pytest.mark.parametrize("name", STEPS)
def test_no_step_is_lost(name, packed, is_fine):
    counters = Counters([(), (2,), (3,)], packed=packed)
    rs = tuple(counters.refs)
    STEPS[name](rs)
    n = N // 4 if name == "a loop" else N
    step = repeat(n, STEPS[name], rs)
    two_threads(is_fine, step, step)
    counters.agree_on(2 * n + 1)


# --- Other operations beside steps ----------------------------------------------------------------


def lend(r):
    with refs.tree.borrow(r) as x:
        before = np.array(x)
        time.sleep(1e-4)
        np.testing.assert_array_equal(x, before)
    return before


LOOKS = {
    "read": lambda r: r[...],
    "read a part": lambda r: r[3],
    "to NumPy": np.asarray,
    "a tree's": lambda r: refs.tree.get({"r": r})["r"],
    "copied": lambda r: refs.tree.copy(r)[...],
    "compiled": refs.jit(lambda r: r[...]),
    "lent": lend,
    "shown": lambda r: int(repr(r).partition("[")[2].partition(",")[0]),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_is_of_one_moment(name, is_fine):
    r = ref("r")

    def look():
        return [np.unique(LOOKS[name](r)).item() for _ in range(N)]

    look()
    compiled_one(r)
    _, seen = two_threads(is_fine, repeat(N, compiled_one, r), look)
    assert seen == sorted(seen)
    assert int(r[0]) == N + 1


def test_writes_of_the_whole(is_fine):
    """Of two refs, or none, by two threads: each time both are of one thread."""
    rs = [ref("a"), ref("b")]
    refs.tree.set(rs, [0, 0])
    write = [repeat(N, refs.tree.set, rs, [k, k]) for k in (1, 2)]
    two_threads(is_fine, *write)
    assert {int(x) for r in rs for x in np.unique(r)} in ({1}, {2})


def test_conversions(is_fine):
    """A scalar's, while it is counted."""
    n = refs.new_ref(0)

    def convert():
        return [kind(n) for _ in range(N // 4) for kind in (int, float)]

    convert()
    n.addupdate(1)
    _, seen = two_threads(is_fine, repeat(N, n.addupdate, 1), convert)
    assert seen == sorted(seen)
    assert int(n) == N + 1


@pytest.mark.parametrize("step", [compiled_one, lambda r: r.addupdate(1)], ids=["jit", "eager"])
def test_freezing(step, is_fine):
    """What was counted is what the frozen array has."""
    r, done = ref("r", (3,)), 0

    def count():
        nonlocal done
        with pytest.raises(RefStateError, match="frozen"):
            while True:
                step(r)
                done += 1

    def end():
        time.sleep(0.01)
        return refs.freeze(r)

    _, frozen = two_threads(is_fine, count, end)
    np.testing.assert_array_equal(frozen, [done] * 3)
