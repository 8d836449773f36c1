"""Groups of equations that are evaluated apart from all others, to the same bits each time.

In the exact mode what is added must come out the same, to the bit, when it is computed again. XLA
computes an expression in other ways beside other uses of it, or of the values that it is made of:
it turns quotients into products, puts operations into one kernel, where a product and a sum become
one operation with one rounding, and makes one product of two that share an operand. So the
equations that lead to such an amount become one node, a function of its own. On a CPU that is a
call that XLA doesn't inline, so that both passes run the same code; on a GPU, which has no such
calls, it stands between barriers.

Which equations belong together: those that lead, through equations alone, to the same other nodes
and outputs, their *ends*. What an equation uses has all of its ends and perhaps more; so between
groups there is no way back through equations. Nor is there one through another node: it would be an
end of the group that it comes from, and an equation that uses its results would have to have it as
an end, and lead to it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive, jaxpr_as_fun

from refs import _jax
from refs._reversible.encoded import Meaning
from refs._reversible.equations import Equation, Pullback
from refs._reversible.nodes import (
    Node,
    Operand,
    Solution,
    Step,
    Var,
    is_smooth,
    value_of,
    variables,
)
from refs._reversible.places import Literal
from refs._types import ClosedJaxpr, Value

if TYPE_CHECKING:
    from refs._reversible.backward import Backward


group_p = Primitive("group")  # its parameter is the jaxpr of the equations
group_p.multiple_results = True


class Group(Equation):
    """Equations that are evaluated apart."""

    def ways(self, known: Solution) -> Iterator[Step]:
        yield from self.own_way(known)

    def linearized(self, run: Backward, values: Sequence[Value]) -> tuple[list[Value], Pullback]:
        out = list(self.run(values))
        return out, super().linearized(run, values)[1]


def grouped(nodes: Sequence[Node], outputs: Sequence[Operand]) -> Sequence[Node]:
    """The nodes of a body, with a `Group` of the equations of each exact amount."""
    exact = {id(node) for node in nodes if node.rounds}
    if not exact:
        return nodes
    users: dict[Var, list[Node]] = {}
    for node in nodes:
        for v in variables(node.ins):
            users.setdefault(v, []).append(node)
    of_body = {*variables(outputs)}
    # These are known from encoded values, perhaps when what they were computed from is not.
    apart = {node.x for node in nodes if isinstance(node, Meaning)}
    ends: dict[Node, frozenset[int]] = {}
    for node in reversed(nodes):
        if _is_member(node) and apart.isdisjoint(node.outs):
            after = {u for v in node.outs for u in users.get(v, ())}
            found = {e for u in after for e in ends.get(u, {id(u)})}
            found |= {id(v) for v in node.outs if v in of_body}
            ends[node] = frozenset(found)
    members: dict[frozenset[int], list[Equation]] = {}
    for node in nodes:
        if isinstance(node, Equation) and ends.get(node, frozenset()) & exact:
            members.setdefault(ends[node], []).append(node)
    group_of: dict[Node, Node] = {}
    for some in members.values():
        inside = {*some}
        shown = [
            v
            for node in some
            for v in node.outs
            if v in of_body or any(u not in inside for u in users.get(v, ()))
        ]
        group_of |= dict.fromkeys(some, _group(some, shown))
    return _in_order([group_of.get(node, node) for node in nodes])


def _is_member(node: Node) -> bool:
    """Whether a node is an equation of floats that may be evaluated at any time."""
    return type(node) is Equation and not node.eqn.effects and all(map(is_smooth, node.outs))


def _group(members: Sequence[Equation], outs: Sequence[Var]) -> Group:
    made = {v for node in members for v in node.outs}
    # Numbers are part of the function. Arrays are given to it.
    ins = list(
        dict.fromkeys(
            x for node in members for x in node.ins if x not in made and not _is_number(x)
        )
    )

    def compute(*values: Value) -> list[Value]:
        env: dict[Any, Value] = dict(zip(ins, values, strict=True))
        for node in members:
            operands = [env[x] if x in env else value_of(env, x) for x in node.ins]
            env.update(zip(node.outs, node.run(operands), strict=True))
        return [env[v] for v in outs]

    types = [_jax.AbstractArgument(x.aval) for x in ins]
    closed = jax.make_jaxpr(compute)(*types)
    traced = jax.make_jaxpr(lambda *xs: group_p.bind(*xs, jaxpr=closed))(*types)
    [eqn] = traced.jaxpr.eqns
    return Group(eqn, ins, outs, members[-1].line)


def _is_number(x: Operand) -> bool:
    return isinstance(x, Literal) and x.aval.ndim == 0


# -- The primitive ---------------------------------------------------------------------------------


def _run(*values: Value, jaxpr: ClosedJaxpr) -> list[Value]:
    fun = jaxpr_as_fun(jaxpr)

    def barred(*values: Value) -> list[Value]:
        return _barred(fun(*_barred(values)))

    return lax.platform_dependent(*values, cpu=_not_inlined(fun), default=barred)


def _derived(*values: Value, jaxpr: ClosedJaxpr) -> list[Value]:
    # It shares no operand with the group itself: XLA takes two barriers of one value for one.
    return jaxpr_as_fun(jaxpr)(*_barred(_barred(values)))


def _batched(
    size: int, operands: Sequence[Value], axes: Sequence[int | None], *, jaxpr: ClosedJaxpr
) -> dict[str, Any]:
    fun = jax.vmap(jaxpr_as_fun(jaxpr), in_axes=tuple(axes), axis_size=size)
    return {"jaxpr": jax.make_jaxpr(fun)(*operands)}


def _barred(values: Sequence[Value]) -> list[Value]:
    return [*map(lax.optimization_barrier, values)]


def _not_inlined(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun` as a call that XLA leaves as it is."""

    def inside(*args: Value) -> Any:
        with set_xla_metadata(inlineable=None):
            return fun(*args)

    def called(*args: Value) -> Any:
        with set_xla_metadata(inlineable="false"):
            return jax.jit(inside)(*args)

    return called


group_p.def_abstract_eval(lambda *avals, jaxpr: list(jaxpr.out_avals))
_jax.register_opaque(group_p, _run, _derived, _batched)


# -- The order -------------------------------------------------------------------------------------


def _in_order(nodes: Sequence[Node]) -> list[Node]:
    """The distinct nodes, each after those whose results it uses; else in the order given."""
    position = {node: k for k, node in reversed([*enumerate(nodes)])}
    maker = {v: node for node in position for v in node.outs}
    before = {node: {maker[v] for v in variables(node.ins) if v in maker} for node in position}
    waiting = {node: len(some) for node, some in before.items()}
    after: dict[Node, list[Node]] = {}
    for node, some in before.items():
        for other in some:
            after.setdefault(other, []).append(node)
    ready = [(position[node], k, node) for k, node in enumerate(position) if not waiting[node]]
    heapq.heapify(ready)
    found: list[Node] = []
    while ready:
        *_, node = heapq.heappop(ready)
        found.append(node)
        for other in after.get(node, ()):
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, (position[other], len(found), other))
    assert len(found) == len(position)
    return found
