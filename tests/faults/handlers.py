"""Steps during which a handler looks at the refs. Runs in a child."""

import gc
import weakref

import jax.numpy as jnp
import numpy as np

import refs
from refs.errors import RefStateError
from tests.faults.harness import Counters, add_one, held
from tests.faults.interrupted_programs import CALLS, EAGER, made
from tests.faults.interruptions import alarm, at_place, delays, places

# Not first calls: what reads a ref while JAX is tracing becomes a part of the traced program.
NAMES = [*CALLS, *EAGER]

READS = [np.asarray, lambda r: r[...], refs.get, lambda r: r.at[...].get()]
# While JAX's own Python is at work, its functions can't be called by a handler. (It notes what is
# being traced, and takes that note away for a moment.) NumPy's can.
READS_AMID_JAX = [np.asarray, np.array, lambda r: r.__array__(), np.copy]


class Reader:
    """Reads the refs as a handler that writes checkpoints would; counts what came of it."""

    def __init__(self, name, counters):
        amid_jax = name in EAGER or name in ("with_a_callback", "several_types_in_turn")
        self._reads = READS_AMID_JAX if amid_jax else READS
        self._counters = counters
        self.counts = {"read": 0, "busy": 0, "wrong": 0}
        self.steps = held(counters.refs[0])
        self._within = False

    def __call__(self, *_):
        if self._within:  # reading, too, makes garbage
            return
        self._within = True
        try:
            for k, r in enumerate(self._counters.refs):
                self._read(self._reads[(self.steps + k) % len(self._reads)], r)
        finally:
            self._within = False

    def _read(self, read, r):
        try:
            seen = np.unique(np.asarray(read(r))).tolist()
        except RefStateError:
            self.counts["busy"] += 1
            return
        # `steps` is counted after the step has returned.
        good = seen in ([self.steps], [self.steps + 1])
        self.counts["read" if good else "wrong"] += 1


def write_at_every_place_of_a_read(most):
    """A handler adds 1 to a ref while it is read: it does, or says that it can't."""
    outcomes = {}
    for k, read in enumerate(READS):
        r = refs.new_ref(jnp.zeros(3, jnp.int32))
        counts = {"written": 0, "busy": 0}

        def write(r=r, counts=counts):
            try:
                refs.addupdate(r, 0, 1)
            except RefStateError:
                counts["busy"] += 1
            else:
                counts["written"] += 1

        refs.addupdate(r, 0, 0)
        read(r)
        for place in places(lambda read=read, r=r: read(r), most):
            at_place(place, lambda read=read, r=r: read(r), write)
        outcomes[k] = counts | {"held": int(r[0])}
    return outcomes


def finished(counters, reader):
    """What came of the reading, if the refs are as they should be besides."""
    return reader.counts | {"refs": counters.values(), "steps": reader.steps}


def read_by_a_signals_handler(n):
    """For each program: a timer rings `n` times."""
    out = {}
    for name in NAMES:
        counters, step = made(name)
        moments = delays(step, name, n)
        reader = Reader(name, counters)
        with alarm(reader) as handler:
            for delay in moments:
                handler.set(delay)
                while not handler.rang:
                    step()
                    reader.steps += 1
        out[name] = finished(counters, reader)
    return out


def read_at_every_place(most):
    """For each program: the refs are read wherever a handler can run, or at so many places."""
    out = {}
    for name in NAMES:
        counters, step = made(name)
        found = places(step, most)
        reader = Reader(name, counters)
        for place in found:
            at_place(place, step, reader)
            reader.steps += 1
        out[name] = finished(counters, reader)
    return out


def read_by_a_garbage_collector(n, how):
    """For each program `n` steps, with a collection every few objects made."""
    out = {}
    for name in NAMES:
        counters, step = made(name)
        reader = Reader(name, counters)
        with collecting(reader, how):
            for _ in range(n):
                step()
                reader.steps += 1
        out[name] = finished(counters, reader)
    return out


class collecting:
    """Collects garbage all the time; each time, `action` runs."""

    def __init__(self, action, how):
        self._action, self._how = action, how

    def __enter__(self):
        self._threshold = gc.get_threshold()
        gc.callbacks.append(self._callback)
        gc.set_threshold(20)

    def __exit__(self, *_):
        gc.set_threshold(*self._threshold)
        gc.callbacks.remove(self._callback)

    def _callback(self, phase, _):
        if self._how == "gc":
            self._action()
        elif phase == "stop":
            # Garbage for the next collection, which will call us.
            class Node:
                pass

            node = Node()
            node.itself = node
            self._watched = weakref.ref(node, self._action)


def written_by_a_signals_handler(n):
    """The handler adds to the refs: by a step of its own, or eagerly."""
    counters = Counters([(3,)] * 3)
    a, b, c = counters.refs
    added = dict.fromkeys("abc", 0)

    step = refs.jit(lambda: add_one(*counters.refs))
    other = refs.jit(add_one)

    def write(*_):
        for names, program in {
            "a": lambda: refs.addupdate(a, ..., 1),
            "b": lambda: b.at[...].add(1),
            "bc": lambda: other(b, c),
        }.items():
            try:
                program()
            except RefStateError:
                continue
            for name in names:
                added[name] += 1

    write()
    step()
    steps, moments = 11, delays(step, "write", n)
    with alarm(write) as handler:
        for delay in moments:
            handler.set(delay)
            while not handler.rang:
                step()
                steps += 1
    return {"refs": counters.values(), "expected": [steps + k for k in added.values()]}
