"""How loops and branches over refs become nodes.

A loop over refs takes as constants the refs that it only reads, and carries those that it writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from refs import _jax
from refs._reversible.branches import Branch
from refs._reversible.build import RULES, Builder, Cell, Inner, Row
from refs._reversible.nodes import Node, Operand, Solution, Source, Step, Var
from refs._reversible.scans import Scan
from refs._reversible.whiles import While
from refs._tracing import touch_analysis
from refs._types import ClosedJaxpr, Eqn, Value
from refs.errors import MissingRuleError


def _cells_in(
    b: Builder, calls: Sequence[tuple[ClosedJaxpr, Sequence[Any]]]
) -> Iterator[tuple[Cell, bool]]:
    """The cells that jaxprs touch, each with whether it is changed."""
    for closed, args in calls:
        found = touch_analysis.touches(closed)
        for a, kind in zip(args, found.inputs, strict=True):
            if isinstance(a, Cell | Row):
                yield (a.cell if isinstance(a, Row) else a), kind.changes
        # JAX makes operands of the refs that loops and branches close over.
        assert not touch_analysis.closed_over(closed)


def _split(
    b: Builder, calls: Sequence[tuple[ClosedJaxpr, Sequence[Any]]]
) -> tuple[list[Cell], list[Cell]]:
    """The cells that jaxprs only read, and those that they change."""
    changed: dict[int, bool] = {}
    cells: dict[int, Cell] = {}
    for cell, changes in _cells_in(b, calls):
        cells[id(cell)] = cell
        changed[id(cell)] = changed.get(id(cell), False) or changes
    read = [c for key, c in cells.items() if not changed[key]]
    return read, [c for key, c in cells.items() if changed[key]]


def _is_array(a: Any) -> bool:
    return not isinstance(a, Cell | Row)


def _continue(
    b: Builder, node: Node, written: Sequence[Cell], after: Sequence[Var], saved: Sequence[Var]
) -> None:
    """Adds a node that writes cells."""
    b.add(node)
    b.saved += saved
    for cell, version in zip(written, after, strict=True):
        cell.version = version


def _scan(b: Builder, eqn: Eqn, args: Sequence[Any]) -> list[Any]:
    p = _jax.scan_params(eqn)
    args = [args[k] for k in p.order]
    line = _jax.user_line(eqn)
    first = p.num_consts + p.num_carry
    given = [*args[:first], *(Row(a) if isinstance(a, Cell) else a for a in args[first:])]
    # JAX's scan takes a ref once, under whatever names: so a row and its ref aren't both used.
    uses = [id(a.cell if isinstance(a, Row) else a) for a in given if not _is_array(a)]
    assert len(uses) == len(set(uses))
    read, written = _split(b, [(p.jaxpr, given)])
    x = b.inner(p.jaxpr, given, [*read, *written], p.length, p.num_consts)
    n_read, n_consts = len(read), sum(map(_is_array, given[: p.num_consts]))
    n_arrays = n_consts + p.num_carry
    has_rows = not all(map(_is_array, given[first:]))
    body = x.body(
        [
            *x.versions[:n_read], *x.arrays[:n_consts],
            *x.versions[n_read:], *(u.first for u in x.buffers), *x.arrays[n_consts:n_arrays],
            *([x.index] if has_rows else []), *x.arrays[n_arrays:],
        ],
        [*x.last[n_read:], *(u.last for u in x.buffers), *x.results],
    )  # fmt: skip
    arrays = [a for a in given if _is_array(a)]
    steps: list[Var] = []
    if has_rows:
        steps = [Var(_jax.array_type((p.length,), jnp.int32))]
        b.add(Steps(p.length, steps[0], line))
    ins = [
        *(c.version for c in read), *arrays[:n_consts],
        *(c.version for c in written), *(u.first for u in x.outside), *arrays[n_consts:n_arrays],
        *steps, *arrays[n_arrays:],
    ]  # fmt: skip
    after = [Var(c.version.aval, c.state) for c in written]
    outs = [Var(v.aval) for v in eqn.outvars]
    node = Scan(
        body,
        ins,
        [*after, *(u.last for u in x.outside), *outs],
        n_read + n_consts,
        len(written) + len(x.outside) + p.num_carry,
        p.length,
        p.reverse,
        p.unroll,
        line,
    )
    _continue(b, node, written, after, node.saved)
    return outs


def _while(b: Builder, eqn: Eqn, args: Sequence[Any]) -> list[Any]:
    line = _jax.user_line(eqn)
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts, body_consts = args[:n_cond], args[n_cond : n_cond + n_body]
    carry = args[n_cond + n_body :]
    test, step = (_jax.as_closed(eqn.params[k]) for k in ("cond_jaxpr", "body_jaxpr"))
    test_args, step_args = [*cond_consts, *carry], [*body_consts, *carry]
    _, changed = _split(b, [(test, test_args)])
    if changed:
        raise MissingRuleError(
            f"reversible: the predicate of the while_loop at {line} writes "
            f"{changed[0].describe()}: write it in the body"
        )
    read, written = _split(b, [(test, test_args), (step, step_args)])
    cells = [*read, *written]
    x = b.inner(test, test_args, cells, None, n_cond)
    y = b.inner(step, step_args, cells, None, n_body)
    n_read = len(read)

    def inputs(x: Inner, consts: Sequence[Any]) -> list[Var]:
        n = sum(map(_is_array, consts))
        return [*x.versions[:n_read], *x.arrays[:n], *x.versions[n_read:], *x.arrays[n:]]

    before: list[Operand] = [c.version for c in read]
    own = [a for a in body_consts if _is_array(a)]
    after = [Var(c.version.aval, c.state) for c in written]
    outs = [Var(v.aval) for v in eqn.outvars]
    node = While(
        x.body(inputs(x, cond_consts), x.results),
        y.body(inputs(y, body_consts), [*y.last[n_read:], *y.results]),
        [*before, *own, *(c.version for c in written), *carry],
        [*before, *(a for a in cond_consts if _is_array(a))],
        [*after, *outs],
        n_read + len(own),
        line,
    )
    _continue(b, node, written, after, [node.count])
    return outs


def _cond(b: Builder, eqn: Eqn, args: Sequence[Any]) -> list[Any]:
    index, *operands = args
    branches = [_jax.as_closed(x) for x in eqn.params["branches"]]
    read, written = _split(b, [(x, operands) for x in branches])
    inner = [b.inner(x, operands, [*read, *written], 1, len(operands)) for x in branches]
    outside = [u for x in inner for u in x.outside]
    bodies = []
    for x in inner:
        own = dict(zip(map(id, x.outside), x.buffers, strict=True))
        # Each branch is given the buffers of all of them, and returns the others' as they are.
        buffers = [own.get(id(u), u) for u in outside]
        others = {id(u): Var(u.first.aval) for u in outside if id(u) not in own}
        first = [others.get(id(u), w.first) for u, w in zip(outside, buffers, strict=True)]
        last = [others.get(id(u), w.last) for u, w in zip(outside, buffers, strict=True)]
        bodies.append(
            x.body([*x.versions, *first, *x.arrays], [*x.last[len(read) :], *last, *x.results])
        )
    after = [Var(c.version.aval, c.state) for c in written]
    outs = [Var(v.aval) for v in eqn.outvars]
    versions = [c.version for c in (*read, *written)]
    node = Branch(
        bodies,
        [index, *versions, *(u.first for u in outside), *filter(_is_array, operands)],
        [*after, *(u.last for u in outside), *outs],
        _jax.user_line(eqn),
    )
    _continue(b, node, written, after, node.saved)
    return outs


class Steps(Source):
    """The numbers of the steps of a scan, from 0: an array of int32."""

    def __init__(self, length: int, out: Var, line: str):
        self.length, self.outs, self.line = length, (out,), line

    def run(self, values: Sequence[Value]) -> list[Value]:
        return [lax.iota(jnp.int32, self.length)]

    def ways(self, known: Solution) -> Iterator[Step]:
        yield from self.own_way(known)


RULES |= {_jax.scan_p: _scan, _jax.while_p: _while, _jax.cond_p: _cond}
