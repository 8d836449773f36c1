"""Random smooth functions over refs, under random stacks of transformations.

A `Stack` is Python text: state, a function `f0` of a vector, and functions `f1`, `f2`, …, each of
which transforms the one before and is a function of a vector again. All are smooth: what branches
and loops depend on is an integer, or further from its bound than any difference quotient reaches.

The state is `n`, which counts the calls of `f0`; `u`, a vector; and `s`, a number. Where lanes
share them, `u` is only read, and `n` and `s` are only accumulated into.
"""

from dataclasses import dataclass, replace
from textwrap import indent
from typing import Any

from hypothesis import strategies as st

from tests.strategies_choices import Choices

STATE = """\
n = refs.new_ref(jnp.array(0))
u = refs.new_ref(jnp.array([0.3, -0.7]))
s = refs.new_ref(jnp.array(0.2))
X = jnp.array([0.4, -0.9])
T = jnp.array([0.8, 0.6])
"""

# What a level is, given the function before: its text, after "def {new}(x):".
LEVELS = {
    "grad": "return refs.grad({old})(x)",
    "value_and_grad": "v, g = refs.value_and_grad({old})(x)\nreturn v * g",
    "grad of a ref": "r = refs.new_ref(x)\nreturn refs.grad(lambda r: {old}(r[...]))(r)",
    "grad of the state": "return refs.grad(lambda r: {old}(x))(u)",
    "vjp": "y, pullback = refs.vjp({old}, x)\nreturn pullback(y)[0]",
    "jacrev": "return refs.jacrev({old})(x)[..., 0] * T",
    "hessian": "return refs.hessian({old})(x)[0]",
    "jvp": "y, dy = refs.jvp({old}, (x,), (T,))\nreturn y + 0.5 * dy",
    "linearize": "y, f_jvp = refs.linearize({old}, x)\nreturn f_jvp(T) + 0.1 * f_jvp(x)",
    "jacfwd": "return refs.jacfwd({old})(x)[..., 0] * T",
    "vmap": "xs = jnp.stack([x, x + 10.0])\nreturn refs.vmap({old})(xs).sum(0)",
    "vmap over 1": (
        "xs = jnp.stack([x, x + 10.0], 1)\n"
        "return refs.vmap({old}, in_axes=-1, out_axes=-1)(xs).sum(-1)"
    ),
    "vmap over a ref": (
        "rows = refs.new_ref(jnp.stack([x, x + 10.0], 1))\n"
        "def lane(r):\n"
        "    r[...] = jnp.sin(r[...]) + {old}(r[...])\n"
        "refs.vmap(lane, in_axes=1)(rows)\n"
        "return rows[...].sum(1)"
    ),
    "scan": (
        "def step(c, k):\n"
        "    return c + {old}(k * x), k\n"
        "return refs.scan(step, 0.0 * T.sum(), jnp.array([1.0, 0.5]))[0]"
    ),
    "cond": "return refs.cond(x[0] > 3.0, {old}, lambda x: 0.5 * {old}(x), x)",
    "jit": "return refs.jit({old})(x)",
    "checkpoint": "return refs.checkpoint({old})(x)",
}
GRADS = {"grad", "value_and_grad", "grad of a ref", "grad of the state"}
BACKWARD = GRADS | {"vjp", "jacrev", "hessian"}
OF_SCALARS = GRADS | {"hessian", "scan"}
FORWARD = {"jvp", "linearize", "jacfwd"}
TO_VECTOR = BACKWARD | {"jacfwd", "vmap over a ref"}
SUM = "sum"
# How often the function before is evaluated where derivatives are difference quotients.
COST = {"jvp": 7, "hessian": 170, "vmap": 2, "vmap over 1": 2, "vmap over a ref": 2, "scan": 2}
COST |= dict.fromkeys(("checkpoint", "jit", "cond", SUM), 1)
MOST = 3000


@dataclass(frozen=True)
class Stack:
    body: tuple[str, ...]
    levels: tuple[str, ...]

    def __str__(self):
        functions = [f"def f0(x):\n{indent(chr(10).join(self.body), '    ')}\n"]
        for k, level in enumerate(self.levels):
            text = LEVELS.get(level, "return ({old}(x) * T).sum()").format(old=f"f{k}")
            functions.append(f"def f{k + 1}(x):\n{indent(text, '    ')}\n")
        return "\n".join([STATE, *functions])

    @property
    def top(self):
        return f"f{len(self.levels)}"

    def _repr_pretty_(self, printer, cycle):
        printer.text("...")  # the law prints a script


