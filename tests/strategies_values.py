"""How values and places are drawn: expressions that have a given type, refs and views to write."""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from tests.strategies_choices import Choices
from tests.strategies_indices import EVERYTHING, Index, as_tuple, draw_index
from tests.strategies_syntax import At, Call, Literal, Name, Read, Type

INT = Type("int32")
BOOL = Type("bool_")


@dataclass(frozen=True)
class Features:
    """What programs may contain."""

    dtypes: tuple[str, ...] = ("float32", "int32", "uint8", "bool_", "complex64")
    max_depth: int = 3
    max_size: int = 9  # statements altogether
    wrappers: tuple[str, ...] = ("jax.jit", "refs.jit", "refs.jit", "jax.checkpoint")
    aliases: bool = True  # the same ref twice among the arguments, or also closed over
    view_arguments: bool = True
    scan_over_refs: bool = True
    returned_refs: bool = False  # from the program itself; an inner `refs.jit` may always
    add_to_bools: bool = True  # NumPy's + of booleans is "or"
    apply_closes_over: bool = True  # the function given to `at[...].apply` uses refs and values


# What may be done to a ref.
ALL = ("read", "write", "add")


@dataclass(frozen=True)
class Handle:
    """A ref or view in scope.

    Handles of the same state share `cell`. `home` is the block that may end the ref.
    """

    name: Name
    cell: int
    allows: tuple[str, ...] = ALL
    home: int | None = None


@dataclass
class Scope:
    """What a block of a program can see."""

    values: list[Name] = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)
    depth: int = 0
    block: int = 0

    def visible(self, to="read"):
        return [h for h in self.handles if to in h.allows]


