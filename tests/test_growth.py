"""What the library does for a program grows as the program does: counted, not timed."""

import sys
from pathlib import Path

import pytest

import refs

pytest.importorskip("rich")
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    import growth

LIBRARY = str(Path(refs.__file__).parent)


def calls(program, n):
    """How often a function of the library is called, or goes on, while a program is lowered."""
    found = 0

    def count(frame, event, arg):
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(LIBRARY)

    lower = growth.lowering(program, "refs", n)
    lower()  # What is remembered from one program to the next isn't counted.
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        lower()
    finally:
        sys.setprofile(before)
    return found


# By the depth the program that is made grows by more each time: calls are put in their places.
GROWS_FASTER = {
    "nested calls, each twice",
    "nested calls without refs, gradient",
    "nested branches, reversible",
    "refs in a branch, reversible",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [p for p in growth.PROGRAMS if p.title not in GROWS_FASTER],
    ids=lambda program: program.title,
)
def test_each_ref_access_or_level_more_costs_the_same(program):
    sizes = (1, 2, 3) if program.sizes[1] <= 10 else (8, 16, 24)
    first, second, third = (calls(program, n) for n in sizes)
    assert third - second <= 1.2 * (second - first)
