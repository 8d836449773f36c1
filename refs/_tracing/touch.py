"""The kinds of access to a ref."""

from __future__ import annotations

import enum


class Touch(enum.Flag):
    """What is done to a ref: a set of kinds of access."""

    NONE = 0
    READ = 1
    WRITE = 2
    ACCUMULATE = 4
    MULTIPLY = 8
    MIN = 16
    MAX = 32
    HELD = 64  # only given to a function with derivative rules: the rules may touch the ref

    def settled(self, held: Touch) -> Touch:
        """The touches that count, where `held` is what rules may do to a ref that is only given.

        In lanes `held` is READ. There it is left out if the ref has other touches: a read besides
        them might be refused.
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
        """The method of `ref.at[...]`, if this is an update of one kind, without order; or None."""
        return _METHODS.get(self)

    @property
    def methods(self) -> list[str]:
        """The methods of all updates in this that have no order, as `method` names them."""
        return [name for kind, name in _METHODS.items() if kind & self]


_METHODS = {
    Touch.ACCUMULATE: "add",
    Touch.MULTIPLY: "multiply",
    Touch.MIN: "min",
    Touch.MAX: "max",
}
