"""What is picked from the leaves of a call, and the error if it isn't what a program is for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any


class RefsDiffer(Exception):
    """A call's refs are of other types than a program's, or have other aliases.

    An alias is a ref that is passed twice, or that the function also closes over; or refs are of
    the same pack.
    """


def picker(places: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """A function that picks the items at these positions of a list, as a list or a tuple."""
    places = list(places)
    if not places:
        return lambda flat: ()
    if places == list(range(places[0], places[-1] + 1)):
        return itemgetter(slice(places[0], places[-1] + 1))
    return itemgetter(*places)
