"""A jaxpr while it is rewritten: equations that are replaced, added and put in another order."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from refs import _jax
from refs._callbacks.primitives import host_callback_p
from refs._indexing.access import Access, Place
from refs._indexing.accesses import read_p, update_p
from refs._tracing.facts import facts_of
from refs._types import Atom, Aval, Eqn, Jaxpr, Value

# Below this many elements a copy is as cheap as the equations that prevent it.
SMALLEST = 64

# Smaller buffers than this, in bytes, get no fences. On two cores of an AMD EPYC a fence takes 0.03
# to 0.1 us in a loop, 0.25 us elsewhere, and 5 ms to compile; a copy of 4 KiB takes 0.04 us. (62
# swaps in a row of 1,000 floats: 24 us without fences, 42 us with them; of 10^5, 540 us and 44 us.)
SMALLEST_FENCED = 4096


class Body:
    """The equations of a jaxpr, in any order, and its outputs.

    What is known of the equations is found once, until there are new ones: after a question `eqns`
    is replaced as a whole.
    """

    def __init__(self, jaxpr: Jaxpr):
        self.jaxpr = jaxpr
        self.outvars = list(jaxpr.outvars)
        self.eqns = list(jaxpr.eqns)

    @property
    def eqns(self) -> list[Eqn]:
        return self._eqns

    @eqns.setter
    def eqns(self, eqns: list[Eqn]) -> None:
        self._eqns = eqns
        for name in ("made_by", "users", "needs", "constants"):
            self.__dict__.pop(name, None)

    def close(self) -> Jaxpr:
        """The jaxpr of these equations and outputs, without equations that nothing needs."""
        needed = {v for v in self.outvars if is_var(v)}
        eqns = []
        for eqn in reversed(self.eqns):
            if eqn.effects or not needed.isdisjoint(eqn.outvars) or must_run(eqn):
                needed.update(filter(is_var, eqn.invars))
                eqns.append(eqn)
        return self.jaxpr.replace(eqns=eqns[::-1], outvars=self.outvars)

    @functools.cached_property
    def made_by(self) -> dict[Any, int]:
        """The position of the equation that makes each variable."""
        return {v: k for k, eqn in enumerate(self.eqns) for v in eqn.outvars}

    @functools.cached_property
    def users(self) -> dict[Any, list[int]]:
        """The positions of the equations that take each variable, each once, in order."""
        found: defaultdict[Any, list[int]] = defaultdict(list)
        for k, eqn in enumerate(self.eqns):
            for v in eqn.invars:
                if is_var(v) and (not (of_v := found[v]) or of_v[-1] != k):
                    of_v.append(k)
        return dict(found)

    @functools.cached_property
    def needs(self) -> list[list[int]]:
        """For each equation those that must come before it: effects keep their order."""
        made_by, last, found = self.made_by, list[int](), []
        for k, eqn in enumerate(self.eqns):
            atoms = (*eqn.invars, *eqn.params.get("after", ()))
            made = [made_by[v] for v in atoms if is_var(v) and v in made_by]
            found.append(made + last if eqn.effects else made)
            if eqn.effects:
                last = [k]
        return found

    @functools.cached_property
    def constants(self) -> set[Any]:
        """The variables that depend on no input: XLA computes them before the program runs."""
        found: set[Any] = set()
        for eqn in self.eqns:
            if all(not is_var(v) or v in found for v in eqn.invars) and not eqn.effects:
                found.update(eqn.outvars)
        return found


def must_run(eqn: Eqn) -> bool:
    """Whether an equation is an `io_callback`, or has one inside, and must not be left out.

    JAX calls programs with an effect more slowly, so these calls mostly have none. Their results
    keep them in the program, but not results that are overwritten.
    """
    if eqn.primitive is host_callback_p:
        return eqn.params["plan"].spec.is_io
    return any(_has_calls(inner.jaxpr) for inner in _jax.jaxprs_in(eqn.params))


@_jax.once_per_jaxpr
def _has_calls(jaxpr: Jaxpr) -> bool:
    return any(map(must_run, jaxpr.eqns))


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


def is_buffer(atom: Atom) -> bool:
    """Whether an array is a variable, and so large that a copy of it is worth preventing."""
    return is_var(atom) and size(atom) >= SMALLEST


def needs_fences(buffer: Atom) -> bool:
    """Whether a copy of a buffer takes longer than the fences that prevent it."""
    aval: Aval = buffer.aval
    return size(buffer) * aval.dtype.itemsize >= SMALLEST_FENCED


def is_small(atom: Atom, buffer: Atom) -> bool:
    """Whether an array has at most half of a buffer's elements, so that it may be kept instead."""
    return 2 * size(atom) <= size(buffer)


