"""The error about a write that can't be undone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeGuard

from refs import _jax
from refs._reversible.equations import Equation
from refs._reversible.flow import FlowNode
from refs._reversible.nodes import Body, Node, Operand, Solution, State, Var, state_of, variables
from refs._reversible.solve import closure
from refs._reversible.versions import Accumulate, Read, Write
from refs.errors import NotReversibleError


def explain(
    body: Body, hoped: Solution, user: Node, missing: Var, around: FlowNode | None
) -> NotReversibleError:
    """The error about a variable that the derivative at `user` needs, and that can't be found.

    It names the last write that can't be undone: of those that the variable depends on, the one
    whose later version is known and whose earlier one isn't. `hoped` is what would be known if all
    that the loop around carries could be undone. `around` is the loop or branch whose body it is,
    if what has run in it isn't known.
    """
    made_by = {v: node for node in body.nodes for v in node.outs}
    lost = [node for node in body.nodes if _is_lost(node, hoped)]
    behind = {*_behind(missing, hoped, made_by)}
    # What it would follow from, if the loop gave that back.
    found = closure(hoped, [missing]) if missing in hoped else ()
    states = {v.state for v in found} - {None}
    blamed = (
        [node for node in lost if behind & {*node.ins}]
        or [node for node in lost if not states.isdisjoint(map(state_of, node.outs))]
        or lost
    )
    unknown = user if isinstance(user, FlowNode) and missing is user.key else around
    if not blamed and unknown is not None:
        return NotReversibleError(
            f"reversible: the loop or branch at {unknown.line} can't be undone: {unknown.why}"
        )
    if not blamed:
        what = made_by[missing].line if missing in made_by else "the beginning"
        stuck = [node for node in body.nodes if _is_stuck(node, hoped)]
        why = f": `{stuck[-1].eqn.primitive}` at {stuck[-1].line} can't be undone" if stuck else ""
        return NotReversibleError(
            f"reversible: the derivative at {user.line} needs a value that was computed at {what}, "
            f"which doesn't follow from what is known at the end{why}. Update by sums, "
            "`a = a + f(b)`, keep it in a ref that isn't written again, or use refs.inverse or "
            "refs.checkpoint"
        )
    return _blame(_cause(blamed[-1], lost, hoped, made_by), hoped, made_by)


def _is_stuck(node: Node, known: Solution) -> TypeGuard[Equation]:
    """Whether the results of an equation are known, and an operand isn't."""
    has_results = isinstance(node, Equation) and len(node.outs) > 0
    return (
        has_results
        and all(v in known for v in node.outs)
        and any(v not in known for v in variables(node.ins))
    )


def _cause(node: Node, lost: list[Node], known: Solution, made_by: dict[Var, Node]) -> Node:
    """Of the writes that can't be undone the one because of which a sum can't: what it adds needs
    a ref as it was before that.
    """
    seen = {node}
    while isinstance(node, Accumulate):
        needed = {v.state for x in node.ins[1:] for v in _behind(x, known, made_by)} - {None}
        others = (n for n in lost if n not in seen)
        causes = [n for n in others if any(v.state in needed for v in variables(n.ins[:1]))]
        if not causes:
            break
        node = causes[-1]
        seen.add(node)
    return node


def _blame(node: Node, known: Solution, made_by: dict[Var, Node]) -> NotReversibleError:
    """The error about a write that can't be undone, or about the last one in a loop or branch."""
    if isinstance(node, FlowNode):
        for body, inside in zip(node.bodies, node.inside(known), strict=True):
            lost = [inner for inner in body.nodes if _is_lost(inner, inside)]
            if lost:
                makers = {v: n for n in body.nodes for v in n.outs}
                return _blame(_cause(lost[-1], lost, inside, makers), inside, makers)
    state = next(_states(node.outs), None)
    described = "a ref" if state is None else state.origin.describe()
    if isinstance(node, Equation):
        described = next(_states(node.ins)).origin.describe()
        return NotReversibleError(
            f"reversible: what `{node.eqn.primitive}` at {node.line} does to {described} can't be "
            "undone: write the ref outside of it, or use refs.checkpoint"
        )
    start = f"reversible: the write of {described} at {node.line} can't be undone: "
    if isinstance(node, Accumulate):
        reasons = _reasons(node.ins[1:], known, made_by)
        return NotReversibleError(
            f"{start}what it adds needs {reasons}. Write to another ref, keep the old value in "
            "one, or use refs.checkpoint"
        )
    if isinstance(node, Write):
        if not node.place.is_safe:
            return NotReversibleError(
                f"{start}its index is known only when the program runs, or an array that may name "
                "an element twice: only sums can be undone there, `ref[i] += x` at integers, "
                "`ref.at[i].add(x)` at arrays of them"
            )
        return NotReversibleError(f"{start}the old value is lost{_how(node, known, made_by)}")
    assert isinstance(node, FlowNode)
    return NotReversibleError(f"{start}{node.why}")


