"""All programs of the suite, but for those that work on whole buffers (`whole.py`)."""

from branches import BRANCHES
from gradients import DERIVED
from graphs import GRAPHS
from keyed import KEYED
from lists import LISTS
from machines import MACHINES
from programs import FORWARD
from queues import QUEUES
from structures import STRUCTURES
from waves import WAVES

SUITE = [
    *FORWARD,
    *(*STRUCTURES, *LISTS, *QUEUES, *GRAPHS, *KEYED, *MACHINES),
    *BRANCHES,
    *(*WAVES, *DERIVED),
]
