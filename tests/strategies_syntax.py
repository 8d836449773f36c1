"""The programs that `tests/strategies.py` draws, as data, and how they become Python text.

Every node is a small frozen dataclass and `str` of it is its source. Nothing is decided here: a
node that makes no sense (an index that doesn't fit, a name that isn't there) renders all the same.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import indent
from typing import Any, NamedTuple

from tests.strategies_indices import EVERYTHING, Index, nested


class Type(NamedTuple):
    """The type of an array, or of what a ref holds."""

    dtype: str
    shape: tuple[int, ...] = ()


Names = tuple[str, ...]

# --- Expressions --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Name:
    """A value, a ref or a view that has a name."""

    type: Type
    name: str
    view: bool = False

    def __str__(self):
        return self.name


@dataclass(frozen=True)
class Literal:
    type: Type
    values: Any

    def __str__(self):
        if not self.type.shape:
            return f"jnp.{self.type.dtype}({self.values})"
        if 0 in self.type.shape:
            return f"jnp.zeros({self.type.shape}, jnp.{self.type.dtype})"
        return f"jnp.array({nested(self.values)}, jnp.{self.type.dtype})"


@dataclass(frozen=True)
class At:
    """`base.at[index]`, a view."""

    type: Type
    base: Any
    index: Index

    def __str__(self):
        return f"{self.base}.at[{self.index}]"


@dataclass(frozen=True)
class Read:
    type: Type
    ref: Any
    index: Index
    how: str  # "brackets" | "function" | "view"

    def __str__(self):
        match self.how:
            case "brackets":
                return f"{self.ref}[{self.index}]"
            case "function":
                return f"refs.get({self.ref}, {self.index.argument()})"
        return f"{place(self.ref, self.index)}.get()"


@dataclass(frozen=True)
class Call:
    """`fun(*args)`, an operator or a method of the first argument.

    `fun` says which: "jnp.where", "+" or ".astype(jnp.int32)".
    """

    type: Type
    fun: str
    args: tuple

    def __str__(self):
        args = list(map(str, self.args))
        if self.fun.startswith("."):
            return f"{args[0]}{self.fun}"
        if self.fun[0].isalpha():
            return f"{self.fun}({', '.join(args)})"
        return f"({self.fun}{args[0]})" if len(args) == 1 else f"({f' {self.fun} '.join(args)})"


# --- Statements ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Let:
    name: str
    value: Any

    def __str__(self):
        return f"{self.name} = {self.value}"


@dataclass(frozen=True)
class Store:
    ref: Any
    index: Index
    value: Any
    how: str  # "brackets" | "function" | "view"

    def __str__(self):
        match self.how:
            case "brackets":
                return f"{self.ref}[{self.index}] = {self.value}"
            case "function":
                return f"refs.set({self.ref}, {self.index.argument()}, {self.value})"
        return f"{place(self.ref, self.index)}.set({self.value})"


@dataclass(frozen=True)
class Swap:
    name: str
    ref: Any
    index: Index
    value: Any
    how: str  # "function" | "view"

    def __str__(self):
        if self.how == "function":
            call = f"refs.swap({self.ref}, {self.index.argument()}, {self.value})"
            return f"{self.name} = {call}"
        return f"{self.name} = {place(self.ref, self.index)}.swap({self.value})"


@dataclass(frozen=True)
class Add:
    ref: Any
    index: Index
    value: Any
    how: str  # "brackets" | "function" | "view"

    def __str__(self):
        match self.how:
            case "brackets":
                return f"{self.ref}[{self.index}] += {self.value}"
            case "function":
                return f"refs.addupdate({self.ref}, {self.index.argument()}, {self.value})"
        return f"{place(self.ref, self.index)}.add({self.value})"


@dataclass(frozen=True)
class Update:
    ref: Any
    index: Index
    how: str  # "multiply" | "min" | "max" | "apply"
    value: Any

    def __str__(self):
        value = f"lambda x: {self.value}" if self.how == "apply" else self.value
        return f"{place(self.ref, self.index)}.{self.how}({value})"


@dataclass(frozen=True)
class MakeRef:
    name: str
    value: Any

    def __str__(self):
        return f"{self.name} = refs.new_ref({self.value})"


@dataclass(frozen=True)
class MakeEmptyRef:
    name: str
    type: Type

    def __str__(self):
        struct = f"jax.ShapeDtypeStruct({self.type.shape}, jnp.{self.type.dtype})"
        return f"{self.name} = refs.empty_ref({struct})"


@dataclass(frozen=True)
class Freeze:
    name: str
    ref: Any

    def __str__(self):
        return f"{self.name} = refs.freeze({self.ref})"


@dataclass(frozen=True)
class Free:
    ref: Any

    def __str__(self):
        return f"refs.free_ref({self.ref})"


@dataclass(frozen=True)
class Block:
    """A function: parameters are names, or tuples of names for an argument that is a tuple."""

    name: str
    params: tuple
    body: tuple
    result: Any  # an expression, or nested tuples of them

    def __str__(self):
        params = [
            p if isinstance(p, str) else f"{self.name}_{i}" for i, p in enumerate(self.params)
        ]
        unpack = [
            f"{pattern(names)}{param}"
            for param, names in zip(params, self.params, strict=True)
            if not isinstance(names, str) and names
        ]
        lines = [*unpack, *map(str, self.body), f"return {tree(self.result)}"]
        return f"def {self.name}({', '.join(params)}):\n" + indent("\n".join(lines), "    ")


@dataclass(frozen=True)
class Cond:
    names: Names
    pred: Any
    branches: tuple[Block, Block]
    operands: tuple

    def __str__(self):
        return calls(
            self.names, "lax.cond", self.branches, self.pred, *self.branches, *self.operands
        )


@dataclass(frozen=True)
class Switch:
    names: Names
    index: Any
    branches: tuple[Block, ...]
    operands: tuple

    def __str__(self):
        names = f"[{', '.join(block.name for block in self.branches)}]"
        return calls(self.names, "lax.switch", self.branches, self.index, names, *self.operands)


@dataclass(frozen=True)
class Scan:
    names: tuple[Names, Names]
    block: Block
    init: tuple
    xs: tuple
    length: int
    reverse: bool
    unroll: int

    def __str__(self):
        options = [] if self.xs else [f"length={self.length}"]
        options += ["reverse=True"] if self.reverse else []
        options += [f"unroll={self.unroll}"] if self.unroll != 1 else []
        # Without inputs to scan over, xs is None: the length stands alone.
        xs = self.xs or None
        return calls(self.names, "lax.scan", (self.block,), self.block, self.init, xs, *options)


@dataclass(frozen=True)
class While:
    names: Names
    pred: Block
    block: Block
    init: tuple

    def __str__(self):
        blocks = (self.pred, self.block)
        return calls(self.names, "lax.while_loop", blocks, *blocks, self.init)


@dataclass(frozen=True)
class Fori:
    names: Names
    lower: Any
    upper: Any
    block: Block
    init: tuple

    def __str__(self):
        bounds = (self.lower, self.upper)
        return calls(self.names, "lax.fori_loop", (self.block,), *bounds, self.block, self.init)


@dataclass(frozen=True)
class Wrapped:
    """`jax.jit(block)(*operands)`, and the same for the other wrappers."""

    names: Names
    wrapper: str
    block: Block
    operands: tuple

    def __str__(self):
        fun = f"{self.wrapper}({self.block.name})"
        return calls(self.names, fun, (self.block,), *self.operands)


@dataclass(frozen=True)
class Program:
    """A function, the state it works on and the arguments it is called with."""

    cells: tuple[MakeRef, ...]
    inputs: tuple[Let, ...]
    block: Block
    args: tuple

    def __str__(self):
        block = str(self.block)
        helper = SMALL if "small(" in block else "\n"
        return "\n".join([*map(str, (*self.cells, *self.inputs)), helper, block])

    def _repr_pretty_(self, printer, cycle):
        printer.text("...")  # Hypothesis would print the dataclasses; the laws print a script

    def arguments(self):
        """The arguments, as a tuple's source."""
        return tree(self.args)


