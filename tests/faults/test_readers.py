"""Threads that read what others write: they see whole values, and disturb nobody."""

import sys
import threading

import jax
import numpy as np
import pytest

import refs
from tests.faults.harness import add_one, held, in_child, ref, repeat, side_by_side, times

N = times(300, 10_000)

step = refs.jit(add_one)


def readers():
    sums = refs.jit(lambda a, b: (a[...], b[...]))
    copies = refs.jit(lambda a: a[...] + 0)
    return {
        "getitem": lambda a, b: [a[...], b[:]],
        "get": lambda a, b: [refs.get(a), b.at[...].get()],
        "asarray": lambda a, b: [np.asarray(a), np.array(b)],
        "several": sums,
        "one": lambda a, b: [copies(a), copies(b)],
    }


def write_eagerly(a, b):
    refs.addupdate(a, ..., 1)
    refs.addupdate(b, ..., 1)


@pytest.mark.parametrize("write", [step, write_eagerly], ids=["step", "eager"])
@pytest.mark.parametrize("name", readers())
def test_readers_see_whole_values(name, write):
    a, b = ref("a", (2000,)), ref("b", (2000,))
    read, written = readers()[name], threading.Event()

    def writer():
        try:
            repeat(N, write, a, b)()
        finally:
            written.set()

    def reader():
        seen = [[0], [0]]
        while not written.is_set():
            for values, value in zip(seen, read(a, b), strict=True):
                elements = np.unique(np.asarray(value))
                assert elements.size == 1, f"torn: {elements}"
                values.append(int(elements[0]))
        assert all(values == sorted(values) for values in seen)  # no reader goes back in time

    side_by_side(writer, *[reader] * 3)
    assert held(a) == held(b) == N


class _InLayouts:
    """A trace function: `action` runs before the k-th line where JAX looks at an array's layout.

    That is while it traces: in the call itself a writer would wait.
    """

    def __init__(self, k, action):
        self.k, self.seen, self.action = k, 0, action

    def __call__(self, frame, event, _):
        code = frame.f_code
        is_look = code.co_name == "format" and code.co_filename.endswith("array.py")
        if event == "call" and is_look and "compile_ahead" in _callers(frame):
            return self.line

    def line(self, _, event, __):
        if event == "line":
            self.seen += 1
            if self.seen == self.k:
                self.action()
        return self.line


def _callers(frame):
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


@pytest.mark.parametrize("program", [add_one, lambda r: r[...]], ids=["writes", "reads"])
def test_a_first_call_beside_a_writer(program):
    """JAX asks whether an array is deleted, and then for its layout; a writer comes between."""
    n_written, before = 0, sys.gettrace()
    for k in range(10):
        r = ref("r", (3,))
        tracer = _InLayouts(k, lambda r=r: side_by_side(lambda: step(r)))

        @refs.jit
        def call(r):
            return program(r)

        sys.settrace(tracer)
        try:
            call(r)
        finally:
            sys.settrace(before)
        is_written = 0 < k <= tracer.seen
        assert held(r) == is_written + (program is add_one)
        n_written += is_written
    assert n_written > 1


@pytest.mark.parametrize("used", ["a", "b"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_callback_reads_what_another_thread_is_about_to_write(used, n):
    """The writer waits for a call whose callback waits for a ref that the writer wants."""
    held = ref("a"), ref("b")
    inside, is_written, done = threading.Event(), threading.Event(), []
    read = held["ab".index(used)]

    def host(x):
        inside.set()
        is_written.wait(0.3)  # The writer has time to come.
        done.append(np.asarray(read)[0])
        return np.asarray(x)

    shape = jax.ShapeDtypeStruct((100,), np.int32)
    call = refs.jit(lambda: jax.pure_callback(host, shape, held[0][...]))
    call(), step(*held[:n])
    inside.clear()

    def write():
        inside.wait()
        step(*held[:n])
        is_written.set()

    side_by_side(call, write, limit=30)
    assert [int(r[0]) for r in held] == [2, 2 if n == 2 else 0]
    assert len(done) == 2


def read_beside_steps(n):
    """Runs in a child: what XLA prints is printed by C++ code."""
    written, read = [ref(f"w{k}") for k in range(5)], ref("r")
    total = refs.jit(lambda: sum(r[...].sum() for r in written))
    add = refs.jit(lambda a, b: a.at[...].add(1 + 0 * b[...]))
    done = threading.Event()

    def write():
        repeat(n, step, *written)()
        repeat(n, write_eagerly, *written[:2])()
        repeat(n, step, read)()
        done.set()

    def reader(read_once):
        def run():
            while not done.is_set():
                read_once()

        return run

    read_eagerly = reader(lambda: (written[0][...], read[3]))
    side_by_side(write, reader(total), read_eagerly, reader(lambda: add(written[4], read)))
    return [held(r) for r in (*written[:4], read)]


@pytest.mark.slow
def test_no_reader_loses_a_race():
    """It would try again; but XLA writes an error to stderr each time."""
    n = times(1000, 10_000)
    result, errors = in_child(read_beside_steps, n, and_stderr=True)
    assert result == [2 * n, 2 * n, n, n, n]
    assert "donated" not in errors
