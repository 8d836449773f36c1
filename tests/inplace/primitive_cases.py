"""Programs of each primitive that the in-place pass names, with the parameters that change it.

They stand in `access_cases` and `structure_cases`. `GROUPS` has lists of programs, each
`(function, array, operands)`. The function takes the array, of which it reads or updates a few
elements, and the operands. The programs of a group are compiled together, so they are many and
small.
"""

import numpy as np
from jax.lax import GatherScatterMode

GROUPS = {}
MODES = [*GatherScatterMode]
SMALL, OTHERS = ["int8", "uint8"], ["int16", "uint16", "int32", "uint32", "int64", "uint64"]


def group(programs):
    GROUPS[programs.__name__] = [*programs()]


def values(*shape, dtype="float32"):
    """Different values, exact in each dtype, and so are a few sums of them."""
    return (np.arange(np.prod(shape)) % 50).astype(dtype).reshape(shape)


def indices(dtype, n, rows=None):
    """Indices on an axis of `n` elements: inside, outside on both sides, and at each edge."""
    limits = np.iinfo(dtype)
    all_of_them = 3, n - 1, n, n + 1, -1, -n, limits.max, limits.min, limits.max - 1, 5, 3
    inside = [np.array(i).astype(dtype) for i in all_of_them if limits.min <= i <= limits.max]
    return np.stack(inside[:rows])


def sizes(dtype):
    """Sizes of axes: as many elements as the dtype has values, one less, and one more."""
    n = int(np.iinfo(dtype).max) + 1
    return [n - 1, n, n + 1, 1000] if n <= 256 else [1000]


INDEX_TYPES = [(t, n) for t in SMALL + OTHERS for n in sizes(t)]
