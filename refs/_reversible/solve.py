"""What follows from what is known at the end of a body.

`solve` takes steps, each a way of a node, until no node has another one. Of several possible steps
those come first that read or evaluate, then those that undo a write, then inverses of operations on
arrays, which may be badly conditioned; and among equals the last in the program, because the
backward pass meets it first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from refs._reversible.nodes import Body, Node, Solution, Step, Var


def solve(body: Body, given: Iterable[Var], is_exact: bool) -> Solution:
    """All that can be known of a body's variables, where `given` are known."""
    # A loop asks whenever one more of its operands is known, and for a nested one each time again.
    key = frozenset(given), is_exact
    if key not in body.solutions:
        body.solutions[key] = _solved(body, Solution(*key, body.is_careful))
    return body.solutions[key]


def _solved(body: Body, known: Solution) -> Solution:
    position = {node: k for k, node in enumerate(body.nodes)}
    watchers: dict[Var, list[Node]] = {}
    for node in body.nodes:
        for v in node.watched:
            watchers.setdefault(v, []).append(node)
    heap: list[tuple[int, int, int, Step]] = []
    n = 0

    def offer(node: Node) -> None:
        nonlocal n
        for step in node.ways(known):
            n += 1
            heapq.heappush(heap, (0 if step.runs else node.rank, -position[node], n, step))
            known.offered.update((node, v) for v in step.gives if not step.runs)

    for node in body.nodes:
        offer(node)
    while heap:
        *_, step = heapq.heappop(heap)
        new = [v for v in step.gives if v not in known]
        for v in new:
            known.steps[v] = step
        for node in {id(w): w for v in new for w in watchers.get(v, ())}.values():
            offer(node)
    return known


def closure(known: Solution, wanted: Iterable[Var]) -> set[Var]:
    """The variables that the steps to the `wanted` ones go through, given ones included."""
    found: set[Var] = set()
    rest = [*wanted]
    while rest:
        v = rest.pop()
        if v not in found:
            found.add(v)
            if v not in known.given:
                rest += known.steps[v].deps
    return found
