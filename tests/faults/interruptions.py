"""Two ways to interrupt a call as Ctrl-C does: by a timer, and at each place in turn.

A signal's handler runs between two instructions of the main thread, but not between any two:
CPython looks for signals when a function begins, when a loop turns, and when a call into C returns.
A timer meets some of these places, and the long-running C code, at random. `at_place` acts at a
chosen one, so that a test can go through all of them: those in this library and
some in JAX, or with REFS_FAULTS=full all.
"""

import dis
import functools
import random
import signal
import sys
import time
from contextlib import contextmanager

from jax.extend.core import set_current_trace, take_current_trace

import refs
from tests.faults.harness import FULL, is_caused_by

OURS = refs.__path__[0]
JAXS = "/pjit.py", "/pxla.py"  # where JAX runs a program that it has just compiled


class Alarm:
    """The handler of SIGALRM while a test runs: raises KeyboardInterrupt, once each time set."""

    def __init__(self, action):
        self._action, self._set, self.rang = action, False, False

    def __call__(self, *_):
        if self._set:
            self._set, self.rang = False, True
            self._action()

    def expect(self):
        self._set, self.rang = True, False

    def set(self, delay):
        self.expect()
        signal.setitimer(signal.ITIMER_REAL, max(delay, 1e-6))

    def unset(self):
        self._set = False
        signal.setitimer(signal.ITIMER_REAL, 0)


def interrupt():
    raise KeyboardInterrupt


@contextmanager
def alarm(action=interrupt):
    handler = Alarm(action)
    before, hook = signal.signal(signal.SIGALRM, handler), sys.unraisablehook
    # An interrupt that falls into a finalizer is only reported, and pytest makes that an error.
    sys.unraisablehook = lambda u: None if u.exc_type is KeyboardInterrupt else hook(u)
    try:
        yield handler
    finally:
        handler.unset()
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook


def interrupted(step, handler, delay):
    """Repeats `step` until the alarm, `delay` seconds away, has rung; how often it returned."""
    returned = 0

    # Not in the `try` itself: CPython 3.13 leaves the jump back of a `while` out of it.
    def until_it_rang():
        nonlocal returned
        while not handler.rang:
            step()
            returned += 1

    try:
        handler.set(delay)
        until_it_rang()
    except BaseException as error:
        # A callback's interrupt comes out as an error of JAX's that quotes it.
        if not is_caused_by(error, KeyboardInterrupt):
            raise
    finally:
        handler.unset()
    return returned


def delays(step, seed, n):
    """`n` random delays, up to what two calls of `step` take."""
    start = time.perf_counter()
    for _ in range(10):
        step()
    longest = 2 * (time.perf_counter() - start) / 10
    generator = random.Random(seed)
    return [generator.uniform(0, longest) for _ in range(n)]


# --- JAX's own state ------------------------------------------------------------------------------

with take_current_trace() as TOP:  # this module isn't imported inside of a trace
    pass


def mend_jax():
    """Puts JAX's note of what is being traced back to nothing; True if that was amiss.

    An interrupt in the few lines of JAX that change the note leaves it wrong for ever after, with
    refs and without. They run when JAX traces, and when it runs a program op by op.
    """
    with take_current_trace() as now:
        amiss = now is not TOP
    if amiss:
        set_current_trace(TOP).__enter__()  # never left: what it would go back to is wrong
    return amiss


# --- At each place --------------------------------------------------------------------------------


def at_place(k, step, action=interrupt):
    """Runs `step`, and `action` at the k-th place; how many places it came by."""
    tracer = _Tracer(k, action)
    hook = sys.unraisablehook
    sys.unraisablehook = lambda u: None if u.exc_type is KeyboardInterrupt else hook(u)
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        step()
    except BaseException as error:
        if not is_caused_by(error, KeyboardInterrupt):
            raise
    finally:
        sys.settrace(before)
        sys.unraisablehook = hook
    return tracer.seen


def places(step, most, last=None):
    """The numbers of `most` places of `step`, evenly spread; only of its `last` ones, if given."""
    at_place(-1, step)  # CPython 3.12 shows no instructions to the first trace function.
    n = at_place(-1, step)
    first = 0 if last is None else max(n - last, 0)
    return range(first, n, -(-(n - first) // most))


class _Tracer:
    """A trace function that counts the places, and acts at one."""

    def __init__(self, place, action):
        self._place, self._action, self.seen = place, action, 0

    def __call__(self, frame, event, _):
        if event != "call":
            return None
        # A call of Python by Python is no call into C: nothing looks for signals when it returns.
        # (If C stood between the two, we miss a place; the timer doesn't.)
        if frame.f_back is not None and isinstance(frame.f_back.f_trace, _Frame):
            frame.f_back.f_trace.looks = False
        file = frame.f_code.co_filename
        if not (FULL or file.startswith(OURS) or file.endswith(JAXS)):
            return None
        frame.f_trace_opcodes = True
        return _Frame(self)

    def reach(self):
        self.seen += 1
        if self.seen - 1 == self._place:
            self._action()


class _Frame:
    """Follows one frame: a place comes after an instruction that looks for signals."""

    def __init__(self, tracer):
        self._tracer, self.looks = tracer, True  # as a function does when it begins

    def __call__(self, frame, event, _):
        if event == "opcode":
            looked, self.looks = self.looks, frame.f_lasti in _lookouts(frame.f_code)
            if looked:
                self._tracer.reach()
        return self


# The instructions after which CPython looks for signals. `test_places.py` asks the interpreter.
LOOKOUTS = [
    name
    for name in dis.opmap
    if name in ("RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX")
    # In 3.11 a loop's condition jumps back, too.
    or (name.removeprefix("POP_").startswith("JUMP_BACKWARD") and "NO_INTERRUPT" not in name)
]


@functools.cache
def _lookouts(code):
    """Offsets of the instructions after which CPython looks for signals."""
    return frozenset(i.offset for i in dis.get_instructions(code) if i.opname in LOOKOUTS)
