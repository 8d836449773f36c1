"""The kinds of access to a ref.

A ref is *held* where all that is done with it is to give it to a function with derivative rules:

    @jax.custom_vjp
    def seen(r, x):  # It doesn't touch `r`; its backward rule stores the cotangent there.
        return x

JAX traces the rules only where it differentiates the function. So whoever discharges a call of
`seen` says what rules may do to such a ref (`Rules`).
"""

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
    HELD = 64  # see the module

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


class Rules(enum.Enum):
    """What derivative rules may do to a ref that is held."""

    NEVER_RUN = Touch.NONE  # nothing is differentiated
    MAY_READ = Touch.READ  # in lanes, which may share the ref
    MAY_WRITE = Touch.READ | Touch.WRITE

    def settle(self, kind: Touch) -> Touch:
        """The touches that count: `kind` with what rules may do in the place of `HELD`.

        In lanes rules needn't read a ref that is also touched: lanes may not both accumulate into a
        ref that they share and read it.
        """
        rest = kind & ~Touch.HELD
        if rest == kind or (self is Rules.MAY_READ and rest):
            return rest
        return rest | self.value


_METHODS = {
    Touch.ACCUMULATE: "add",
    Touch.MULTIPLY: "multiply",
    Touch.MIN: "min",
    Touch.MAX: "max",
}
