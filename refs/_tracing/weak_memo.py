"""What is kept for as long as the objects live that it was made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary


class WeakMemo:
    """A dictionary for each sequence of objects, while all of them live.

    What is put into one must not hold the objects, or it stays.
    """

    def __init__(self) -> None:
        self._found: dict[Any, Any] = {}
        self._longer: WeakKeyDictionary[Any, WeakMemo] = WeakKeyDictionary()

    def of(self, objects: Sequence[Any]) -> dict[Any, Any]:
        """That of these objects. Raises TypeError if one has no hash or no weak references."""
        node = self
        for x in objects:
            node = node._longer.setdefault(x, WeakMemo())
        return node._found
