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
from itertools import islice
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


class _Predicate(NamedTuple):
    """What a fence's conditional decides by: true always, and unknown to XLA."""

    flag: Atom  # a bool
    index: Atom  # the flag as the number of a branch


class Fenced(NamedTuple):
    """Equations for an update behind a fence, and the names of values behind it."""

    eqns: list[Eqn]  # The update, if there is one, is in the last.
    names: dict[Any, Atom]  # A value before the fence -> behind it.


class FenceMaker:
    """Makes the fences of one body.

    One predicate serves all of them for which nothing has to be `seen`: XLA computes it once, since
    a conditional's operand is never computed again for another conditional.
    """

    def __init__(self, constants: Container[Atom], on_cpu: bool):
        """Sets up the fences of a body.

        Args:
          constants: values that XLA computes before the program runs: no fence can depend on them.
          on_cpu: whether fences may be conditionals.
        """
        self._constants, self._on_cpu = constants, on_cpu
        self._shared: _Predicate | None = None

    def before_update(
        self, eqn: Eqn, buffer: Atom, passing: Sequence[Atom], seen: Sequence[Atom]
    ) -> Fenced:
        """An update behind a fence: some values pass through it, others must be computed before it.

        Args:
          eqn: the equation that updates `buffer`.
          buffer: one of its operands.
          passing: values from before the update that are used after it.
          seen: values that XLA computes once: the update only has to wait for them.
        """
        if eqn.primitive is host_callback_p and self._on_cpu:
            return _carried(eqn, [*passing, *seen])
        operands = [v for v in _index_first(eqn) if is_var(v) and v is not buffer and can_pass(v)]
        if not is_update(eqn):
            operands = [v for v in operands if is_small(v, buffer)]
        if self._shared is None or seen or not all(map(can_pass, passing)):
            made, predicate = self._predicate([*operands, *passing], passing, seen, eqn)
        else:
            made, predicate = [], self._shared
        if predicate is None or not (is_update(eqn) or operands):
            if predicate is None and not passing and not seen:
                return Fenced([eqn], {})
            others = [*operands[::-1], buffer]
            values = [*passing, *seen]
            values.append(next(v for v in others if v not in values))
            return _behind(eqn, [], values, *_through(None, values, eqn))
        if not seen:
            self._shared = predicate
        if is_update(eqn):
            static = {"primitive": eqn.primitive, "params": tuple(eqn.params.items())}
            operands = list(eqn.invars)
            conditional, out = _decided(
                predicate, _update, [*operands, *passing], eqn, n_operands=len(operands), **static
            )
            names = dict(zip([*eqn.outvars, *passing], out, strict=True))
            return Fenced([*made, conditional], names)
        values = list(dict.fromkeys([*passing, operands[0]]))
        return _behind(eqn, made, values, *_through(predicate, values, eqn))

    def alone(self, values: Sequence[Atom], like: Eqn) -> Fenced:
        """Values that pass through a fence alone, where `like` stands."""
        made, predicate = self._predicate(values, values, (), like)
        eqns, out = _through(predicate, values, like)
        return Fenced([*made, *eqns], dict(zip(values, out, strict=True)))

    def before_overwriting(
        self, begin: Eqn, passing: Sequence[Atom], seen: Sequence[Atom]
    ) -> Fenced:
        """A fence before the kernel that overwrites a buffer.

        On a CPU the buffer doesn't pass it: the kernel takes a flag that has passed.

        Args:
          begin: the equation that the overwriting begins with, to be replaced.
          passing, seen: as for `before_update`.
        """
        [buffer], [new] = begin.invars, begin.outvars
        made, predicate = self._predicate(passing, passing, seen, begin)
        if predicate is None:
            passing = [*passing, *seen]
            eqns, [*out, behind] = _through(None, [*passing, buffer], begin)
        else:
            eqns, [flag, *out] = _through(predicate, [predicate.flag, *passing], begin)
            kept, [behind] = splice(_kept, [flag, buffer], begin)
            eqns += kept
        return Fenced([*made, *eqns], dict(zip([*passing, new], [*out, behind], strict=True)))

    def _predicate(
        self, candidates: Sequence[Atom], passing: Sequence[Atom], seen: Sequence[Atom], like: Eqn
    ) -> tuple[list[Eqn], _Predicate | None]:
        """What makes a predicate, of what was `seen` or else a candidate, and it; None without."""
        can_be = (v for v in candidates if can_tell(v) and v not in self._constants)
        tokens = list(seen) or list(islice(can_be, 1))
        is_one = self._on_cpu and tokens and all(map(can_tell, tokens))
        if not is_one or not all(map(can_pass, passing)):
            return [], None
        eqns, [flag, index] = splice(_flag_and_index, tokens, like)
        return eqns, _Predicate(flag, index)


def _through(
    predicate: _Predicate | None, values: Sequence[Atom], like: Eqn
) -> tuple[list[Eqn], list[Atom]]:
    """Values through a fence: a conditional if there is a predicate, or else a barrier."""
    if predicate is None:
        return splice(barrier, values, like)
    conditional, out = _decided(predicate, _conditional, values, like)
    return [conditional], out


def _decided(
    predicate: _Predicate, fun: Callable[..., Any], atoms: Sequence[Atom], like: Eqn, **static: Any
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


def _behind(
    eqn: Eqn,
    made: Sequence[Eqn],
    values: Sequence[Atom],
    fence: Sequence[Eqn],
    out: Sequence[Atom],
) -> Fenced:
    """An equation that takes values as they are behind a fence, whose predicate has been `made`."""
    names = dict(zip(values, out, strict=True))
    return Fenced([*made, *fence, substitute(eqn, names)], names)


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