SMALL = '''
def small(x):
    """Keep numbers small, so that floats are exact."""
    if x.dtype == jnp.complex64:
        return lax.complex(small(x.real), small(x.imag))
    return lax.rem(x, jnp.float32(8))

'''


# --- Text ---------------------------------------------------------------------------------------


def place(ref, index):
    """`ref.at[index]`, or `ref` itself where that is a view already and all of it is meant."""
    whole = index == EVERYTHING and (isinstance(ref, At) or ref.view)
    return ref if whole else f"{ref}.at[{index}]"


def calls(names, fun, blocks, *args):
    args = ", ".join(a.name if isinstance(a, Block) else tree(a) for a in args)
    return "\n".join([*map(str, blocks), f"{pattern(names)}{fun}({args})"])


def pattern(names):
    """`names = `, as far as there are names."""
    return f"{tree(names)[1:-1]} = " if any(names) else ""


def tree(x):
    """A tuple of nodes, as Python writes it."""
    if not isinstance(x, tuple) or isinstance(x, Type):
        return str(x)
    return f"({', '.join(map(tree, x))}{',' if len(x) == 1 else ''})"


def walk(node) -> Iterator[Any]:
    """All the nodes of a program, outermost first."""
    if isinstance(node, tuple):
        for child in node:
            yield from walk(child)
    elif dataclasses.is_dataclass(node):
        yield node
        for field in dataclasses.fields(node):
            yield from walk(getattr(node, field.name))