def stacks():
    return st.integers(0, 2**64 - 1).map(lambda seed: StackBuilder(seed).stack())


class StackBuilder(Choices):
    """Draws stacks. Statements are text; a scope is the names of numbers and vectors in it."""

    def stack(self):
        forward = self.maybe(one_in=4)
        drawn = sorted(LEVELS.keys() - (BACKWARD if forward else set()))
        drawn += sorted(FORWARD) if forward else ["grad", "grad", "vmap"]
        self.lanes, self.forward = self.maybe(), forward
        if not self.lanes:
            drawn = [level for level in drawn if not level.startswith("vmap")]
        while True:
            levels, is_scalar, cost, order = [], True, 1, 0
            depth = self.between(3, 5)
            while len([level for level in levels if level != SUM]) < depth:
                level = self.choose(drawn)
                if level in OF_SCALARS and not is_scalar:
                    levels.append(SUM)
                    is_scalar = True
                levels.append(level)
                is_scalar = is_scalar and level not in TO_VECTOR
                cost *= COST.get(level, 13)
                order += level in BACKWARD | FORWARD
            if cost <= MOST and order:
                break
        self.counts: dict[str, int] = {}
        self.refs: list[str] = []  # vectors, made inside
        body = ["n[...] += 1", "far = x[0] > 3.0", *self.block(["x[0]"], ["x"], 2)]
        return Stack(tuple(body), tuple(levels))

    def fresh(self, prefix):
        self.counts[prefix] = self.counts.get(prefix, 0) + 1
        return f"{prefix}{self.counts[prefix] - 1}"

    def block(self, numbers, vectors, depth):
        """Statements, the last of which returns a number."""
        numbers, vectors, known = [*numbers], [*vectors], [*self.refs]
        lines = []
        for _ in range(self.between(1, 3) if depth == 2 else 1):
            lines.append(self.statement(numbers, vectors, depth))
        result = f"{self.number(numbers, vectors)} + {' + '.join([*numbers[-2:], '0.1'])}"
        self.refs = known
        return [*lines, f"return {result}"]

    def statement(self, numbers, vectors, depth):
        kinds: list[Any] = [self.let, self.write_s, self.write_s, self.make_ref]
        kinds += [self.write_ref] * 3 if self.refs else []
        kinds += [] if self.lanes else [self.write_u, self.write_u]
        if depth:
            kinds += [self.scan, self.fori, self.cond, self.wrapped]
            kinds += [self.while_loop] * 2 if self.forward else []
        return self.choose(kinds)(numbers, vectors, depth)

    # --- Values ---

    def number(self, numbers, vectors):
        a, b = self.atom(numbers, vectors), self.atom(numbers, vectors)
        forms = ("jnp.sin({a})", "jnp.sin({a}) * {b}", "jnp.cos({a} + {b})", "0.4 * {a} + {b}")
        return self.choose(forms).format(a=a, b=b)

    def atom(self, numbers, vectors):
        atoms = [*numbers, *numbers, f"{self.choose(vectors)}[{self.upto(1)}]"]
        atoms += [f"u[{self.upto(1)}]", f"jnp.sin({self.choose(vectors)}).sum()"]
        atoms += [] if self.lanes else ["s[...]", "s[...]"]
        atoms += [f"{r}[{self.between(-2, 1)}]" for r in self.refs]
        return self.choose(atoms)

    def vector(self, numbers, vectors):
        number = self.number(numbers, vectors)
        more = ["u[...]", "u[::-1]", *(f"{r}[...]" for r in self.refs)]
        a, b = self.choose(vectors + more), self.choose(vectors + more)
        forms = ("jnp.sin({a}) * {b}", "jnp.sin({b}) + {c}", "jnp.cos({a}) * ({c})")
        return self.choose(forms).format(a=a, b=b, c=number)

    # --- Statements ---

    def let(self, numbers, vectors, depth):
        if self.maybe():
            value, names = self.number(numbers, vectors), numbers
        else:
            value, names = self.vector(numbers, vectors), vectors
        names.append(self.fresh("v"))
        return f"{names[-1]} = {value}"

    def write_s(self, numbers, vectors, depth):
        value = self.number(numbers, vectors)
        ways = ["s[...] += {}", "refs.addupdate(s, ..., {})", "s.at[...].add({})"]
        ways += [] if self.lanes else ["s[...] = {}", "s.set(jnp.sin(s[...]) * ({}))"]
        return self.choose(ways).format(value)

    def write_u(self, numbers, vectors, depth):
        return self.write("u", numbers, vectors)

    def write_ref(self, numbers, vectors, depth):
        return self.write(self.choose(self.refs), numbers, vectors)

    def write(self, ref, numbers, vectors):
        if self.maybe():
            i, value = self.between(-2, 1), self.number(numbers, vectors)
            ways = ("{r}[{i}] = {x}", "{r}[{i}] += {x}", "{r}[{i}] *= jnp.cos({x})")
            ways += ("{r}.at[{i}].add({x})", "refs.swap({r}, {i}, {x})")
            return self.choose(ways).format(r=ref, i=i, x=value)
        ways = ("{r}[...] = {x}", "{r}[::-1] = {x}", "{r}[::-1] += {x}", "{r}.at[...].add({x})")
        return self.choose(ways).format(r=ref, x=self.vector(numbers, vectors))

    def make_ref(self, numbers, vectors, depth):
        value, name = self.vector(numbers, vectors), self.fresh("r")
        self.refs.append(name)
        return f"{name} = refs.new_ref({value})"

    # --- Control flow ---

    def function(self, params, lines):
        name = self.fresh("g")
        return name, f"def {name}({params}):\n" + indent("\n".join(lines), "    ")

    def scan(self, numbers, vectors, depth):
        over = self.vector(numbers, vectors)
        t = self.fresh("t")  # not one name for all: inside, the outer row is another thing
        rows, row = over, t
        inside = [*self.refs]
        if self.refs and self.maybe():
            rows = self.choose(self.refs)
            self.refs, row = [r for r in self.refs if r != rows], f"{t}[...]"
        lines = self.block([*numbers, "c", row], vectors, depth - 1)
        if row != t:
            lines.insert(len(lines) - 1, f"{t}[...] += jnp.sin(c)")
        lines[-1] = f"return jnp.cos({lines[-1].removeprefix('return ')}), jnp.sin(c)"
        self.refs = inside
        name, text = self.function(f"c, {t}", lines)
        init = self.number(numbers, vectors)
        numbers.append(self.fresh("v"))
        vectors.append(self.fresh("v"))
        reverse = ", reverse=True" if self.maybe() else ""
        loops = self.choose(("lax", "refs"))
        names = f"{numbers[-1]}, {vectors[-1]}"
        return f"{text}\n{names} = {loops}.scan({name}, {init}, {rows}{reverse})"

    def fori(self, numbers, vectors, depth):
        lines = self.block([*numbers, "c", "u[k]"], vectors, depth - 1)
        name, text = self.function("k, c", lines)
        init = self.number(numbers, vectors)
        numbers.append(self.fresh("v"))
        loops = self.choose(("lax", "refs"))
        return f"{text}\n{numbers[-1]} = {loops}.fori_loop(0, 2, {name}, {init})"

    def while_loop(self, numbers, vectors, depth):
        lines = self.block([*numbers, "kc[1]"], vectors, depth - 1)
        lines[-1] = f"return kc[0] + 1, {lines[-1].removeprefix('return ')}"
        name, text = self.function("kc", lines)
        limit = "jnp.where(far, 1, 2)"
        init = f"(jnp.array(0), {self.number(numbers, vectors)})"
        numbers.append(self.fresh("v"))
        loop = f"{self.choose(('lax', 'refs'))}.while_loop(lambda kc: kc[0] < {limit}, {name}, "
        return f"{text}\n_, {numbers[-1]} = {loop}{init})"

    def cond(self, numbers, vectors, depth):
        branches = [self.block([*numbers, "c"], vectors, depth - 1) for _ in range(2)]
        (a, one), (b, two) = (self.function("c", lines) for lines in branches)
        operand = self.number(numbers, vectors)
        numbers.append(self.fresh("v"))
        loops = self.choose(("lax", "refs"))
        return f"{one}\n{two}\n{numbers[-1]} = {loops}.cond(far, {a}, {b}, {operand})"

    def wrapped(self, numbers, vectors, depth):
        name, text = self.function("c", self.block([*numbers, "c"], vectors, depth - 1))
        operand = self.number(numbers, vectors)
        numbers.append(self.fresh("v"))
        wrapper = self.choose(("jax.jit", "refs.jit", "jax.checkpoint", "refs.checkpoint"))
        return f"{text}\n{numbers[-1]} = {wrapper}({name})({operand})"


def simpler(stack):
    """What is left of a stack without a level or a statement. Some of it makes no sense."""
    for k in range(len(stack.levels)):
        yield replace(stack, levels=(*stack.levels[:k], *stack.levels[k + 1 :]))
    for k in range(1, len(stack.body) - 1):
        yield replace(stack, body=(*stack.body[:k], *stack.body[k + 1 :]))
