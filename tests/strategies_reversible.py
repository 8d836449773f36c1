"""Random programs that `refs.reversible` can undo, for the laws.

A `Program` is a small tree of statements, whose `str` is Python text against the names `refs`,
`jnp`, `lax`, `jax` and `np`: state, arguments and `program(a, b, W, M)`. `refs` runs the text, and
so does the oracle, on NumPy arrays.

Each statement can be undone where what the refs hold after it is known: what it adds depends on
other refs, other parts, weights, and counters. The sinks `log`, `m` and `s` can't be undone, but
are only read at the end: what they held is never needed. Values stay small, so that little is lost
when sums are undone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from textwrap import indent
from typing import Any

from hypothesis import strategies as st

from tests.strategies_choices import Choices

STATE = """\
SHAPE = {shape}
SIZE, LAST = {size}, SHAPE[-1]
a = refs.new_ref(jnp.asarray(np.sin(1.0 + np.arange(SIZE)).reshape(SHAPE)))
b = refs.new_ref(jnp.asarray(np.cos(2.0 * np.arange(SIZE)).reshape(SHAPE)))
c = refs.new_ref(jnp.asarray(np.sin(0.3 + 3.0 * np.arange(SIZE)).reshape(SHAPE)))
n = refs.new_ref(jnp.asarray(np.int32({n})))
p = refs.new_ref(jnp.asarray(np.arange(4, dtype=np.int32)))
log = refs.new_ref(jnp.asarray(np.ones(3)))
m = refs.new_ref(jnp.asarray(np.full(SHAPE, 0.5)))
s = refs.new_ref(jnp.asarray(np.float64(0.2)))
W = jnp.asarray(np.cos(0.7 * np.arange(3 * SIZE)).reshape((3, *SHAPE)))
M = jnp.asarray(0.4 * np.sin(1.3 * np.arange(LAST * LAST)).reshape((LAST, LAST)))
"""
FLOATS, INTEGERS = ("a", "b", "c"), ("n", "p")
LOOPS = ("refs", "refs", "lax")
CELLS = (*FLOATS, *INTEGERS, "log", "m", "s")
RESULT = (
    "jnp.sum(jnp.sin(a[...]) * jnp.cos(b[...])) + jnp.sum(c[...] ** 2) + s[...] + "
    "jnp.sum(jnp.sin(log[...])) + jnp.sum(m[...] ** 2) + jnp.sin(n[...] * 0.1) * jnp.sum(a[...])"
)

# Parts of a shape that have no element in common, and are of one shape.
PARTS = {
    (4,): [(":2", "2:"), ("::2", "1::2"), ("1", "3"), ("0", "-1"), ("1:2", "3:")],
    (2, 3): [("0", "1"), (":, :1", ":, 1:2"), (":, 0", ":, 2"), ("0, 1", "1, -1"), ("1:", ":1")],
    (3,): [("0", "2"), (":1", "1:2")],
    (): [],
}
MOVES = {
    (4,): ["{r}[::-1]", "jnp.reshape(jnp.transpose(jnp.reshape({r}, (2, 2))), (4,))"],
    (2, 3): ["{r}[::-1]", "{r}[:, ::-1]", "{r}.T.reshape((2, 3))", "{r}.reshape((3, 2)).T"],
    (3,): ["{r}[::-1]"],
    (): ["jnp.reshape({r}, (1,))[0]"],
}


@dataclass(frozen=True)
class Function:
    """A function that a statement defines and uses."""

    params: str
    body: tuple[Statement, ...]
    result: str


@dataclass(frozen=True)
class Statement:
    """Text, in which `@0`, `@1`, … are names of functions."""

    text: str
    functions: tuple[Function, ...] = ()

    def lines(self, names: Iterator[int]) -> list[str]:
        text, lines = self.text, []
        for k, function in enumerate(self.functions):
            name = f"f{next(names)}"
            text = text.replace(f"@{k}", name)
            lines += [f"def {name}({function.params}):"]
            lines += [indent("\n".join(body_of(function.body, function.result, names)), "    ")]
        return [*lines, text]


def body_of(statements, result, names):
    return [*(x for s in statements for x in s.lines(names)), f"return {result}"]


@dataclass(frozen=True)
class Program:
    shape: tuple[int, ...]
    first: int  # what the counter `n` holds
    body: tuple[Statement, ...]

    def __str__(self):
        size = 4 if self.shape == (4,) else 6
        state = STATE.format(shape=self.shape, size=size, n=self.first)
        lines = body_of(self.body, RESULT, itertools.count())
        return f"{state}\ndef program(a, b, W, M):\n{indent(chr(10).join(lines), '    ')}\n"

    def _repr_pretty_(self, printer, cycle):
        printer.text("...")  # the law prints a script


def simpler(node):
    """What is left of a program without one of its statements, or of those around others."""
    for k, statement in enumerate(node.body):
        before, after = node.body[:k], node.body[k + 1 :]
        yield replace(node, body=before + after)
        for j, function in enumerate(statement.functions):
            yield replace(node, body=(*before, *function.body, *after))  # may make no sense
            for other in simpler(function):
                functions = (*statement.functions[:j], other, *statement.functions[j + 1 :])
                yield replace(node, body=(*before, replace(statement, functions=functions), *after))


@dataclass(frozen=True)
class Scope:
    """What statements may use.

    Attributes:
      handles: float refs that they may write, with their shapes.
      weights: arrays of the shape of the float refs.
      indices: numbers of steps, each less than the float refs' first dimension.
      locked: integer refs that they must not write.
      whiles: whether loops may have any number of steps: not inside of one that has.
    """

    handles: dict[str, tuple[int, ...]]
    weights: tuple[str, ...] = ("W[1]",)
    indices: tuple[str, ...] = ()
    locked: frozenset[str] = frozenset()
    whiles: bool = True
    depth: int = 0

    def inside(self, **changes):
        return replace(self, depth=self.depth + 1, **changes)


def programs(**features):
    """Programs. The arguments are those of `Builder`."""
    return st.integers(0, 2**64 - 1).map(lambda seed: Builder(seed, **features).program())


class Builder(Choices):
    """Draws statements.

    Attributes:
      is_exact: whether to leave out products, which `refs.Fixed` refuses.
      only_integers: whether float refs are only read.
    """

    def __init__(self, seed, *, is_exact=False, only_integers=False):
        super().__init__(seed)
        self.is_exact, self.only_integers = is_exact, only_integers
        self.count, self.size = 0, 12

    def program(self):
        self.shape = self.choose([(4,), (2, 3)])
        first = self.choose([0, 5, -3, 2**31 - 2])
        handles = {} if self.only_integers else dict.fromkeys(FLOATS, self.shape)
        return Program(self.shape, first, self.block(Scope(handles), self.between(2, 6)))

    def fresh(self, prefix):
        self.count += 1
        return f"{prefix}{self.count}"

    def block(self, scope, most):
        found = []
        for _ in range(most):
            if self.size > 0 or not found:
                self.size -= 1
                found.append(self.statement(scope))
        return tuple(found)

    def statement(self, scope):
        kinds: list[Any] = [self.count_up, self.integers, self.sink]
        if scope.handles:
            kinds += [self.update] * 5 + [self.part, self.part, self.at_index, self.at_index]
            kinds += [self.exchange, self.move, self.negative]
            kinds += [] if self.is_exact else [self.scaled, self.difference]
        if scope.depth < 3:
            kinds += [self.scan, self.scan, self.fori, self.fori, self.cond, self.switch]
            kinds += [self.wrapped] + [self.while_loop] * 2 * scope.whiles
            has_rows = self.shape in scope.handles.values()
            kinds += [self.rows] * 2 * has_rows
        return self.choose(kinds)(scope)

    # --- Values

    def integer(self, scope):
        return self.choose(["n[...]", "n[...]", f"p[{self.upto(3)}]", *scope.indices])

    def atom(self, scope, shape, index, without=()):
        """A value that can be added to `r[index]`, of a ref `r` of a shape."""
        readable = scope.handles or dict.fromkeys(FLOATS, self.shape)
        others = {r: of for r, of in readable.items() if r not in without}
        alike = [f"{r}[{index}]" for r, of in others.items() if of == shape]
        if shape == self.shape:
            alike += [f"{w}[{index}]" for w in scope.weights]
            if index == "...":
                alike += [f"({x} @ M)" for x in alike]
        numbers = [f"jnp.sum({r}[...])" for r in others]
        numbers += [f"jnp.sin(0.1 * {self.integer(scope)})", "0.3"]
        return self.choose([*alike * 3, *numbers])

    def value(self, scope, shape, index, without=(), more=()):
        x, y = (self.choose([self.atom(scope, shape, index, without)] * 2 + [*more]) for _ in "xy")
        number = f"jnp.sin(0.1 * {self.integer(scope)})"
        forms = ["jnp.sin({x})", "0.3 * jnp.tanh({x} * {y})", "0.3 * {x} * jnp.sin({y})"]
        forms += ["jnp.cos({x}) * {n}", "0.2 * {x}", "jnp.sin({x} + {y})"]
        return self.choose(forms).format(x=x, y=y, n=number)

    # --- Updates of float refs

    def handle(self, scope):
        return self.choose(sorted(scope.handles.items()))

    def update(self, scope, r=None, index="...", **options):
        r, shape = (r, scope.handles[r]) if r else self.handle(scope)
        x = self.value(scope, shape, index, (r,), **options)
        forms = ["{r}[{i}] += {x}", "{r}[{i}] -= {x}", "{r}.at[{i}].add({x})"]
        forms += ["{r}[{i}] = {r}[{i}] + {x}", "{r}[{i}] = {x} + {r}[{i}]"]
        forms += ["{r}[{i}] = {r}[{i}] - {x}"]
        forms += ["refs.addupdate({r}, ({i}), {x})"] if ":" not in index else []
        if index == "...":
            forms += ["old = {r}[...]\n{r}[...] = old + {x}", "{r}[...] = {r}[...] + {x} - 0.25"]
        return Statement(self.choose(forms).format(r=r, i=index, x=x))

    def part(self, scope):
        r, shape = self.handle(scope)
        if not PARTS[shape]:
            return self.update(scope, r)
        pair = self.choose(PARTS[shape])
        one, other = self.shuffled(pair)
        if self.maybe(one_in=4):
            return Statement(f"{r}[{one}], {r}[{other}] = {r}[{other}], {r}[{one}]")
        return self.update(scope, r, one, more=[f"{r}[{other}]"])

    def at_index(self, scope):
        r, shape = self.handle(scope)
        if not shape:
            return self.update(scope, r)
        options = [i for i in scope.indices if shape[0] >= 3 or i.startswith("two")]
        index = self.choose([*options * 3, f"n[...] % {shape[0]}", f"p[1] % {shape[0]}"])
        return self.update(scope, r, index)

    def exchange(self, scope):
        r, shape = self.handle(scope)
        others = [q for q, of in scope.handles.items() if of == shape and q != r]
        if not others:
            return self.update(scope, r)
        forms = ["{r}[...], {q}[...] = {q}[...], {r}[...]"]
        forms += ["old = {r}[...]\n{r}[...] = {q}[...]\n{q}[...] = old"]
        forms += ["{q}[...] = refs.swap({r}, ..., {q}[...])", "{q}[...] = -{r}.swap(-{q}[...])"]
        return Statement(self.choose(forms).format(r=r, q=self.choose(others)))

    def move(self, scope):
        r, shape = self.handle(scope)
        halves = "jnp.concatenate(jnp.split({r}, 2)[::-1])"
        moved = MOVES[shape] + [halves] * (not self.is_exact and shape in ((4,), (2, 3)))
        return Statement(f"{r}[...] = {self.choose(moved).format(r=f'{r}[...]')}")

    def negative(self, scope):
        r, shape = self.handle(scope)
        index = self.choose(["...", *(x for pair in PARTS[shape] for x in pair)])
        return Statement(f"{r}[{index}] = -{r}[{index}]")

    def scaled(self, scope):
        r, shape = self.handle(scope)
        index = self.choose(["...", "...", *(x for pair in PARTS[shape] for x in pair)])
        ways = ["{r}[{i}] *= 1.25", "{r}[{i}] /= 1.25", "{r}[{i}] = {r}[{i}] * -0.9"]
        return Statement(self.choose(ways).format(r=r, i=index))

    def difference(self, scope):
        r, shape = self.handle(scope)
        return Statement(f"{r}[...] = {self.value(scope, shape, '...', (r,))} - {r}[...]")

    # --- Integers, and what can't be undone

    def count_up(self, scope):
        ways = ["n[...] += 1", "n[...] -= 1", "refs.addupdate(n, ..., 1)"]
        return self.sink(scope) if "n" in scope.locked else Statement(self.choose(ways))

    def integers(self, scope):
        forms = {
            "n": ["n[...] ^= 5", "n[...] = n[...] ^ p[2]", "n[...] += p[0]", "n[...] = ~n[...]"],
            "p": ["p[...] += n[...]", "p[...] ^= 3", "p[...] = p[...][::-1]", "p[0] += p[1] * p[2]",
                  "p[1], p[2] = p[2], p[1]", "p[2:] -= p[:2]",
                  "p[0] = -p[0]", "p[n[...] % 4] += 7", "p[1:] -= n[...]"],
        }  # fmt: skip
        allowed = [form for r in INTEGERS if r not in scope.locked for form in forms[r]]
        if "p" not in scope.locked:
            allowed += [f"p[{i}] += jnp.int32({j})" for i in scope.indices for j in scope.indices]
        return Statement(self.choose(allowed)) if allowed else self.sink(scope)

    def sink(self, scope):
        index = self.choose(["n[...] % 3", "1", *scope.indices])
        x = self.value(scope, self.shape, "...")
        forms = [f"log[{index}] = jnp.sum({x})", f"m[...] = 0.9 * m[...] + 0.1 * {x}"]
        forms += [f"s[...] += jnp.sum({x})", f"m[0] = 0.5 * m[1] + jnp.sum({x})"]
        return Statement(self.choose(forms))

    # --- Control flow

    def inner(self, scope):
        return self.block(scope, self.between(1, 3))

    def scan(self, scope):
        w, k = self.fresh("w"), self.fresh("k")
        body = self.inner(scope.inside(weights=(*scope.weights, w), indices=(*scope.indices, k)))
        steps = "jnp.asarray(np.arange(3, dtype=np.int32))"
        more = ", reverse=True" if self.maybe(one_in=3) else ""
        call = f"{self.choose(LOOPS)}.scan(@0, {{init}}, ({steps}, W){more})"
        x = self.value(scope, self.shape, "...")
        if self.maybe():
            function = Function(f"_, {k}{w}", (Statement(f"{k}, {w} = {k}{w}"), *body), "_, None")
            return Statement(call.format(init="None"), (function,))
        function = Function(
            f"c_, {k}{w}",
            (Statement(f"{k}, {w} = {k}{w}"), *body),
            f"c_ + jnp.sum({x}), jnp.sum({self.value(scope, self.shape, '...')})",
        )
        text = f"c_, ys = {call.format(init='0.0 * jnp.sum(M)')}\ns[...] += c_ + jnp.sum(ys)"
        return Statement(text, (function,))

    def rows(self, scope):
        r = self.choose([r for r, of in scope.handles.items() if of == self.shape])
        t = self.fresh("t")
        handles = {q: of for q, of in scope.handles.items() if q != r} | {t: self.shape[1:]}
        body = self.inner(scope.inside(handles=handles))
        more = ", reverse=True" if self.maybe(one_in=3) else ""
        text = f"{self.choose(LOOPS)}.scan(@0, None, {r}{more})"
        return Statement(text, (Function(f"_, {t}", body, "_, None"),))

    def fori(self, scope):
        steps = self.choose([2, 3])
        i = self.fresh("two" if steps == 2 else "three")
        body = self.inner(scope.inside(indices=(*scope.indices, i)))
        function = Function(f"{i}, _", body, "_")
        return Statement(f"{self.choose(LOOPS)}.fori_loop(0, {steps}, @0, None)", (function,))

    def while_loop(self, scope):
        kind = self.upto(2)
        if kind == 0 and "n" not in scope.locked:  # the predicate reads a ref that the body writes
            inside = scope.inside(locked=scope.locked | {"n"}, whiles=False)
            start = self.fresh("start")
            test = Function("_", (), f"n[...] - {start} < {self.between(1, 3)}")
            body = (*self.inner(inside), Statement("n[...] += 1"), *self.inner(inside))
            text = f"{start} = n[...]\nrefs.while_loop(@0, @1, jnp.int32(0))"
            return Statement(text, (test, Function("_", body, "_")))
        k, inside = self.fresh("two"), scope.inside(locked=scope.locked | {"p"}, whiles=False)
        body = self.inner(replace(inside, indices=(*scope.indices, k)))
        if kind == 1:  # a bound that is known when the program runs
            text = "refs.fori_loop(0, p[0] % 2 + 1, @0, None)"
            return Statement(text, (Function(f"{k}, _", body, "_"),))
        test = Function(k, (), f"{k} < p[3] % 3")
        text = "refs.while_loop(@0, @1, jnp.int32(0))"
        return Statement(text, (test, Function(k, body, f"{k} + 1")))

    def branches(self, scope, count):
        which = self.choose(INTEGERS)
        inside = scope.inside(locked=scope.locked | {which})
        on = "n[...]" if which == "n" else f"p[{self.upto(3)}]"
        return on, tuple(Function("", self.inner(inside), "None") for _ in range(count))

    def cond(self, scope):
        on, functions = self.branches(scope, 2)
        test = self.choose(["% 2 == 0", "> 1", "% 3 != 1"])
        return Statement(f"{self.choose(LOOPS)}.cond({on} {test}, @0, @1)", functions)

    def switch(self, scope):
        on, functions = self.branches(scope, 3)
        return Statement(f"{self.choose(LOOPS)}.switch({on} % 3, [@0, @1, @2])", functions)

    def wrapped(self, scope):
        wrapper = self.choose(["jax.jit", "refs.jit", "refs.checkpoint", "refs.reversible"])
        return Statement(f"{wrapper}(@0)()", (Function("", self.inner(scope.inside()), "None"),))