def _is_lost(node: Node, known: Solution) -> bool:
    """Whether a write, or a loop or branch with writes, can't be undone: of one ref at least."""
    before = [v for v in variables(node.ins) if v.state is not None and v not in known]
    if isinstance(node, Equation):  # a callback, for instance, or a function with its own rules
        return bool(before) and any(v in known for v in node.outs)
    return any(
        v.state is w.state
        for w in node.outs
        if not isinstance(node, Read) and w.state is not None and w in known
        for v in before
    )


def _behind(v: Operand, known: Solution, made_by: dict[Var, Node]) -> Iterator[Var]:
    """The unknown variables that one is made of."""
    rest, seen = [v], set[Operand]()
    while rest:
        v = rest.pop()
        if isinstance(v, Var) and v not in known and v not in seen:
            seen.add(v)
            yield v
            if v in made_by:
                rest += made_by[v].ins


def _reasons(operands: tuple[Operand, ...], known: Solution, made_by: dict[Var, Node]) -> str:
    """The unknown parts of refs, and results of operations, that operands are made of."""
    found = []
    for operand in operands:
        for v in _behind(operand, known, made_by):
            node = made_by.get(v)
            if isinstance(node, Read | Equation) and (state := next(_states(node.ins), None)):
                found.append(f"{state.origin.describe()} as it was at {node.line}")
            elif isinstance(node, Equation) and _jax.has_side_effects(node.eqn):
                found.append(
                    f"the result of `{node.eqn.primitive}` at {node.line}, which runs once"
                )
            elif node is None and v.state is None:
                where = ": in refs.Fixed only refs can" if known.is_exact else ""
                found.append(f"a part of the loop's carry that can't be undone{where}")
    return " and ".join(dict.fromkeys(found)) or "a value that is not known at the end"


def _states(operands: Iterable[Operand]) -> Iterator[State]:
    return filter(None, map(state_of, operands))


def _how(node: Write, known: Solution, made_by: dict[Var, Node]) -> str:
    """Why what a write overwrites is lost."""
    reads = set(variables(node.olds))
    makers = (made_by[v] for v in _forward(set(), node.value, made_by))
    if not reads and any(isinstance(n, Read) and n.ins[0] is node.before for n in makers):
        return (
            ", because what was read of it, and where, doesn't give it back. Write the part that "
            "is read, by constant numbers, `ref[...] = ref[...][constant_permutation]`, keep the "
            "old value in another ref, or use refs.checkpoint"
        )
    if not reads:
        return (
            ", because nothing that is known afterwards is made of it. Write to another ref, keep "
            "the old value in one, or use refs.checkpoint"
        )
    if isinstance(node.value, Var):
        for v in _forward(reads, node.value, made_by):
            maker = made_by[v]
            name = getattr(getattr(maker, "eqn", None), "primitive", None)
            if name is not None and v in known and any(x not in known for x in maker.ins):
                return (
                    f": `{name}` at {maker.line} can't be undone. Update by sums, `ref[...] += x`, "
                    "keep the old value in another ref, or use refs.inverse or refs.checkpoint"
                )
    exactly = (
        ": in refs.Fixed sums, moves and negation are undone, and products with a number, in "
        "loops with a known number of steps"
        if known.is_exact
        else ""
    )
    return (
        f"{exactly}. Update by sums, `ref[...] += x`, keep the old value in a ref, or use "
        "refs.checkpoint"
    )


def _forward(start: set[Var], end: Operand, made_by: dict[Var, Node]) -> Iterator[Var]:
    """The variables on the way back from `end` to `start`, the last first."""
    rest, seen = [*variables((end,))], set[Var]()
    while rest:
        v = rest.pop(0)
        if v in seen or v in start or v not in made_by:
            continue
        seen.add(v)
        yield v
        rest += variables(made_by[v].ins)
