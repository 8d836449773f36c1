"""The table of inverses: which operations give an operand back, and how.

An entry finds one operand of an equation from its result and the other operands. `alone` marks an
operation that needs only the result: then any number of its operands may be unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from refs import _jax
from refs._reversible.parts import new_version_p
from refs._types import Atom, Aval, Eqn, Primitive, Value


def type_of(v: Atom) -> Aval:
    """The type of a variable or literal of a jaxpr."""
    return v.aval


class Given(NamedTuple):
    """What an inverse is given: the equation, the operand to find, the operands and the results.

    The operand itself is None among `operands`, and so are others that aren't known.
    """

    eqn: Eqn
    place: int
    operands: Sequence[Value]
    results: Sequence[Value]

    @property
    def result(self) -> Value:
        return self.results[0]

    @property
    def other(self) -> Value:
        """The other one of two operands."""
        return self.operands[1 - self.place]

    @property
    def aval(self) -> Aval:
        return type_of(self.eqn.invars[self.place])


class Inverse(NamedTuple):
    """How an operand is found, in which places, and for which types of it.

    Attributes:
      find: gives the operand.
      places: the operands that can be found; None for all.
      alone: whether the results alone give each operand.
      is_exact: whether it gives floats to the bit.
      loses: whether it loses digits where numbers have become small.
      holds: whether it holds for an equation.
    """

    find: Callable[[Given], Value]
    places: tuple[int, ...] | None = None
    alone: bool = False
    is_exact: bool = False
    loses: bool = False
    holds: Callable[[Eqn], bool] = lambda eqn: True


def _is_float(eqn: Eqn) -> bool:
    return bool(jnp.issubdtype(type_of(eqn.outvars[0]).dtype, jnp.inexact))


def _is_by_no_zero(eqn: Eqn) -> bool:
    return _is_float(eqn) and not any(
        isinstance(v, _jax.Literal) and np.any(v.val == 0) for v in eqn.invars
    )


def _is_lossless(eqn: Eqn) -> bool:
    old, new = type_of(eqn.invars[0]).dtype, type_of(eqn.outvars[0]).dtype
    if jnp.issubdtype(old, jnp.complexfloating) or jnp.issubdtype(new, jnp.complexfloating):
        return bool(old == new)
    if jnp.issubdtype(new, jnp.inexact):
        if jnp.issubdtype(old, jnp.inexact):
            a, b = jnp.finfo(old), jnp.finfo(new)
            return a.nmant <= b.nmant and a.maxexp <= b.maxexp and a.minexp >= b.minexp
        return old == np.bool_ or jnp.iinfo(old).bits <= jnp.finfo(new).nmant + 1
    if jnp.issubdtype(old, jnp.inexact) or new == np.bool_:
        return bool(old == new)
    return old == np.bool_ or (
        jnp.iinfo(new).min <= jnp.iinfo(old).min and jnp.iinfo(old).max <= jnp.iinfo(new).max
    )


def _only_adds_axes(eqn: Eqn) -> bool:
    return bool(type_of(eqn.invars[0]).size == type_of(eqn.outvars[0]).size)


def _of_div(g: Given) -> Value:
    return g.result * g.operands[1] if g.place == 0 else g.operands[0] / g.result


def _of_sub(g: Given) -> Value:
    return g.result + g.operands[1] if g.place == 0 else g.operands[0] - g.result


def _of_concatenate(g: Given) -> Value:
    axis = g.eqn.params["dimension"]
    start = sum(type_of(v).shape[axis] for v in g.eqn.invars[: g.place])
    return lax.slice_in_dim(g.result, start, start + g.aval.shape[axis], axis=axis)


def _of_stack(g: Given) -> Value:
    return lax.index_in_dim(g.result, g.place, g.eqn.params["axis"], keepdims=False)


def _of_transpose(g: Given) -> Value:
    back = tuple(int(k) for k in np.argsort(g.eqn.params["permutation"]))
    return lax.transpose(g.result, back)


def _reshaped(g: Given) -> Value:
    return lax.reshape(g.result, g.aval.shape)


def _as_before(g: Given) -> Value:
    return g.result


def _of_scatter_add(g: Given) -> Value:
    _, indices, updates = g.operands
    [found] = _jax.bind_eqn(g.eqn, [g.result, indices, -updates])
    return found


def _converted(g: Given) -> Value:
    return lax.convert_element_type(g.result, g.aval.dtype)


_, NAME = _jax.passing_primitives
_reshard_p, _ = _jax.cast_primitives
# Their result is their operand, perhaps with a name or elsewhere.
SAME = {lax.copy_p, lax.sharding_constraint_p, NAME, _reshard_p}

INVERSES: dict[Primitive, Inverse] = {
    new_version_p: Inverse(_as_before, is_exact=True),
    lax.add_p: Inverse(lambda g: g.result - g.other),
    _jax.add_any_p: Inverse(lambda g: g.result - g.other),
    lax.sub_p: Inverse(_of_sub),
    lax.mul_p: Inverse(lambda g: g.result / g.other, loses=True, holds=_is_by_no_zero),
    lax.div_p: Inverse(_of_div, loses=True, holds=_is_float),
    lax.neg_p: Inverse(lambda g: -g.result, is_exact=True),
    lax.xor_p: Inverse(lambda g: g.result ^ g.other, is_exact=True),
    lax.not_p: Inverse(lambda g: ~g.result, is_exact=True),
    lax.rev_p: Inverse(lambda g: lax.rev(g.result, g.eqn.params["dimensions"]), is_exact=True),
    lax.transpose_p: Inverse(_of_transpose, is_exact=True),
    lax.reshape_p: Inverse(_reshaped, is_exact=True),
    lax.squeeze_p: Inverse(_reshaped, is_exact=True),
    lax.broadcast_in_dim_p: Inverse(_reshaped, places=(0,), is_exact=True, holds=_only_adds_axes),
    lax.concatenate_p: Inverse(_of_concatenate, alone=True, is_exact=True),
    lax.split_p: Inverse(lambda g: jnp.concatenate(g.results, g.eqn.params["axis"]), is_exact=True),
    lax.stack_p: Inverse(_of_stack, alone=True, is_exact=True),
    lax.unstack_p: Inverse(lambda g: jnp.stack(g.results, g.eqn.params["axis"]), is_exact=True),
    lax.optimization_barrier_p: Inverse(lambda g: g.results[g.place], alone=True, is_exact=True),
    **dict.fromkeys(SAME, Inverse(_as_before, is_exact=True)),
    **dict.fromkeys((lax.scatter_add_p, lax.scatter_sub_p), Inverse(_of_scatter_add, places=(0,))),
    lax.convert_element_type_p: Inverse(_converted, is_exact=True, holds=_is_lossless),
}
