"""Fences: they make XLA compute some values before an update, and the update after these values.

XLA duplicates cheap operations into whatever uses them. A read that is repeated after the buffer's
update keeps the old buffer alive, and all of it is copied; so does an update that is repeated where
its result is read. XLA doesn't repeat the outputs of a fence.

On CPU a fence is a conditional of which XLA can't tell that it always goes the same way, with the
update in it: every version honours that (`optimization_barrier` is expanded before fusion by jaxlib
< 0.11.2). A conditional would make a GPU wait for its host, so elsewhere the fence is a barrier.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from refs import _jax
from refs._callbacks.primitives import host_callback_p
from refs._inplace.body import (
    Body,
    barrier,
    can_pass,
    carries,
    is_small,
    is_update,
    is_var,
    splice,
    substitute,
)
from refs._types import Atom, Eqn, Primitive, Value

# The dtypes of arrays that the predicate of a fence can be computed from.
_TELLING = {
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("bool", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
}


class Fenced(NamedTuple):
    """Equations for an update behind a fence, and the names of values behind it."""

    eqns: list[Eqn]  # The update, if there is one, is in the last.
    names: dict[Any, Atom]  # A value before the fence -> behind it.


def fenced(
    eqn: Eqn,
    buffer: Atom,
    passing: Sequence[Atom],
    seen: Sequence[Atom],
    constant: Container[Atom],
    on_cpu: bool,
) -> Fenced:
    """An update behind a fence: some values pass through it, others must be computed before it.

    Args:
      eqn: the equation that updates `buffer`.
      buffer: one of its operands.
      passing: values from before the update that are used after it.
      seen: large values that XLA doesn't repeat: the update only has to wait for them.
      constant: values that XLA computes before the program runs: no fence can depend on them.
      on_cpu: whether the fence may be a conditional.
    """
    if eqn.primitive is host_callback_p and on_cpu:
        return _carried(eqn, [*passing, *seen])
    operands = [v for v in _index_first(eqn) if is_var(v) and v is not buffer and can_pass(v)]
    if not is_update(eqn):
        operands = [v for v in operands if is_small(v, buffer)]
    candidates = [v for v in (*operands, *passing) if can_tell(v) and v not in constant]
    tokens = list(seen) or candidates[:1]
    can_fence = tokens and all(map(can_tell, tokens)) and all(map(can_pass, passing))
    if not can_fence and not passing and not seen:
        return Fenced([eqn], {})
    if not on_cpu or not can_fence:
        return _barrier(eqn, [*passing, *seen], [*operands, buffer])
    if is_update(eqn):
        atoms = [*tokens, *eqn.invars, *passing]
        static = {"primitive": eqn.primitive, "params": tuple(eqn.params.items())}
        eqns, out = splice(
            _update, atoms, eqn, n_tokens=len(tokens), n_operands=len(eqn.invars), **static
        )
        return Fenced(eqns, dict(zip([*eqn.outvars, *passing], out, strict=True)))
    if not operands:
        return _barrier(eqn, [*passing, *seen], [buffer])
    values = list(dict.fromkeys([*passing, operands[0]]))
    eqns, out = splice(_conditional, [*tokens, *values], eqn, n_tokens=len(tokens))
    return _behind(eqn, eqns, values, out)


def passed(values: Sequence[Atom], like: Eqn, constant: Container[Atom], on_cpu: bool) -> Fenced:
    """Values that pass through a fence alone, where `like` stands.

    `constant` and `on_cpu`: as for `fenced`.
    """
    tokens = [v for v in values if can_tell(v) and v not in constant][:1]
    if on_cpu and tokens and all(map(can_pass, values)):
        eqns, out = splice(_conditional, [*tokens, *values], like, n_tokens=1)
    else:
        eqns, out = splice(barrier, values, like)
    return Fenced(eqns, dict(zip(values, out, strict=True)))


def _carried(eqn: Eqn, values: Sequence[Atom]) -> Fenced:
    """A callback that values pass through unchanged: XLA can't repeat them behind it."""
    _, n = carries(eqn) or (0, 0)
    params = eqn.params
    outvars = [_jax.new_var(v.aval) for v in values]
    carried = eqn.replace(
        invars=[*eqn.invars[:n], *values, *eqn.invars[n:]],
        outvars=[*eqn.outvars[:n], *outvars, *eqn.outvars[n:]],
        params={**params, "n_kept": params["n_kept"] + len(values)},
    )
    return Fenced([carried], dict(zip(values, outvars, strict=True)))


def _index_first(eqn: Eqn) -> list[Atom]:
    """The operands of an equation; of a `dynamic_update_slice` only the indices and the update."""
    if eqn.primitive is lax.dynamic_update_slice_p:
        return [*eqn.invars[2:], eqn.invars[1]]
    return list(eqn.invars)


def _barrier(eqn: Eqn, passing: Sequence[Atom], operands: Sequence[Atom]) -> Fenced:
    more = next(v for v in operands if v not in passing)
    eqns, out = splice(barrier, [*passing, more], eqn)
    return _behind(eqn, eqns, [*passing, more], out)


def _behind(eqn: Eqn, eqns: list[Eqn], values: Sequence[Atom], out: Sequence[Atom]) -> Fenced:
    names = dict(zip(values, out, strict=True))
    return Fenced([*eqns, substitute(eqn, names)], names)


def _update(
    *atoms: Value, n_tokens: int, n_operands: int, primitive: Primitive, params: tuple[Any, ...]
) -> Sequence[Value]:
    """The result of an update, and the values that pass through the fence."""
    operands, passing = atoms[n_tokens : n_tokens + n_operands], atoms[n_tokens + n_operands :]
    return lax.cond(
        always(atoms[:n_tokens]),
        lambda operands, passing: (primitive.bind(*operands, **dict(params)), *passing),
        lambda operands, passing: (operands[0], *map(jnp.zeros_like, passing)),
        operands,
        passing,
    )


def _conditional(*atoms: Value, n_tokens: int) -> Sequence[Value]:
    """The values that pass through the fence."""
    return lax.cond(
        always(atoms[:n_tokens]),
        lambda passing: passing,
        lambda passing: tuple(map(jnp.zeros_like, passing)),
        atoms[n_tokens:],
    )


def always(tokens: Sequence[Value]) -> Value:
    """A scalar that is always True, and that XLA can't compute before the tokens."""
    always = None
    for token in tokens:
        is_few = lax.population_count(_bits(token)) <= 64
        always = is_few if always is None else always & is_few
    return always


def is_fence(eqn: Eqn, body: Body, made_by: dict[Any, int]) -> bool:
    """Whether a conditional in `body` always goes the same way."""
    atoms = [eqn.invars[0]]
    for v in atoms:  # It grows.
        k = made_by.get(v) if is_var(v) else None
        if k is None:
            continue
        maker = body.eqns[k]
        if maker.primitive is lax.population_count_p:
            return True
        if maker.primitive in (lax.convert_element_type_p, lax.clamp_p, lax.and_p, lax.le_p):
            atoms += maker.invars
    return False


def _bits(x: Value) -> Value:
    """A scalar integer made of the first element of `x`."""
    x = lax.reshape(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), ())
    if jnp.issubdtype(x.dtype, jnp.bool_):
        return x.astype(jnp.int32)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = lax.real(x)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}")
    return x


def can_tell(atom: Atom) -> bool:
    """Whether the predicate of a fence can be made to depend on an array of this type."""
    return str(atom.aval.dtype) in _TELLING and 0 not in atom.aval.shape
