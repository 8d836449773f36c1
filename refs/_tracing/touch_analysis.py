"""Touch analysis: what a jaxpr does to each ref that it is given or closes over.

JAX's own effects are not enough: they don't say whether the old value that a swap returns is used,
nor that Python's `r[i] += x` (get, add, swap) only accumulates, and some call primitives have none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import numpy as np

from refs import _jax
from refs._tracing import array_facts as array_facts  # imported to declare the facts
from refs._tracing.facts import STAYS, Move, facts_of, inner_calls
from refs._tracing.touch import Rules as Rules
from refs._tracing.touch import Touch as Touch
from refs._tracing.updates import update_of, uses_in
from refs._types import Atom, ClosedJaxpr, Eqn, Jaxpr, Primitive, RefLike, Value


class Touches(NamedTuple):
    """What a jaxpr does to its constants and inputs, and to refs that are constants inside it."""

    consts: tuple[Touch, ...]
    inputs: tuple[Touch, ...]
    hidden: tuple[tuple[RefLike, Touch], ...]


_memo: WeakKeyDictionary[Jaxpr, Touches] = WeakKeyDictionary()


def touches(closed: ClosedJaxpr) -> Touches:
    """What a closed jaxpr does to its constants, its inputs, and the refs that it closes over.

    Refs that it makes itself are left out.
    """
    return jaxpr_touches(closed.jaxpr, closed.consts)


def jaxpr_touches(jaxpr: Jaxpr, consts: Sequence[Value]) -> Touches:
    """`touches` of a jaxpr whose constants are given apart, if it has any."""
    if jaxpr not in _memo:
        _memo[jaxpr] = touches_under(jaxpr, consts, Names({}, {}))
    return _memo[jaxpr]


class Names(NamedTuple):
    """Which variables and concrete refs are names of one ref: names of one ref have the same key.

    The keys in `of_ref` are by the ref's id. By default a variable is its own key, and the key of a
    concrete ref is its id.
    """

    of_var: dict[Any, Any]
    of_ref: dict[int, Any]

    def var(self, v: Atom) -> Any:
        return self.of_var.get(v, v)

    def ref(self, ref: RefLike) -> Any:
        return self.of_ref.get(id(ref), id(ref))

    def inside(self, called: ClosedJaxpr, operands: Sequence[Atom]) -> Names | None:
        """The names in a called jaxpr, or None if no ref has two names there."""
        inputs = zip(called.jaxpr.invars, operands, strict=True)
        of_var = {v: self.var(x) for v, x in inputs if _jax.is_ref_type(v.aval)}
        held = {self.ref(ref) for ref, _ in _closed_over(called)}
        keys = {*of_var.values()}
        if len(keys) == len(of_var) and not keys & held and not held & {*self.of_ref.values()}:
            return None
        return Names(of_var, self.of_ref)


def touches_under(jaxpr: Jaxpr, consts: Sequence[Value], names: Names) -> Touches:
    """`jaxpr_touches`, where `names` says which names are those of one ref."""
    found: dict[Any, Touch] = {
        v: Touch.NONE for v in (*jaxpr.constvars, *jaxpr.invars) if _jax.is_ref_type(v.aval)
    }
    hidden: dict[int, tuple[RefLike, Touch]] = {}
    for _, x, kind in accesses(jaxpr, consts, names):
        if isinstance(x, _jax.NativeRef):
            hidden[id(x)] = (x, hidden.get(id(x), (x, Touch.NONE))[1] | kind)
        elif x in found:
            found[x] |= kind
    return Touches(
        tuple(found.get(v, Touch.NONE) for v in jaxpr.constvars),
        tuple(found.get(v, Touch.NONE) for v in jaxpr.invars),
        tuple(hidden.values()),
    )


def accesses(
    jaxpr: Jaxpr, consts: Sequence[Value], names: Names | None = None
) -> Iterator[tuple[Eqn, Any, Touch]]:
    """What each equation of a jaxpr does to refs, in order: to its operands, and to concrete refs.

    An equation that runs jaxprs does what these do.
    """
    names = Names({}, {}) if names is None else names
    constants = zip(jaxpr.constvars, consts, strict=True)
    held = {v: names.ref(c) for v, c in constants if isinstance(c, _jax.NativeRef)}
    names = Names({**held, **names.of_var}, names.of_ref)
    uses = uses_in(jaxpr)
    accumulating = _accumulations(jaxpr, uses, names)
    for eqn in jaxpr.eqns:
        runs_others = False
        for called, operands in inner_calls(eqn):
            runs_others = True
            known = names.inside(called, operands)
            inner_touches = (
                touches(called)
                if known is None
                else touches_under(called.jaxpr, called.consts, known)
            )
            least = Touch.HELD if _jax.has_rules(eqn) else Touch.NONE
            for operand, kind in zip(operands, inner_touches.inputs, strict=True):
                if _is_ref_var(operand):
                    yield eqn, operand, kind or least
            for ref, kind in _closed_over(called, inner_touches):
                yield eqn, ref, kind
        if runs_others:
            continue
        if id(eqn) in accumulating:
            yield eqn, eqn.invars[0], accumulating[id(eqn)]
        elif eqn.primitive is not _jax.free_ref_p:
            reads_old = facts_of(eqn).returns_old and uses[eqn.outvars[0]] > 0
            for v, kind in touches_of(eqn):
                yield eqn, v, kind | (Touch.READ if reads_old else Touch.NONE)


def _closed_over(
    closed: ClosedJaxpr, found: Touches | None = None
) -> Iterator[tuple[RefLike, Touch]]:
    """The refs of `closed_over`, each with what is done to it."""
    found = touches(closed) if found is None else found
    for const, kind in zip(closed.consts, found.consts, strict=True):
        if isinstance(const, _jax.NativeRef):
            yield const, kind
    yield from found.hidden


def closed_over(closed: ClosedJaxpr) -> list[RefLike]:
    """The refs that a jaxpr and those inside it hold as constants."""
    return [ref for ref, _ in _closed_over(closed)]


def touches_of(eqn: Eqn) -> Iterator[tuple[Atom, Touch]]:
    """The ref operands of an equation, each with what the primitive does to it.

    If nothing but its effects is known, an operand that they change counts as read and written, any
    other one as read. Without effects on refs, all count as read and written.
    """
    known = facts_of(eqn).touch
    effects = [e for e in eqn.effects if isinstance(e, _jax.RefEffect)]
    v: Atom
    for v in filter(_is_ref_var, eqn.invars):
        if known == Touch.ACCUMULATE and v.aval.dtype == bool:
            yield v, Touch.MAX  # what `|=` of flags is, and `+=`
        elif known is not None:
            yield from [(v, known)] if known else []
        else:
            only_reads = effects and all(
                isinstance(e, _jax.ReadEffect) for e in effects if e.input is v
            )
            yield v, Touch.READ if only_reads else Touch.READ | Touch.WRITE


def holds_refs(closed: ClosedJaxpr) -> bool:
    """True where a jaxpr, at any depth, has a ref as input or constant, or makes one."""
    return _holds_refs(closed.jaxpr)


@_jax.once_per_jaxpr
def _holds_refs(jaxpr: Jaxpr) -> bool:
    return _any_ref((*jaxpr.constvars, *jaxpr.invars)) or any(
        _jax.is_scan_of_refs(eqn)
        or _any_ref((*eqn.invars, *eqn.outvars))
        or any(map(holds_refs, _jax.jaxprs_in(eqn.params)))
        for eqn in jaxpr.eqns
    )


def uses_refs(closed: ClosedJaxpr) -> bool:
    """True where a jaxpr, at any depth, closes over a ref, makes one or uses one.

    Refs that an equation makes for its inner jaxpr's inputs, as a kernel does, don't count.
    """
    return any(isinstance(c, _jax.NativeRef) for c in closed.consts) or _uses_refs(closed.jaxpr)


@_jax.once_per_jaxpr
def _uses_refs(jaxpr: Jaxpr) -> bool:
    return any(
        eqn.primitive is _jax.run_state_p
        or _jax.is_scan_of_refs(eqn)
        or _any_ref((*eqn.invars, *eqn.outvars))
        or any(
            uses_refs(inner)
            for inner in _jax.jaxprs_in(eqn.params)
            if not _any_ref(inner.jaxpr.invars)
        )
        for eqn in jaxpr.eqns
    )


def closes_over_tracers(closed: ClosedJaxpr) -> bool:
    """True where a jaxpr, at any depth, has a tracer as a constant.

    JAX's own calls and loops make operands of such tracers, but not when JAX transposes or
    linearizes these calls and loops.
    """
    return any(isinstance(c, _jax.Tracer) for c in closed.consts) or _has_open_calls(closed.jaxpr)


def close_over_values_of(trace: Any, jaxprs: Iterable[ClosedJaxpr]) -> bool:
    """Whether one of these has a tracer of this trace as a constant, at any depth."""
    return any(
        closes_over_tracers(closed)
        and (
            any(isinstance(c, _jax.Tracer) and _jax.trace_of(c) is trace for c in closed.consts)
            or any(close_over_values_of(trace, _jax.jaxprs_in(e.params)) for e in closed.jaxpr.eqns)
        )
        for closed in jaxprs
    )


@_jax.once_per_jaxpr
def _has_open_calls(jaxpr: Jaxpr) -> bool:
    return any(
        closes_over_tracers(inner) for eqn in jaxpr.eqns for inner in _jax.jaxprs_in(eqn.params)
    )


def _any_ref(variables: Iterable[Atom]) -> bool:
    return any(_jax.is_ref_type(v.aval) for v in variables)


def _is_ref_var(v: Atom) -> bool:
    return not isinstance(v, _jax.Literal) and _jax.is_ref_type(v.aval)


@_jax.once_per_jaxpr
def used(jaxpr: Jaxpr) -> frozenset[Any]:
    """The variables of a jaxpr that an equation or the result uses."""
    return frozenset(uses_in(jaxpr))


# ---------------------------------------------------------------------------------------------
# `r[i] += x` is traced to get, add, swap; `r.at[i].max(x)` to get, max, swap


def _accumulations(jaxpr: Jaxpr, uses: Counter[Any], names: Names) -> dict[int, Touch]:
    """The kind of update of each get and swap that together only accumulate, by equations' ids.

    They do if the value that get reads is used by additions only (or is subtracted from), if the
    result is used by one swap only, of the same part of the same ref, if nothing uses the old value
    that swap returns, and if nothing touches the ref in between. NumPy's indices may change the
    order and shape of the value before the addition, if that is undone after it. Where integer
    arrays may name an element twice, NumPy's `+=` adds once: that is no accumulation. The same goes
    for multiplications, minima and maxima.
    """
    reads: dict[Any, _Read] = {}  # by variable: values that a get has read, perhaps updated since
    value_of: dict[Any, Any] = {}  # by the ref's name: that variable, one for each ref
    found: dict[int, Touch] = {}

    def note(value: Any, read: _Read) -> None:
        reads[value] = read
        value_of[names.var(read.get.invars[0])] = value

    def forget(name: Any) -> None:  # a ref's, as in `names`
        reads.pop(value_of.pop(name, None), None)

    for eqn in jaxpr.eqns:
        if eqn.primitive is _jax.get_p and uses[eqn.outvars[0]] == 1 and _is_distinct(eqn):
            forget(names.var(eqn.invars[0]))
            note(eqn.outvars[0], _Read(eqn))
            continue
        move = facts_of(eqn).moves
        if move is not None and uses[eqn.outvars[0]] == 1:
            [v] = eqn.invars
            moved = None if isinstance(v, _jax.Literal) or v not in reads else reads.pop(v)
            if moved is not None and (moved := moved.then(eqn, move)) is not None:
                note(eqn.outvars[0], moved)
            continue
        if eqn.primitive is _jax.swap_p and not uses[eqn.outvars[0]]:
            value = eqn.invars[1]
            read = None if isinstance(value, _jax.Literal) else reads.pop(value, None)
            if read is not None and read.kind is not None and not read.moves:
                one, other = (names.var(e.invars[0]) for e in (read.get, eqn))
                if one == other and _same_part(jaxpr, read.get, eqn):
                    found |= {id(read.get): read.kind, id(eqn): read.kind}
        for k, v in enumerate(eqn.invars):
            kind = update_of(eqn, k) if not isinstance(v, _jax.Literal) and v in reads else None
            if kind is not None and reads[v].kind in (None, kind) and uses[eqn.outvars[0]] == 1:
                note(eqn.outvars[0], reads.pop(v)._replace(kind=kind))
                break
        for v in eqn.invars:
            if _is_ref_var(v):
                forget(names.var(v))
        for called, _ in inner_calls(eqn):
            for ref, _ in _closed_over(called):
                forget(names.ref(ref))
    return found


class _Read(NamedTuple):
    """A value that a get equation has read, and its update since, if there is one.

    `moves`, each a primitive and what undoes it, are still to be undone, the last first.
    """

    get: Eqn
    kind: Touch | None = None
    moves: tuple[tuple[Primitive, Any], ...] = ()

    def then(self, eqn: Eqn, move: Move) -> _Read | None:
        """The value after one more move; None if it is updated and that doesn't undo the last."""
        primitive = eqn.primitive
        if move is STAYS:
            return self
        if self.kind is None:
            return self._replace(moves=(*self.moves, (primitive, move.undone_by(eqn))))
        if self.moves and self.moves[-1] == (primitive, move.does(eqn)):
            return self._replace(moves=self.moves[:-1])
        return None