def is_update(eqn: Eqn) -> bool:
    """Whether an equation returns its first operand with a few elements changed."""
    return facts_of(eqn).in_place == "update"


def is_set(eqn: Eqn) -> bool:
    """Whether an equation is a scatter that writes rows as they are: `apply` writes none."""
    return eqn.primitive is lax.scatter_p and eqn.params["update_jaxpr"] is None


def is_read(eqn: Eqn) -> bool:
    """Whether an equation returns a part of its first operand."""
    return facts_of(eqn).in_place == "read"


def is_like(atom: Atom, other: Atom) -> bool:
    """Whether two arrays have the same shape and dtype, so that one can lie where the other is."""
    return type_of(atom) == type_of(other)


def type_of(atom: Atom) -> Hashable:
    """The shape and dtype of an array."""
    aval: Aval = atom.aval
    return aval.shape, aval.dtype


def may_update(eqn: Eqn) -> bool:
    """Whether an equation, or one inside it, may update one of its operands."""
    return is_update(eqn) or carries(eqn) is not None or eqn.primitive is _jax.cond_p


def is_add(eqn: Eqn) -> bool:
    return facts_of(eqn).in_place == "add"


def carries(eqn: Eqn) -> tuple[int, int] | None:
    """The operands of a loop or callback that its first outputs continue, in the same memory.

    The position of the first one, and how many. None for any other equation.
    """
    found = facts_of(eqn).carries
    return found(eqn) if found is not None else None


def is_same(atom: Atom, other: Atom) -> bool:
    """Whether two atoms are one variable, or equal constants."""
    if is_var(atom) or is_var(other):
        return atom is other
    return literal(atom) == literal(other)


def literal(atom: Atom) -> Hashable:
    """What is equal for equal constants, numbers or arrays."""
    return str(atom.aval), np.asarray(atom.val).tobytes()  # pyright: ignore


def operation(eqn: Eqn) -> Hashable:
    """What is equal for equations that do the same, whatever their operands."""
    return eqn.primitive, tuple(sorted(eqn.params.items()))


def is_aligned(read: Eqn, update: Eqn) -> bool:
    """Whether an equation reads the blocks that an update overwrites, if it overwrites them."""
    if update.primitive is not update_p or read.invars[0] is not update.invars[0]:
        return False
    access: Access = update.params["access"]
    places = update.invars[2:-1] if access.is_masked else update.invars[2:]
    if read.primitive is lax.slice_p:
        rest = iter(places)
        starts = [_number(next(rest)) if isinstance(s, Place) else s for s in access.starts]
        is_block = read.params["strides"] is None and shape(read.outvars[0]) == access.shape
        return is_block and starts == list(read.params["start_indices"])
    return (
        read.primitive is read_p
        and read.params["access"] == access._replace(is_masked=False).clipped
        and all(map(is_same, read.invars[1:], places))
    )


def _number(atom: Any) -> int | None:
    """The number that a constant scalar is; None for anything else."""
    return None if not isinstance(atom, _Literal) or np.ndim(atom.val) else int(atom.val)


def unmoved(eqn: Eqn) -> Atom | None:
    """The array that an equation only gives another shape, its elements in the same order."""
    p = eqn.params
    if eqn.primitive is lax.reshape_p:
        isunmoved = p["dimensions"] is None
    elif eqn.primitive is lax.broadcast_in_dim_p:
        isunmoved = size(eqn.invars[0]) == math.prod(p["shape"]) and len(eqn.invars) == 1
    else:
        isunmoved = eqn.primitive is lax.squeeze_p
    return eqn.invars[0] if isunmoved else None


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


