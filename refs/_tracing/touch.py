"""What is done to a ref."""

from __future__ import annotations

import enum


class Touch(enum.Flag):
    """What is done to a ref."""

    NONE = 0
    READ = 1
    WRITE = 2
    ACCUMULATE = 4
    MULTIPLY = 8
    MIN = 16
    MAX = 32
    HELD = 64  # only given to a function with derivative rules: those may touch it

    def settled(self, held: Touch) -> Touch:
        """What counts of it, where `held` is what rules may do to a ref that is only given.

        Where that is to read it, among lanes, it may be too much besides what else is done.
        """
        rest = self & ~Touch.HELD
        if rest == self or (held == Touch.READ and rest):
            return rest
        return rest | held

    @property
    def changes(self) -> bool:
        return bool(self & ~(Touch.READ | Touch.HELD))

    @property
    def method(self) -> str | None:
        """What is done to it, as a method of `ref.at[...]`, if that is all and has no order."""
        return _METHODS.get(self)

    @property
    def methods(self) -> list[str]:
        """All updates of the kind that `method` names."""
        return [name for kind, name in _METHODS.items() if kind & self]


_METHODS = {
    Touch.ACCUMULATE: "add",
    Touch.MULTIPLY: "multiply",
    Touch.MIN: "min",
    Touch.MAX: "max",
}
