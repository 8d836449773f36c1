"""What the tests of faults share: how many, refs that count together, and a limit for deadlocks."""

import faulthandler
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs.errors import RefStateError

ROOT = Path(__file__).resolve().parents[2]
FULL = os.environ.get("REFS_FAULTS") == "full"


def times(few, all_):
    """How often something is tried: `all_` with REFS_FAULTS=full, which takes minutes."""
    return all_ if FULL else few


# --- Refs that count together ---------------------------------------------------------------------


class Counters:
    """Refs of several shapes, each element of which is the number of steps that were made."""

    SHAPES = (), (1,), (3,), (2, 5), (1000,)

    def __init__(self, shapes=SHAPES, value=0, packed=0):
        """`packed`: how many of them, the first ones, share a buffer, with another ref."""
        values = [jnp.full(shape, value, jnp.int32) for shape in shapes]
        self.refs = [
            *refs.pack([*values[:packed], jnp.zeros(2, jnp.int32)])[:packed],
            *(refs.new_ref(x, name=f"r{k}") for k, x in enumerate(values[packed:], packed)),
        ]

    def values(self):
        """What each ref holds: a number, "lost", or "mixed" where elements differ."""
        return [held(r) for r in self.refs]

    def agree_on(self, *allowed):
        """That all hold the same number, one of these; returns it."""
        values = self.values()
        assert len(set(values)) == 1, values
        assert values[0] in allowed, (values, allowed)
        return values[0]


def held(ref):
    """The number that all elements of a ref are: else "lost" or "mixed"."""
    try:
        elements = np.unique(np.asarray(ref))
    except RefStateError:
        return "lost"
    return int(elements[0]) if elements.size == 1 else "mixed"


def add_one(*held):
    """What most steps here do."""
    for r in held:
        r[...] += 1


def ref(name, shape=(100,)):
    return refs.new_ref(jnp.zeros(shape, jnp.int32), name=name)


def repeat(n, program, *args):
    def run():
        for _ in range(n):
            program(*args)

    return run


# --- Deadlocks ------------------------------------------------------------------------------------

LIMIT = 1800 if FULL else 120  # seconds; everything here takes a fraction of it
ONE_CALL = 15


def within_limit(program):
    """`program()` on a thread of its own: if it hangs, this test fails and the others run."""
    (result,) = side_by_side(program, limit=ONE_CALL)
    return result


def side_by_side(*programs, limit=LIMIT):
    """Runs each program on a thread of its own, all at once; their results, or the first error."""
    results, errors = [None] * len(programs), []
    start = threading.Barrier(len(programs))

    def run(k, program):
        try:
            start.wait()
            results[k] = program()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(k, program), daemon=True)
        for k, program in enumerate(programs)
    ]
    # Threads take turns a hundred times as often as they do by default.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(interval / 100)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(limit)
            if thread.is_alive():
                faulthandler.dump_traceback(all_threads=True)
                pytest.fail(f"deadlock: a thread did not end in {limit} s; its stack is on stderr")
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]
    return results


def in_child(function, *args, and_stderr=False):
    """`function(*args)` in a process of its own: its result, which JSON can write.

    Signals' handlers run on the main thread only, and there nobody can give up a deadlock; nor
    does every interrupt leave JAX itself whole. So the process is thrown away.
    """
    program = (
        "import faulthandler, importlib, json\n"
        f"faulthandler.dump_traceback_later({LIMIT}, exit=True)\n"
        f"module = importlib.import_module({function.__module__!r})\n"
        f"result = module.{function.__name__}(*{args!r})\n"
        "print('\\n' + json.dumps(result))\n"
    )
    # Coverage isn't measured there: an interrupt would find its tracer amid its own work.
    unmeasured = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE_PROCESS")}
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", program],
        env=unmeasured,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"rc {done.returncode}\n{done.stderr[-10_000:]}"
    result = json.loads(done.stdout.splitlines()[-1])
    return (result, done.stderr) if and_stderr else result


# --- Errors on purpose ----------------------------------------------------------------------------


class OnPurpose(Exception):
    pass


class Switch:
    """What raises `error`, a class, when it is set, and otherwise does nothing."""

    error = None

    def __call__(self):
        if self.error is not None:
            raise self.error("on purpose")


def fails_for_a_while(counters, step, switch, error, *, works_first):
    """That calls with the switch on raise and change nothing, and that the others work."""
    count = counters.agree_on(counters.values()[0])
    if works_first:
        step()
        count = counters.agree_on(count + 1)
    switch.error = error
    try:
        for _ in range(2):
            with pytest.raises(error, match="on purpose"):
                step()
            counters.agree_on(count)
    finally:
        switch.error = None
    for k in range(2):
        step()
        counters.agree_on(count + k + 1)


def is_caused_by(error, kind):
    """True if an error is of this kind, has one as its cause, or, as JAX's do, quotes one."""
    while error is not None:
        if isinstance(error, kind) or kind.__name__ in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