def renamed(atoms: Sequence[Atom], names: dict[Any, Atom]) -> list[Atom]:
    """The atoms, with the variables in `names` replaced."""
    return [names.get(v, v) if is_var(v) else v for v in atoms]


def substitute(eqn: Eqn, names: dict[Any, Atom]) -> Eqn:
    """The equation, with those of its operands replaced that are in `names`."""
    invars = renamed(eqn.invars, names)
    return eqn.replace(invars=invars) if invars != eqn.invars else eqn


def splice(
    fun: Callable[..., Any], atoms: Sequence[Atom], like: Eqn, **static: Any
) -> tuple[list[Eqn], list[Atom]]:
    """The equations of `fun(*atoms, **static)`, as if they stood where `like` does.

    Returns the equations and their outputs. The equations are cached by `fun`, `static` and the
    types of the atoms: `fun` must be a module's function, and `static` hashable.
    """
    template = _template(fun, tuple(a.aval for a in atoms), tuple(static.items()))
    return _put_in(template, atoms, like)


def spliced(fun: Callable[..., Value], atoms: Sequence[Atom], like: Eqn) -> list[Eqn]:
    """Equations that compute the one result of `like` as `fun(*atoms)`. Nothing is cached."""
    eqns, [out] = _put_in(_traced(fun, [a.aval for a in atoms]), atoms, like)
    return _named(eqns, out, like)


def _put_in(template: Jaxpr, atoms: Sequence[Atom], like: Eqn) -> tuple[list[Eqn], list[Atom]]:
    names: dict[Any, Any] = dict(zip(template.invars, atoms, strict=True))
    eqns = []
    for eqn in template.eqns:
        outvars = [_jax.new_var(v.aval) for v in eqn.outvars]
        names.update(zip(eqn.outvars, outvars, strict=True))
        invars = renamed(eqn.invars, names)
        eqns.append(
            eqn.replace(invars=invars, outvars=outvars, source_info=like.source_info, ctx=like.ctx)
        )
    return eqns, renamed(template.outvars, names)


def replaced(eqn: Eqn, fun: Callable[..., Any], atoms: Sequence[Atom], **static: Any) -> list[Eqn]:
    """`splice`, of equations that compute the one result of `eqn`."""
    made, [out] = splice(fun, atoms, eqn, **static)
    return _named(made, out, eqn)


def _named(made: list[Eqn], out: Atom, eqn: Eqn) -> list[Eqn]:
    """Equations whose result `out` is named as that of `eqn`."""
    [result] = eqn.outvars
    return [e.replace(outvars=[result if v is out else v for v in e.outvars]) for e in made]


def barrier(*operands: Value) -> Any:
    """`lax.optimization_barrier`, to be spliced."""
    return lax.optimization_barrier(operands)


def zeros(*like: Value) -> list[Value]:
    """Zeros of the types of arrays, to be spliced."""
    return [jax.numpy.zeros_like(x) for x in like]


@functools.lru_cache(maxsize=1024)
def _template(
    fun: Callable[..., Any], avals: tuple[Aval, ...], static: tuple[tuple[str, Any], ...]
) -> Jaxpr:
    return _traced(functools.partial(fun, **dict(static)), avals)


def _traced(fun: Callable[..., Any], avals: Sequence[Aval]) -> Jaxpr:
    types = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False))
        for a in avals
    ]
    # The types must stay as they are, whether or not 64-bit types are enabled now, and whatever
    # mesh is set: arrays that `fun` makes would be typed as lying on it.
    no_mesh = jax.sharding.AbstractMesh((), ())
    with jax.enable_x64(True), jax.sharding.use_abstract_mesh(no_mesh):
        closed = jax.make_jaxpr(fun)(*types)
    constants = zip(closed.jaxpr.constvars, closed.consts, strict=True)
    names: dict[Any, Any] = {v: _jax.Literal(value, v.aval) for v, value in constants}
    eqns = [substitute(eqn, names) for eqn in closed.jaxpr.eqns]
    return closed.jaxpr.replace(constvars=[], eqns=eqns)
