"""The operands of equations, variables and literals: their types, and what is known of them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
from jax import lax

from refs import _jax
from refs._types import Atom, Aval, Eqn

_Literal = _jax.Literal


def is_var(atom: Atom) -> bool:
    return type(atom) is not _Literal


def shape(atom: Atom) -> tuple[int, ...]:
    aval: Aval = atom.aval
    return aval.shape


def size(atom: Atom) -> int:
    """How many elements an array has; 0 for anything else, and if the shape is symbolic."""
    n = 1
    for d in getattr(atom.aval, "shape", (0,)):
        if not isinstance(d, int):  # a dimension of a shape-polymorphic export
            return 0
        n *= d
    return n


def type_of(atom: Atom) -> Hashable:
    """The shape and dtype of an array."""
    aval: Aval = atom.aval
    return aval.shape, aval.dtype


def is_like(atom: Atom, other: Atom) -> bool:
    """Whether two arrays have the same shape and dtype, so that one can lie where the other is."""
    return type_of(atom) == type_of(other)


def is_same(atom: Atom, other: Atom) -> bool:
    """Whether two atoms are one variable, or equal constants."""
    if is_var(atom) or is_var(other):
        return atom is other
    return literal(atom) == literal(other)


def literal(atom: Atom) -> Hashable:
    """What is equal for equal constants, numbers or arrays."""
    return str(atom.aval), np.asarray(atom.val).tobytes()  # pyright: ignore


def number(atom: Any) -> int | None:
    """The number that a constant scalar is; None for anything else."""
    return None if not isinstance(atom, _Literal) or np.ndim(atom.val) else int(atom.val)


def is_zeros(atom: Atom, maker: Eqn | None) -> bool:
    """Whether an array, made by the equation `maker`, is a constant zero, or consists of it."""
    if maker is not None:
        return maker.primitive is lax.broadcast_in_dim_p and is_literal_zero(maker.invars[0])
    return is_literal_zero(atom)


def is_literal_zero(atom: Atom) -> bool:
    return not is_var(atom) and not atom.aval.shape and _jax.is_zero_literal(atom)


def can_pass(atom: Atom) -> bool:
    """Whether a conditional can return zeros instead of an array: not if it is a PRNG key."""
    return isinstance(getattr(atom.aval, "dtype", None), np.dtype)
