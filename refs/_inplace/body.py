"""A jaxpr while it is rewritten: equations that are replaced, added and put in another order."""

from __future__ import annotations

import functools
import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from refs import _jax
from refs._callbacks.primitives import host_callback_p
from refs._inplace.atoms import is_var
from refs._inplace.model import is_computed_once, updated
from refs._types import Atom, Aval, Eqn, Jaxpr, Value


class Body:
    """The equations of a jaxpr, in any order, and its outputs.

    What is known of the equations is found once, until there are new ones: after a question `eqns`
    is replaced as a whole.
    """

    def __init__(self, jaxpr: Jaxpr, in_loop: bool = False):
        """The body of a jaxpr; `in_loop`: whether it runs in a loop, so that its copies count."""
        self.jaxpr, self.in_loop = jaxpr, in_loop
        self.outvars = list(jaxpr.outvars)
        self.eqns = list(jaxpr.eqns)

    @property
    def eqns(self) -> list[Eqn]:
        return self._eqns

    @eqns.setter
    def eqns(self, eqns: list[Eqn]) -> None:
        self._eqns = eqns
        for name in ("made_by", "users", "needs", "is_once", "last_updates", "constants"):
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

    def sort(self) -> None:
        """Puts what equations need before them. Otherwise their order stays."""
        missing = [len({*needs}) for needs in self.needs]
        after: list[list[int]] = [[] for _ in self.eqns]
        for k, needs in enumerate(self.needs):
            for j in {*needs}:
                after[j].append(k)
        order: list[int] = []
        ready = [k for k, n in enumerate(missing) if n == 0]
        while ready:
            k = heapq.heappop(ready)
            order.append(k)
            for j in after[k]:
                missing[j] -= 1
                if missing[j] == 0:
                    heapq.heappush(ready, j)
        assert len(order) == len(self.eqns), "an equation needs its own result"
        if order != [*range(len(order))]:
            self.eqns = [self.eqns[k] for k in order]

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
    def is_once(self) -> list[bool]:
        """For each equation whether XLA never computes it again."""
        return [*map(is_computed_once, self.eqns)]

    @functools.cached_property
    def last_updates(self) -> dict[Any, int]:
        """The last update of each buffer that may be updated in place, as it isn't returned."""
        returned = {v for v in self.outvars if is_var(v)}
        return {v: k for k, e in enumerate(self.eqns) for v in updated(e) if v not in returned}

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
