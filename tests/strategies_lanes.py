"""Random programs that map functions over refs, with `refs.vmap`, at any depth.

They are those of `strategies`, and a statement more. What a lane may do is what doesn't depend on
the order of the lanes. So each ref that all of them see is drawn a use when they begin:

- `read`: they read it, and nothing else;
- `add`: they add to it, at any place, in every way that only accumulates;
- `set`: first thing, each overwrites the whole with one and the same value; then they read it.

What is mapped is the lane's own and may be used in any way, and so are the refs that a lane makes.
A use holds in everything inside, in another map too.
"""

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from tests.strategies import Builder
from tests.strategies_indices import EVERYTHING, IntArray, Mask, NewAxis, Slice
from tests.strategies_syntax import Add, At, Block, Name, Names, Store, Type, calls
from tests.strategies_values import Features, Scope

WRAPPERS = ("jax.jit", "refs.jit", "jax.checkpoint", "refs.checkpoint")


@dataclass(frozen=True)
class Vmap:
    """`names = refs.vmap(block, …)(*operands)`."""

    names: Names
    block: Block
    operands: tuple
    in_axes: tuple
    out_axes: tuple
    size: int

    def __str__(self):
        options = [f"in_axes={axes(self.in_axes)}"] if self.operands else []
        options += [f"out_axes={axes(self.out_axes)}"] if any(self.out_axes) else []
        mapped = any(axis is not None for axis in self.in_axes)
        options += [] if mapped else [f"axis_size={self.size}"]
        fun = f"refs.vmap({', '.join([self.block.name, *options])})"
        return calls(self.names, fun, (self.block,), *self.operands)


def axes(each):
    """One for all where they are the same."""
    return str(each[0] if len({*each}) == 1 else each)


def mapped_programs(**features):
    """Programs with a map. The arguments are those of `Features`."""
    wanted = Features(**{"wrappers": WRAPPERS, "max_size": 8, **features})
    return st.integers(0, 2**64 - 1).map(lambda seed: LaneBuilder(seed, wanted).program())


