"""A cache whose values are kept for as long as the objects live that they were made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary


class WeakMemo:
    """A dictionary for each sequence of objects, for as long as all of them live.

    Values in the dictionary must not hold the objects, or they are never freed.
    """

    def __init__(self) -> None:
        self._found: dict[Any, Any] = {}
        self._longer: WeakKeyDictionary[Any, WeakMemo] = WeakKeyDictionary()

    def of(self, objects: Sequence[Any]) -> dict[Any, Any]:
        """The dictionary of these objects.

        Raises:
          TypeError: if one of them has no hash or no weak references.
        """
        node = self
        for x in objects:
            node = node._longer.setdefault(x, WeakMemo())
        return node._found
