"""What users' derivative rules close over: JAX traces a rule only when it needs it.

By then the trace in which the rule was written may have ended. What a rule closes over is a
concrete ref or a tracer, which is identified by its variable. So what discharges a function with
rules keeps the values and cells of the variables where the function is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from refs import _jax
from refs._discharge.cells import Cell
from refs._handles.access import describe
from refs._tracing.trace import PartlyKnown
from refs._types import ClosedJaxpr, PyTree, PyTreeDef, Value
from refs.errors import RefEscapeError, RefStateError


class Bindings(NamedTuple):
    """The values and cells of variables and refs at a point of an interpretation.

    Attributes:
      frames: for each jaxpr under way, the innermost first, the values and cells of its variables.
      cells: the cell of each concrete ref, by the ref's id.
      outer: in a body, the bindings at the equation that runs it, otherwise None.
      inside: gives the cell, in this body, of a cell of `outer`.
    """

    frames: tuple[dict[Any, Any], ...]
    cells: dict[int, Cell]
    outer: Bindings | None
    inside: Callable[[Cell], Cell]

    def find(self, const: Value) -> Any:
        """The value or cell that a constant of a rule stands for here; itself, if there is none."""
        if (here := self._here(const)) is not None or self.outer is None:
            return const if here is None else here
        found = self.outer.find(const)
        return self.inside(found) if isinstance(found, Cell) else found

    def target(self, const: Value) -> Any:
        """The result of `find` once the interpretation has ended: of a cell, its ref or None."""
        if (here := self._here(const)) is not None:
            return here.target if isinstance(here, Cell) else here
        return const if self.outer is None else self.outer.target(const)

    def _here(self, const: Value) -> Any:
        if id(const) in self.cells:
            return self.cells[id(const)]
        var = _jax.var_of(const) if isinstance(const, _jax.Tracer) else None
        if isinstance(var, _jax.Literal):
            return var.val
        return next((env[var] for env in self.frames if var in env), None)


def untouched(described: str) -> RefStateError:
    return RefStateError(
        f"a custom derivative rule touches {described}, which the function that it is "
        "the rule of doesn't: touch the ref there too, or write it in the backward rule"
    )


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
