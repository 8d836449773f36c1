"""Constants that users' derivative rules close over: JAX traces a rule only when it needs it.

By then the trace in which the rule was written may have ended. A constant is a concrete ref, an
array, or a tracer, which is identified by its variable. So an equation with such rules is given the
values and cells of the variables where it stands. Apart from that, it goes to JAX as it is.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import jax

from refs import _jax
from refs._discharge.cells import Cell
from refs._discharge.registry import rule_for
from refs._handles.access import describe
from refs._tracing import touch_analysis
from refs._tracing.derivative_rules import has_custom_rules
from refs._tracing.trace import PartlyKnown
from refs._types import Atom, ClosedJaxpr, Eqn, Jaxpr, PyTree, PyTreeDef, Value
from refs.errors import RefEscapeError, RefStateError


class Frame:
    """A jaxpr under interpretation, and the values and cells of its variables.

    Attributes:
      env: the values and cells of all variables.
      known: the same while the frame exists; afterwards, those that last.
    """

    __slots__ = ("__weakref__", "_trace", "env", "jaxpr", "known")

    def __init__(self, jaxpr: Jaxpr):
        self.jaxpr = jaxpr
        self.env: dict[Any, Any] = {}
        # Tracers of JAX's batching or differentiation don't last: they are useless when that has
        # ended, and may hold the rules bound so far, which hold `known`.
        self._trace = None if _jax.is_staging() else _jax.current_trace()
        self.known = Known(self.env if self._trace is None else {}, ref(self))

    def write(self, variables: Sequence[Atom], values: Sequence[Value]) -> None:
        self.env.update(zip(variables, values, strict=True))
        if self._trace is None:
            return
        for var, x in zip(variables, values, strict=True):
            if not isinstance(x, _jax.Tracer) or _jax.trace_of(x) is not self._trace:
                self.known.lasting[var] = x


class Known(NamedTuple):
    """The values and cells of a frame's variables: `lasting` are those that outlive the frame."""

    lasting: dict[Any, Any]
    frame: ReferenceType[Frame]

    def get(self, var: Atom) -> Any:
        """The value or cell of `var`, or None."""
        frame = self.frame()
        return (self.lasting if frame is None else frame.env).get(var)


class Bindings(NamedTuple):
    """The values and cells of variables and refs at a point of an interpretation.

    Attributes:
      frames: the variables of the jaxprs under way, those of the innermost first.
      cells: the cell of each concrete ref, by the ref's id.
      outer: in a body, the bindings at the equation that runs it, otherwise None.
      inside: gives the cell, in this body, of a cell of `outer`.
    """

    frames: tuple[Known, ...]
    cells: dict[int, Cell]
    outer: Bindings | None
    inside: Callable[[Cell], Cell]

    def find(self, const: Value) -> Any:
        """The value or cell that a constant of a rule stands for here; itself, if there is none."""
        here = self._here(const)
        if here is not None or self.outer is None:
            return const if here is None else here
        found = self.outer.find(const)
        if not isinstance(found, Cell):
            return found
        return self.inside(found)

    def target(self, const: Value) -> Any:
        """The result of `find` once the interpretation has ended: of a cell, its ref or None."""
        here = self._here(const)
        if here is None:
            return const if self.outer is None else self.outer.target(const)
        return here.target if isinstance(here, Cell) else here

    def _here(self, const: Value) -> Any:
        if id(const) in self.cells:
            return self.cells[id(const)]
        var = _jax.var_of(const) if isinstance(const, _jax.Tracer) else None
        if isinstance(var, _jax.Literal):
            return var.val
        found = (known.get(var) for known in self.frames)
        return next((x for x in found if x is not None), None)


def untouched(described: str) -> RefStateError:
    return RefStateError(
        f"a custom derivative rule touches {described}, which the function that it is "
        "the rule of doesn't: touch the ref there too, or write it in the backward rule"
    )


def late(jaxpr: Jaxpr, k: int, bindings: Bindings, known: dict[Any, Any]) -> Eqn:
    """The `k`-th equation of a jaxpr, one without refs, with rules that find their constants.

    `known` caches the jaxprs made for this, so that one that is called many times stays one object.
    """
    return _Late(bindings, known).equation(jaxpr.eqns[k], _closed_in(jaxpr, k).add)


