"""The smallest program that fails like a given one.

Candidates are made from the program's data, and need no care: one that makes no sense is an error
in the oracle, and no candidate. What is left out or put in is never what the generator avoids.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from tests.strategies_indices import EVERYTHING, Index, Int, IntArray, TracedInt, Window
from tests.strategies_lanes import Vmap
from tests.strategies_syntax import (
    Add,
    At,
    Block,
    Call,
    Cond,
    Fori,
    Let,
    Literal,
    MakeEmptyRef,
    Name,
    Program,
    Read,
    Scan,
    Store,
    Swap,
    Switch,
    Type,
    Update,
    While,
    Wrapped,
)

SECONDS = 120


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """The simplest program found, by taking every step that leaves a failure."""
    deadline = time.monotonic() + SECONDS
    progress = True
    while progress:
        progress, position = False, 0
        candidates = list(simpler(program))
        while position < len(candidates) and time.monotonic() < deadline:
            if fails(candidates[position]):
                program, progress = candidates[position], True
                candidates = list(simpler(program))
            else:
                position += 1
    return program


def simpler(node: Any) -> Iterator[Any]:
    """All that a single step makes of a program or a part of it, large steps first."""
    yield from steps(node)
    if isinstance(node, tuple) and not isinstance(node, Type):
        for i, child in enumerate(node):
            for new in simpler(child):
                yield (*node[:i], new, *node[i + 1 :])
    elif is_dataclass(node):
        for field in fields(node):
            for new in simpler(getattr(node, field.name)):
                yield replace(node, **{field.name: new})


def steps(node: Any) -> Iterator[Any]:
    match node:
        case Program():
            yield from without_arguments(node)
        case Block():
            yield from without_statements(node)
        case Cond() | Switch():
            for k in range(len(node.names)):
                branches = tuple(replace(b, result=without(b.result, k)) for b in node.branches)
                yield replace(node, names=without(node.names, k), branches=branches)
            for k in range(len(node.operands)):
                branches = tuple(replace(b, params=without(b.params, k)) for b in node.branches)
                yield replace(node, operands=without(node.operands, k), branches=branches)
        case Wrapped(block=block):
            for k in range(len(node.names)):
                small = replace(block, result=without(block.result, k))
                yield replace(node, names=without(node.names, k), block=small)
            for k in range(len(node.operands)):
                small = replace(block, params=without(block.params, k))
                yield replace(node, operands=without(node.operands, k), block=small)
        case Vmap(block=block):
            for k in range(len(node.names)):
                small = replace(block, result=without(block.result, k))
                axes = without(node.out_axes, k)
                yield replace(node, names=without(node.names, k), block=small, out_axes=axes)
            for k in range(len(node.operands)):
                small = replace(block, params=without(block.params, k))
                axes = without(node.in_axes, k)
                yield replace(node, operands=without(node.operands, k), block=small, in_axes=axes)
        case Fori() | While():
            yield from without_carries(node)
        case Scan():
            yield from simpler_scans(node)
        case Literal() | Name():
            pass
        case Call(type, fun, args):
            # What `small` lets through is small; so is a literal.
            if fun != "small":
                yield from (x for x in args if getattr(x, "type", None) == type)
            yield plain(type)
        case Read(type):
            yield plain(type)
            if node.how != "brackets" and not is_view(node.ref):
                yield replace(node, how="brackets")
        case At(base=base):
            yield base
        case Store() | Add() | Swap() | Update() if isinstance(node.ref, At):
            yield replace(node, ref=node.ref.base)
        case Store(how="function" | "view") | Add(how="function" | "view"):
            if not is_view(node.ref):
                yield replace(node, how="brackets")
        case Index(items) if node != EVERYTHING:
            yield EVERYTHING
            for k in range(len(items)):
                yield Index(without(items, k))
        case TracedInt() | IntArray():
            yield Int(0)
        case Window(_, size, room, stride):
            yield Window(0, size, room, stride)


def plain(type: Type) -> Literal:
    """A literal of ones."""
    one = {"bool_": True, "complex64": 1 + 0j}.get(type.dtype, 1)
    values: Any = one
    for size in reversed(type.shape):
        values = (values,) * size
    return Literal(type, values)


def is_view(ref: Any) -> bool:
    return isinstance(ref, At) or ref.view


def without(items: tuple, k: int) -> tuple:
    return (*items[:k], *items[k + 1 :])


# --- Steps of larger parts ----------------------------------------------------------------------


def without_arguments(program: Program) -> Iterator[Program]:
    for k in range(len(program.args)):
        block = replace(program.block, params=without(program.block.params, k))
        yield replace(program, args=without(program.args, k), block=block)
    for k in range(len(program.cells)):
        yield replace(program, cells=without(program.cells, k))
    for k in range(len(program.inputs)):
        yield replace(program, inputs=without(program.inputs, k))


def without_statements(block: Block) -> Iterator[Block]:
    body = block.body
    for k in reversed(range(len(body))):
        if k and isinstance(body[k - 1], MakeEmptyRef):
            continue  # this is what fills it
        yield replace(block, body=without(body, k))
    for k, statement in enumerate(body):
        for inline in inlined(statement):
            yield replace(block, body=(*body[:k], *inline, *body[k + 1 :]))
    # A loop's results are its carry; a program's are its own affair.
    if block.name == "program":
        for k in range(len(block.result)):
            yield replace(block, result=without(block.result, k))


def inlined(statement: Any) -> Iterator[list[Any]]:
    """The statements of an inner function, as if it were called once where it stands."""
    match statement:
        case Cond(names, _, branches, operands) | Switch(names, _, branches, operands):
            for block in branches:
                yield [*lets(block.params, operands), *block.body, *lets(names, block.result)]
        case Wrapped(names, _, block, operands):
            yield [*lets(block.params, operands), *block.body, *lets(names, block.result)]
        case Fori(names, _, _, block, init):
            params = lets(block.params, (plain(Type("int32")), init))
            yield [*params, *block.body, *lets(names, block.result)]
        case While(names, _, block, init):
            yield [*lets(block.params, (init,)), *block.body, *lets(names, block.result)]
        case Scan((names, _), block, init, xs) if not xs or not any(map(is_ref, xs)):
            rows = tuple(plain(Type(x.type.dtype, x.type.shape[1:])) for x in xs)
            arguments = (init, rows) if xs else (init,)
            params = lets(block.params[: len(arguments)], arguments)
            yield [*params, *block.body, *lets(names, block.result[0])]


def lets(names: Any, values: Any) -> list[Let]:
    """`names = values`, name by name."""
    if isinstance(names, str):
        return [Let(names, values)]
    return [let for pair in zip(names, values, strict=True) for let in lets(*pair)]


def is_ref(x: Any) -> bool:
    return isinstance(x, Name) and x.name.startswith(("r", "g"))


def without_carries(loop: Fori | While) -> Iterator[Any]:
    for k in range(len(loop.names)):
        *index, carry = loop.block.params
        block = replace(
            loop.block,
            params=(*index, without(carry, k)),
            result=without(loop.block.result, k),
        )
        small = replace(loop, names=without(loop.names, k), init=without(loop.init, k), block=block)
        if isinstance(small, While):
            pred = replace(small.pred, params=(without(small.pred.params[0], k),))
            small = replace(small, pred=pred)
        yield small


def simpler_scans(scan: Scan) -> Iterator[Scan]:
    (carry, rows), (carried, out) = scan.block.params, scan.block.result
    names, stacked = scan.names
    for k in range(len(names)):
        block = replace(
            scan.block, params=(without(carry, k), rows), result=(without(carried, k), out)
        )
        init = without(scan.init, k)
        yield replace(scan, names=(without(names, k), stacked), init=init, block=block)
    for k in range(len(stacked)):
        block = replace(scan.block, result=(carried, without(out, k)))
        yield replace(scan, names=(names, without(stacked, k)), block=block)
    for k in range(len(scan.xs)):
        params = (carry, without(rows, k) or "_")
        yield replace(scan, xs=without(scan.xs, k), block=replace(scan.block, params=params))
    if scan.reverse:
        yield replace(scan, reverse=False)
    if scan.unroll != 1:
        yield replace(scan, unroll=1)