class Drawing(Choices):
    """Draws what statements are made of."""

    def __init__(self, seed, features):
        super().__init__(seed)
        self.features = features
        self.size = features.max_size
        self.counts = {}

    def fresh(self, prefix):
        self.counts[prefix] = self.counts.get(prefix, 0) + 1
        return f"{prefix}{self.counts[prefix] - 1}"

    def type(self):
        # Few different ones: op by op, each has to be compiled.
        shape = tuple(
            self.choose((2, 3, 3, 2, 3, 1)) for _ in range(self.choose((1, 2, 0, 1, 2, 3)))
        )
        while math.prod(shape) > 16:
            shape = shape[1:]
        return Type(self.choose(self.features.dtypes), shape)

    # --- Places ---

    def cell(self):
        self.counts["cell"] += 1
        return self.counts["cell"]

    def target(self, scope, unique=False, to="write"):
        """Where to write: a ref or view, an index and the type of what it takes."""
        if not (handles := scope.visible(to)):
            return None
        ref: Any = self.choose(handles).name
        while self.maybe(one_in=6):
            ref = self.at(scope, ref)
        index, type = self.index(scope, ref.type, unique)
        return ref, index, type

    def at(self, scope, ref):
        index, type = self.index(scope, ref.type, unique=True)
        if 0 in type.shape:  # nothing could be done with it
            index, type = EVERYTHING, ref.type
        return At(type, ref, index)

    def index(self, scope, type, unique=False) -> tuple[Index, Type]:
        scalar = lambda: self.expr(scope, INT, depth=0)  # noqa: E731
        index = draw_index(self, type.shape, scalar, unique)
        return index, Type(type.dtype, index.shape(type.shape))

    def how(self, ref, *ways):
        if isinstance(ref, At) or ref.view:
            return "view"
        return self.choose(ways or ("brackets", "function", "view"))

    def written(self, scope, ref, index, type):
        """A value to overwrite with: one for all where the order of writing could matter."""
        if index.repeats(ref.type.shape):
            return self.expr(scope, Type(type.dtype))
        return self.expr(scope, self.broadcasting(type))

    def broadcasting(self, type):
        """A type that broadcasts to `type`."""
        match self.choose(("same", "scalar", "same", "shorter", "ones")):
            case "scalar":
                return Type(type.dtype)
            case "shorter" if jax.config.jax_numpy_rank_promotion != "raise":
                return Type(type.dtype, type.shape[1:])
            case "ones":
                return Type(type.dtype, (1,) * len(type.shape))
        return type

    # --- Values ---

    def bind(self, scope, type):
        scope.values.append(Name(type, self.fresh("v")))
        return scope.values[-1].name

    def binds(self, scope, types):
        return tuple(self.bind(scope, type) for type in types)

    def some_type(self, scope):
        """Most often a type that is there already."""
        types = [x.type for x in scope.values] + [h.name.type for h in scope.handles]
        types = [type for type in types if 0 not in type.shape]
        return self.choose(types) if types and not self.maybe(one_in=5) else self.type()

    def literal(self, type):
        scale, offset = self.choose((1, 2, 3, 0)), self.choose((1, 2, 3, 4, 5, 6, 0))
        numbers = (np.arange(math.prod(type.shape)) * scale + offset + 2) % 7 - 2
        match type.dtype:
            case "bool_":
                numbers = numbers % 2 == 1
            case "uint8":
                numbers = numbers % 256
            case "complex64":
                numbers = numbers + 1j * (numbers * scale % 3)
        values = numbers.reshape(type.shape).tolist()
        return Literal(type, as_tuple(values))

    def expr(self, scope, type, depth=2):
        ways = [self.literal]
        if names := [x for x in scope.values if x.type == type]:
            ways += [lambda _: self.choose(names)] * 3
        if scope.handles or scope.values:
            ways += [lambda type: self.adapted(scope, type)] * 3
        if depth:
            ways += [lambda type: self.arithmetic(scope, type, depth - 1)] * 2
        return self.choose(ways)(type)

    def read(self, scope):
        if not (handles := scope.visible()):
            return self.literal(self.type())
        ref: Any = self.choose(handles).name
        while self.maybe(one_in=8):
            ref = self.at(scope, ref)
        # An index inside this index is a literal or a name.
        quiet = Scope([x for x in scope.values if x.type == INT])
        index, type = self.index(quiet, ref.type)
        return Read(type, ref, index, self.how(ref))

    def adapted(self, scope, type):
        """Something that is there, or in a ref, made to fit. Of a few, what needs the least."""

        def misfit(x):
            return 2 * (x.type.dtype != type.dtype) + 3 * (not broadcasts(x.type.shape, type.shape))

        found = [self.something(scope) for _ in range(self.choose((1, 3, 5)))]
        x = min(found, key=misfit)
        return self.reshaped(self.converted(x, type.dtype), type.shape)

    def something(self, scope):
        return self.choose(scope.values) if scope.values and self.maybe() else self.read(scope)

    def converted(self, x, dtype):
        if x.type.dtype == dtype:
            return x
        type = Type(dtype, x.type.shape)
        if dtype == "bool_":
            return Call(type, "!=", (x, Literal(Type(x.type.dtype), 0)))
        if x.type.dtype == "complex64":
            return self.converted(Call(Type("float32", x.type.shape), ".real", (x,)), dtype)
        if x.type.dtype == "int32" and dtype in ("float32", "complex64"):
            x = Call(x.type, "lax.rem", (x, Literal(INT, 8)))
        if x.type.dtype == "float32" and dtype == "uint8":
            x = self.converted(x, "int32")
        return Call(type, f".astype(jnp.{dtype})", (x,))

    def reshaped(self, x, shape):
        if x.type.shape == shape:
            return x
        type = Type(x.type.dtype, shape)
        fun = "jnp.broadcast_to" if broadcasts(x.type.shape, shape) else "jnp.resize"
        return Call(type, fun, (x, str(shape)))

    def arithmetic(self, scope, type, depth):
        kinds = ["binary", "where", "transposed", "unary"]
        if type.dtype == "bool_":
            kinds += ["compared"] * 3
        elif not type.shape:
            kinds += ["sum", "length"]
        match self.choose(kinds):
            case "binary":
                x, y = self.expr(scope, type, depth), self.expr(scope, type, depth)
                return self.binary(x, y)
            case "where":
                where = self.expr(scope, Type("bool_", type.shape), depth)
                x, y = self.expr(scope, type, depth), self.expr(scope, type, depth)
                return Call(type, "jnp.where", (where, x, y))
            case "transposed":
                return Call(type, ".T", (self.expr(scope, Type(type.dtype, type.shape[::-1])),))
            case "unary":
                x = self.expr(scope, type, depth)
                return Call(type, "~" if type.dtype == "bool_" else "-", (x,))
            case "compared":
                return self.compared(scope, type.shape, depth)
            case "sum":
                x = self.converted(self.read(scope), type.dtype)
                total = Call(type, "jnp.sum", (x, f"dtype=jnp.{type.dtype}"))
                return self.small(total)
        longs = [h.name for h in scope.handles if h.name.type.shape and not h.name.view]
        if not longs:
            return self.literal(type)
        return Call(type, f"jnp.{type.dtype}", (f"len({self.choose(longs)})",))

    def compared(self, scope, shape, depth):
        dtype = self.choose([d for d in self.features.dtypes if d != "bool_"])
        x, y = (self.expr(scope, Type(dtype, shape), depth) for _ in range(2))
        sign = self.choose(("==", "!=") if dtype == "complex64" else ("<", ">=", "==", "!="))
        return Call(Type("bool_", shape), sign, (x, y))

    def binary(self, x, y):
        type = x.type
        if type.dtype == "bool_":
            return Call(type, self.choose(("^", "&", "|")), (x, y))
        x, y = self.small(x), self.small(y)
        signs = ("+", "-", "*") if type.dtype == "complex64" else ("+", "-", "*", "min", "max")
        match self.choose(signs):
            case "min":
                return Call(type, "jnp.minimum", (x, y))
            case "max":
                return Call(type, "jnp.maximum", (x, y))
            case sign:
                return Call(type, sign, (x, y))

    def small(self, x):
        """`x`, made small if its dtype has a largest integer that it can count to."""
        if isinstance(x, Literal) or x.type.dtype not in ("float32", "complex64"):
            return x
        return Call(x.type, "small", (x,))

    def unit(self, x):
        """`x`, made a factor that lets no number grow beyond its dtype's exact ones."""
        match x.type.dtype:
            case "float32":
                return Call(x.type, "jnp.sign", (x,))
            case "complex64":
                one, other = (Literal(Type("complex64"), z) for z in (1j, -1 + 0j))
                return Call(x.type, "jnp.where", (Call(x.type, "==", (x, one)), one, other))
        return x


def broadcasts(shape, to):
    try:
        return np.broadcast_shapes(shape, to) == to
    except ValueError:
        return False
