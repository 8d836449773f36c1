"""Interrupts programs, many times, and counts what became of their refs. Runs in a child."""

import signal

from tests.faults.harness import held
from tests.faults.interrupted_programs import made
from tests.faults.interruptions import (
    alarm,
    at_place,
    delays,
    interrupt,
    interrupted,
    mend_jax,
    places,
)


class Tally:
    """What became of the refs of one program, over many interrupts."""

    def __init__(self, name):
        self._name = name
        self.counts = dict.fromkeys(("interrupts", "lost", "torn", "miscounted", "stuck"), 0)
        self.renew()

    def renew(self):
        self.counters, self.step = made(self._name)
        self._count = held(self.counters.refs[0])

    def check(self, returned=0):
        """Looks at the refs after an interrupt, before which the step had returned so often."""
        self.counts["interrupts"] += 1
        mend_jax()
        values = self.counters.values()
        if "lost" in values:
            fault = "lost"
        elif "mixed" in values or len(set(values)) > 1:
            fault = "torn"
        elif values[0] - self._count - returned not in (0, 1):
            fault = "miscounted"
        else:
            self.step()
            self._count = values[0] + 1
            if self.counters.values() == [self._count] * len(values):
                return
            fault = "stuck"
        self.counts[fault] += 1
        self.renew()


def at_random_moments(names, n):
    """Interrupts each program `n` times by a timer; what became of its refs."""
    tallies = {}
    with alarm() as handler:
        for name in names:
            tally = Tally(name)
            moments = delays(tally.step, name, n)
            tally.renew()
            for delay in moments:
                tally.check(interrupted(tally.step, handler, delay))
            tallies[name] = tally.counts
    return tallies


def at_every_place(names, most, last=None, action=interrupt):
    """Interrupts each program at each of its places, or at so many: see `places`."""
    tallies = {}
    for name in names:
        tally = Tally(name)
        found = places(tally.step, most, last)
        tally.renew()
        for place in found:
            at_place(place, tally.step, action)
            tally.check()
        tallies[name] = tally.counts
    return tallies


def by_signals(names, most, last=None):
    """Like `at_every_place`, and by signals, which a first run makes wait."""
    with alarm() as handler:

        def ring():
            handler.expect()
            signal.raise_signal(signal.SIGALRM)

        return at_every_place(names, most, last, ring)
