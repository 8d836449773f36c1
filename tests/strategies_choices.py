"""Where a random program's decisions come from: a seed, and Python's `random`.

Drawing each decision from Hypothesis would be the usual way. But most of what Hypothesis then
generates are variations of one program, in which parts are copies of others, and running a program
is too slow for that. It couldn't shrink well either: it doesn't know what a program is, and
`tests/laws/shrinking.py` does.
"""

from random import Random


class Choices:
    """Decisions of a random program."""

    def __init__(self, seed: int):
        self.random = Random(seed)

    def upto(self, n):
        return self.random.randint(0, n)

    def between(self, low, high):
        return self.random.randint(low, high)

    def choose(self, options):
        return self.random.choice(options)

    def maybe(self, one_in=2):
        return self.random.randrange(one_in) == 0

    def shuffled(self, options):
        return self.random.sample(options, len(options))