def _is_distinct(get: Eqn) -> bool:
    """True if a get can't name an element twice."""
    return all(
        isinstance(indexer, _jax.DistinctIndexer)
        or not any(v.aval.shape for v in jax.tree.leaves(indexer))
        for indexer in jax.tree.unflatten(get.params["tree"], get.invars[1:])
    )


def _same_part(jaxpr: Jaxpr, get: Eqn, swap: Eqn) -> bool:
    atoms = zip(get.invars[1:], swap.invars[2:], strict=False)
    return get.params["tree"] == swap.params["tree"] and all(
        _same_value(jaxpr, a, b) for a, b in atoms
    )


def _same_value(jaxpr: Jaxpr, a: Atom, b: Atom) -> bool:
    """True for one variable, and for two that the same operations make of the same values.

    The index of an update, `v[...] += x` of a view for instance, is computed for the read and once
    more for the write. Each pair is compared once, however many paths lead to it.
    """
    pairs, seen = [(a, b)], set[Any]()
    while pairs:
        a, b = pairs.pop()
        if isinstance(a, _jax.Literal) or isinstance(b, _jax.Literal):
            both = isinstance(a, _jax.Literal) and isinstance(b, _jax.Literal)
            if not (both and np.array_equal(a.val, b.val)):
                return False
        elif a is not b and (a, b) not in seen:
            seen.add((a, b))
            one, other = (_makers(jaxpr).get(v) for v in (a, b))
            if one is None or other is None or not _does_the_same(one, other):
                return False
            if one.outvars.index(a) != other.outvars.index(b):
                return False
            pairs += zip(one.invars, other.invars, strict=True)
    return True


def _does_the_same(one: Eqn, other: Eqn) -> bool:
    """Whether two equations give equal operands equal results."""
    if one.primitive is not other.primitive or one.effects:
        return False
    try:
        return len(one.invars) == len(other.invars) and bool(one.params == other.params)
    except Exception:  # A parameter may hold arrays, which `==` compares element by element.
        return False


@_jax.once_per_jaxpr
def _makers(jaxpr: Jaxpr) -> dict[Any, Eqn]:
    """The equation that each variable comes from."""
    return {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