class _Late(NamedTuple):
    # Not functions that call each other: such a cycle would keep refs until a garbage collection.
    bindings: Bindings
    known: dict[Any, Any]

    def equation(
        self,
        eqn: Eqn,
        found_closed: Callable[[_Rule], None],
    ) -> Eqn:
        """`late` of an equation. `found_closed` notes a rule that closes over arrays only."""
        if not _jax.has_rules(eqn):
            # Other parameters of a primitive that isn't JAX's own may depend on its jaxprs.
            return eqn if rule_for(eqn.primitive) is None else _jax.map_jaxprs(eqn, self.jaxpr)
        where = _jax.user_line(eqn)

        def backward(rule: Callable[..., Any], given: Sequence[Any]) -> PyTree:
            def run(traced: ClosedJaxpr, arrays: Sequence[Value]) -> list[Value]:
                if _are_arrays(traced.consts):
                    found_closed(_Rule.BACKWARD)
                consts = [found_later(c, self.bindings, where) for c in traced.consts]
                return _jax.eval_jaxpr(_jax.with_equations(traced, self.jaxpr), consts, arrays)

            return apply_backward(rule, given, run)

        def forward(jaxpr: Jaxpr, consts: Sequence[Value]) -> tuple[Jaxpr, list[Value]]:
            if _are_arrays(consts):
                found_closed(_Rule.FORWARD)
            found = [self.bindings.find(c) for c in consts]
            for x in found:
                if isinstance(x, Cell | _jax.NativeRef):
                    raise untouched(x.describe() if isinstance(x, Cell) else describe(x))
            return self.jaxpr(jaxpr), found

        return _jax.with_rules(eqn, forward, backward)

    def jaxpr(self, jaxpr: Jaxpr) -> Jaxpr:
        key = (jaxpr, *map(id, self.bindings.frames))
        if key not in self.known and is_open(jaxpr):
            eqns = [self.equation(e, _closed_in(jaxpr, k).add) for k, e in enumerate(jaxpr.eqns)]
            self.known[key] = self.bindings, jaxpr.replace(eqns=eqns)
        return self.known[key][1] if key in self.known else jaxpr


class _Rule(enum.Enum):
    FORWARD = enum.auto()
    BACKWARD = enum.auto()


def _are_arrays(consts: Sequence[Value]) -> bool:
    return not any(isinstance(c, _jax.Tracer | _jax.NativeRef) for c in consts)


def is_open(jaxpr: Jaxpr) -> bool:
    """Whether rules in a jaxpr may touch refs, or have constants that only bindings give.

    JAX compiles a jaxpr anew for each new rule. So once its rules are known to close over nothing
    but arrays, it goes to JAX as it is.
    """
    return has_custom_rules(jaxpr) and any(
        not _is_closed(jaxpr, k, eqn)
        if _jax.has_rules(eqn)
        else any(is_open(inner.jaxpr) for inner in _jax.jaxprs_in(eqn.params))
        for k, eqn in enumerate(jaxpr.eqns)
    )


def _is_closed(jaxpr: Jaxpr, k: int, eqn: Eqn) -> bool:
    """Whether the rules of an equation are known to close over nothing but arrays."""
    found = _closed_in(jaxpr, k)
    if not _jax.is_custom_vjp(eqn) and _Rule.FORWARD not in found and not _takes_refs(eqn):
        with suppress(Exception):  # JAX may never trace it. If it does, it raises this then.
            _, consts, _ = _jax.forward_rule(eqn)
            if _are_arrays(consts):
                found.add(_Rule.FORWARD)
    return found >= ({*_Rule} if _jax.is_custom_vjp(eqn) else {_Rule.FORWARD})


def _takes_refs(eqn: Eqn) -> bool:
    return any(_jax.is_ref_type(v.aval) for v in eqn.invars) or any(
        map(touch_analysis.holds_refs, _jax.jaxprs_in(eqn.params))
    )


def _closed_in(jaxpr: Jaxpr, k: int) -> set[_Rule]:
    return _closed.setdefault(jaxpr, {}).setdefault(k, set())


# For each equation of a jaxpr, by position: the rules that are known to close over arrays only.
_closed: WeakKeyDictionary[Jaxpr, dict[int, set[_Rule]]] = WeakKeyDictionary()


def apply_backward(
    rule: Callable[..., Any],
    given: Sequence[Any],
    run: Callable[[ClosedJaxpr, list[Value]], list[Value]],
) -> PyTree:
    """`rule(*given)` of a user's backward rule, whose constants are replaced now that it runs.

    The rule is traced by itself, as a function of the tracers among `given`, and `run(jaxpr,
    arrays)` evaluates it. Arguments and results that aren't traced stay as they are.
    """
    is_traced = [isinstance(x, _jax.Tracer) for x in given]
    tree: PyTreeDef = None

    def traced_rule(arrays: list[Value]) -> list[Value]:
        nonlocal tree
        rest = iter(arrays)
        out = rule(*(next(rest) if t else x for x, t in zip(given, is_traced, strict=True)))
        leaves, tree = jax.tree.flatten(PartlyKnown(out))
        return leaves

    arrays = [x for x, t in zip(given, is_traced, strict=True) if t]
    results = run(jax.make_jaxpr(traced_rule)(arrays), arrays)
    return jax.tree.unflatten(tree, results)


def found_later(const: Value, bindings: Bindings, where: str) -> Any:
    """The value or ref that a constant of a backward rule stands for in the backward pass."""
    if isinstance(const, _jax.NativeRef) and jax.sharding.get_abstract_mesh().manual_axes:
        raise RefEscapeError(
            f"the backward rule at {where} touches {describe(const)} inside of "
            "shard_map, where a ref from outside can't be written after the forward pass: "
            "return what it writes as a cotangent, or apply shard_map inside"
        )
    found = bindings.target(const)
    if found is None:
        raise gone(describe(const), where)
    return found


def gone(described: str, where: str) -> RefEscapeError:
    return RefEscapeError(
        f"the backward rule at {where} touches {described}, which is gone when the "
        "backward pass runs: it was made inside the differentiated function, is an argument "
        "of a mapped one, or belongs to a pure one. Use a ref made outside, and `refs.grad`"
    )
