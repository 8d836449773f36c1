"""Fences: they make XLA compute some values before an update, and the update after these values.

XLA duplicates cheap operations into whatever uses them. A read that is repeated after the buffer's
update keeps the old buffer alive, and all of it is copied; so does an update that is repeated where
its result is read. XLA doesn't repeat the outputs of a fence.

On CPU a fence is a conditional of which XLA can't tell that it always goes the same way, with the
update in it: every version honours that (`optimization_barrier` is expanded before fusion by jaxlib
< 0.11.2). A conditional would make a GPU wait for its host, so elsewhere the fence is a barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from refs import _jax
from refs._callbacks.primitives import host_callback_p
from refs._indexing.accesses import update_p
from refs._inplace.atoms import can_pass, is_var
from refs._inplace.body import barrier, splice, substitute
from refs._inplace.model import carries, is_small, is_update
from refs._types import Atom, Eqn, Primitive, Value

# The dtypes of arrays that the predicate of a fence can be computed from.
_TELLING = {
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("bool", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
}


class Predicate(NamedTuple):
    """What a fence's conditional decides by: true always, and unknown to XLA."""

    flag: Atom  # a bool
    index: Atom  # the flag as the number of a branch


class Fenced(NamedTuple):
    """Equations for an update behind a fence, and the names of values behind it."""

    eqns: list[Eqn]  # The update, if there is one, is in the last.
    names: dict[Any, Atom]  # A value before the fence -> behind it.
    predicate: Predicate | None = None  # one that later fences of the body can have, too


def fenced(
    eqn: Eqn,
    buffer: Atom,
    passing: Sequence[Atom],
    seen: Sequence[Atom],
    constant: Container[Atom],
    on_cpu: bool,
    predicate: Predicate | None = None,
) -> Fenced:
    """An update behind a fence: some values pass through it, others must be computed before it.

    One predicate serves all fences of a body for which nothing has to be `seen`: XLA computes it
    once, since a conditional's operand is never computed again for another conditional.

    Args:
      eqn: the equation that updates `buffer`.
      buffer: one of its operands.
      passing: values from before the update that are used after it.
      seen: values that XLA computes once: the update only has to wait for them.
      constant: values that XLA computes before the program runs: no fence can depend on them.
      on_cpu: whether the fence may be a conditional.
      predicate: that of an earlier fence of the body.
    """
    if eqn.primitive is host_callback_p and on_cpu:
        return _carried(eqn, [*passing, *seen])
    operands = [v for v in _index_first(eqn) if is_var(v) and v is not buffer and can_pass(v)]
    if not is_update(eqn):
        operands = [v for v in operands if is_small(v, buffer)]
    if seen or predicate is None:
        candidates = [v for v in (*operands, *passing) if can_tell(v) and v not in constant]
        tokens = list(seen) or candidates[:1]
        can_fence = tokens and all(map(can_tell, tokens))
    else:
        tokens, can_fence = [], True
    can_fence = can_fence and all(map(can_pass, passing))
    if not can_fence and not passing and not seen:
        return Fenced([eqn], {})
    if not on_cpu or not can_fence:
        return _barrier(eqn, [*passing, *seen], [*operands[::-1], buffer])
    if not is_update(eqn) and not operands:
        return _barrier(eqn, [*passing, *seen], [buffer])
    made: list[Eqn] = []
    if tokens:
        made, predicate = _predicate_of(tokens, eqn)
    assert predicate is not None
    shared = None if seen else predicate
    if is_update(eqn):
        static = {"primitive": eqn.primitive, "params": tuple(eqn.params.items())}
        operands = list(eqn.invars)
        conditional, out = _decided(
            predicate, _update, [*operands, *passing], eqn, n_operands=len(operands), **static
        )
        names = dict(zip([*eqn.outvars, *passing], out, strict=True))
        return Fenced([*made, conditional], names, shared)
    values = list(dict.fromkeys([*passing, operands[0]]))
    conditional, out = _decided(predicate, _conditional, values, eqn)
    return _behind(eqn, [*made, conditional], values, out, shared)


def passed_alone(
    values: Sequence[Atom], like: Eqn, constant: Container[Atom], on_cpu: bool
) -> Fenced:
    """Values that pass through a fence alone, where `like` stands.

    `constant` and `on_cpu`: as for `fenced`.
    """
    tokens = [v for v in values if can_tell(v) and v not in constant][:1]
    if on_cpu and tokens and all(map(can_pass, values)):
        eqns, predicate = _predicate_of(tokens, like)
        conditional, out = _decided(predicate, _conditional, values, like)
        eqns.append(conditional)
    else:
        eqns, out = splice(barrier, values, like)
    return Fenced(eqns, dict(zip(values, out, strict=True)))