class LaneBuilder(Builder):
    """Draws programs of which one of the first statements is a map."""

    def __init__(self, seed, features):
        super().__init__(seed, features)
        self.paths: dict[str, int] = {}  # of views that have names

    def statement(self, scope):
        if not scope.depth and not self.counts.get("map") and not self.maybe(one_in=4):
            return self.vmap(scope)
        return super().statement(scope)

    def nesting(self):
        return [*super().nesting(), self.vmap]

    def add(self, scope):
        result = super().add(scope)
        if result and isinstance(result[0], Add):
            [add] = result
            # Adding to a part of a part reads the outer one.
            if (
                not self.may_read(scope, add.ref)
                and self.path(add.ref) + (add.index != EVERYTHING) > 1
            ):
                return None
        return result

    def make_view(self, scope):
        result = super().make_view(scope)
        if result:
            [let] = result
            self.paths[let.name] = self.path(let.value)
        return result

    def path(self, ref):
        """How many indices a view has; many, if that isn't known."""
        if isinstance(ref, At):
            return self.path(ref.base) + 1
        return self.paths.get(ref.name, 9 if ref.view else 0)

    def how_to_add(self, scope, ref, index):
        how = self.how(ref)
        if how == "brackets" and not self.may_read(scope, ref):
            # Python's `+=` reads and writes. That it only adds can't be seen of these:
            hidden = IntArray | Mask | NewAxis
            if ref.type.dtype == "bool_" or any(
                isinstance(item, hidden) or (isinstance(item, Slice) and (item.step or 1) < 0)
                for item in index.items
            ):
                return "function"
        return how

    def may_read(self, scope, ref):
        while isinstance(ref, At):
            ref = ref.base
        return any(h.name == ref for h in scope.visible())

    def vmap(self, scope):
        self.counts["map"] = self.counts.get("map", 0) + 1
        size, own = self.lanes(scope)
        inner = self.inside(scope)
        inner.handles = []
        operands: list[Any] = []
        in_axes: list[int | None] = []

        def pass_ref(handle, axis):
            view = handle.name.view
            type = handle.name.type if axis is None else without(handle.name.type, axis)
            name = Name(type, self.fresh("w" if view else "r"), view)
            inner.handles.append(replace(handle, name=name, home=None))
            operands.append(handle.name)
            params.append(name.name)
            in_axes.append(axis if axis is None or self.maybe() else axis - len(type.shape) - 1)

        params: list[str] = []
        for handle in scope.handles:
            if handle.cell in own and not handle.name.view:
                aliases = [h for h in inner.handles if h.cell == handle.cell]
                if not aliases or self.maybe(one_in=3):
                    pass_ref(handle, own[handle.cell])
        body = self.share(scope, inner, own)
        for handle in [h for h in inner.handles if h.cell not in own]:
            if self.maybe(one_in=5):
                pass_ref(handle, None)
        for _ in range(self.upto(2)):
            type = self.some_type(scope)
            axis = self.axis(type) if not self.maybe(one_in=4) else None
            given = type if axis is None else inserted(type, axis, size)
            operands.append(self.expr(scope, given))
            params.append(self.bind(inner, type))
            in_axes.append(axis)
        known = len(inner.values)
        body += self.statements(inner, self.between(1, 4))
        results = [(x, x.type) for x in self.results(inner, known)]
        made = [h for h in inner.handles if h.home == inner.block and not h.name.view]
        if made and self.maybe():
            results.append((self.choose(made), None))
        names, result, out_axes = [], [], []
        for x, type in results:
            axis = self.axis(x.name.type if type is None else type)
            out_axes.append(axis)
            if type is None:
                name = Name(inserted(x.name.type, axis, size), self.fresh("r"))
                scope.handles.append(replace(x, name=name, cell=self.cell(), home=scope.block))
                names.append(name.name)
                result.append(x.name)
            else:
                names.append(self.bind(scope, inserted(type, axis, size)))
                result.append(x)
        block = Block(self.fresh("f"), tuple(params), tuple(body), tuple(result))
        axes = tuple(in_axes), tuple(out_axes)
        return [Vmap(tuple(names), block, tuple(operands), *axes, size)]

    def lanes(self, scope):
        """How many lanes, and the axes of the cells that are mapped."""
        places = [
            (h.cell, axis, size)
            for h in scope.handles
            if not h.name.view
            for axis, size in enumerate(h.name.type.shape)
        ]
        if not places or self.maybe(one_in=6):
            return self.between(1, 3), {}
        cell, axis, size = self.choose(places)
        own = {cell: axis}
        for cell, axis, n in self.shuffled(places):
            if n == size and self.maybe(one_in=3):
                own.setdefault(cell, axis)
        return size, own

    def share(self, scope, inner, own):
        """Draws the uses of what all lanes see, and returns what they do first."""
        shared = [h for h in scope.handles if h.cell not in own]
        uses = {h.cell: h.allows for h in shared}
        wholes = {h.cell: h.name for h in shared if not h.name.view}
        for cell, allows in uses.items():
            if len(allows) == 3:
                uses[cell] = self.choose(
                    (("read",), ("read",), ("add",), ("add",), ("set",) if cell in wholes else ())
                )
        quiet = Scope([*scope.values], [h for h in shared if uses[h.cell] == ("read",)])
        first = [
            Store(name, EVERYTHING, self.expr(quiet, name.type), self.how(name))
            for cell, name in wholes.items()
            if uses[cell] == ("set",)
        ]
        for handle in shared:
            allows = uses[handle.cell]
            allows = ("read",) if allows == ("set",) else allows
            inner.handles.append(replace(handle, allows=allows, home=None))
        return first

    def axis(self, type):
        """A place for the lanes among the axes."""
        rank = len(type.shape)
        return self.choose((0, 0, 0, self.between(-rank - 1, rank)))


def inserted(type, axis, size):
    shape = [*type.shape]
    shape.insert(axis % (len(shape) + 1), size)
    return Type(type.dtype, tuple(shape))


def without(type, axis):
    return Type(type.dtype, (*type.shape[:axis], *type.shape[axis + 1 :]))
