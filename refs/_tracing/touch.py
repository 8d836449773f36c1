"""The kinds of access to a ref.

A ref is *held* where all that is done with it is to give it to a function with derivative rules:

    @jax.custom_vjp
    def seen(r, x):  # It doesn't touch `r`; its backward rule stores the cotangent there.
        return x

JAX traces the rules only where it differentiates the function. So whoever discharges a call of
`seen` says what rules may do to such a ref (`held`, an argument in many places): nothing, where
nothing is differentiated; read and write it; or in lanes, which may share it, only read it.
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

    def settled(self, held: Touch) -> Touch:
        """The touches that count: if the ref is held, `held` in the place of `HELD`.

        In lanes, where `held` is READ, that is left out for a ref that is also touched: lanes may
        not both accumulate into a ref that they share and read it.
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