def before_overwriting(
    begin: Eqn,
    passing: Sequence[Atom],
    seen: Sequence[Atom],
    constant: Container[Atom],
    on_cpu: bool,
) -> Fenced:
    """A fence before the kernel that overwrites a buffer.

    On a CPU the buffer doesn't pass it: the kernel takes a flag that has passed.

    Args:
      begin: the equation that the overwriting begins with, to be replaced.
      passing, seen, constant, on_cpu: as for `fenced`.
    """
    [buffer], [new] = begin.invars, begin.outvars
    tokens = list(seen) or [v for v in passing if can_tell(v) and v not in constant][:1]
    if on_cpu and tokens and all(map(can_tell, tokens)) and all(map(can_pass, passing)):
        eqns, predicate = _predicate_of(tokens, begin)
        conditional, [flag, *out] = _decided(
            predicate, _conditional, [predicate.flag, *passing], begin
        )
        made, [behind] = splice(_kept, [flag, buffer], begin)
        eqns = [*eqns, conditional, *made]
    else:
        eqns, [*out, behind] = splice(barrier, [*passing, *seen, buffer], begin)
        passing = [*passing, *seen]
    return Fenced(eqns, dict(zip([*passing, new], [*out, behind], strict=True)))


def _predicate_of(tokens: Sequence[Atom], like: Eqn) -> tuple[list[Eqn], Predicate]:
    eqns, [flag, index] = splice(_flag_and_index, tokens, like)
    return eqns, Predicate(flag, index)


def _decided(
    predicate: Predicate, fun: Callable[..., Any], atoms: Sequence[Atom], like: Eqn, **static: Any
) -> tuple[Eqn, list[Atom]]:
    """`splice` of `fun(flag, *atoms)`, which is one `lax.cond`, as one equation.

    JAX makes a number of the flag for each conditional. XLA would fuse each of these with what the
    flag is computed from, and compute that again, at a later time.
    """
    [*_, conditional], out = splice(fun, [predicate.flag, *atoms], like, **static)
    return conditional.replace(invars=[predicate.index, *conditional.invars[1:]]), out


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
    """The operands of an equation; of an access only the places and the value."""
    if eqn.primitive is update_p:
        return [*eqn.invars[2:], eqn.invars[1]]
    return list(eqn.invars)


def _barrier(eqn: Eqn, passing: Sequence[Atom], operands: Sequence[Atom]) -> Fenced:
    more = next(v for v in operands if v not in passing)
    eqns, out = splice(barrier, [*passing, more], eqn)
    return _behind(eqn, eqns, [*passing, more], out)


def _behind(
    eqn: Eqn,
    eqns: list[Eqn],
    values: Sequence[Atom],
    out: Sequence[Atom],
    predicate: Predicate | None = None,
) -> Fenced:
    names = dict(zip(values, out, strict=True))
    return Fenced([*eqns, substitute(eqn, names)], names, predicate)


def _update(
    flag: Value, *atoms: Value, n_operands: int, primitive: Primitive, params: tuple[Any, ...]
) -> Sequence[Value]:
    """The result of an update, and the values that pass through the fence."""
    operands, passing = atoms[:n_operands], atoms[n_operands:]
    return lax.cond(
        flag,
        lambda operands, passing: (primitive.bind(*operands, **dict(params)), *passing),
        lambda operands, passing: (operands[0], *map(jnp.zeros_like, passing)),
        operands,
        passing,
    )


def _conditional(flag: Value, *passing: Value) -> Sequence[Value]:
    """The values that pass through the fence."""
    return lax.cond(
        flag,
        lambda passing: passing,
        lambda passing: tuple(map(jnp.zeros_like, passing)),
        passing,
    )


def _kept(flag: Value, x: Value) -> Value:
    return lax.select(flag, x, jnp.zeros_like(x))


def _flag_and_index(*tokens: Value) -> tuple[Value, Value]:
    flag = always(tokens)
    return flag, lax.convert_element_type(flag, jnp.int32)


def always(tokens: Sequence[Value]) -> Value:
    """A scalar that is always True, and that XLA can't compute before the tokens."""
    always = None
    for token in tokens:
        is_few = lax.population_count(_bits(token)) <= 64
        always = is_few if always is None else always & is_few
    return always


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
