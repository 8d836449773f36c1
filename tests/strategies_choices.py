"""Where a random program's decisions come from: one string of random bytes.

Drawing each decision from Hypothesis would be the usual way. But most of what Hypothesis then
generates are variations of one program, in which parts are copies of others, and running a program
is too slow for that. From bytes, each program is a new one. A failure shrinks all the same: it
deletes bytes and lowers them.
"""

from hypothesis import strategies as st

SIZES = range(1500, 1515)  # more than most programs take
# Nearly always enough of them; but any number, so that a failure can do with few.
BYTES = st.one_of(
    st.binary(max_size=max(SIZES)), *[st.binary(min_size=n, max_size=n) for n in SIZES]
)


class Choices:
    """Decisions. The first option is the simplest one, and what is chosen when no byte is left."""

    def __init__(self, data: bytes):
        self.data = iter(data)

    def upto(self, n):
        return next(self.data, 0) % (n + 1)

    def between(self, low, high):
        return low + self.upto(high - low)

    def choose(self, options):
        return options[self.upto(len(options) - 1)]

    def maybe(self, one_in=2):
        return self.upto(one_in - 1) == one_in - 1

    def several(self, least, most):
        """Counts to a number between these, deciding each time: so that a failure can leave out
        the bytes of a part without touching those of the others."""
        for i in range(most):
            if i >= least and self.upto(4) == 0:
                break
            yield i

    def shuffled(self, options):
        options = list(options)
        return [options.pop(self.upto(len(options) - 1)) for _ in range(len(options))]
