"""Random programs over refs, for the laws.

`programs()` draws a `Program` (see `strategies_syntax`), whose `str` is Python text against the
names `refs`, `jnp`, `lax`, `jax` and `np`: state, arguments and a function `program`. The text
means the same to everybody who runs it, and exactly so:

- Numbers are small integers in every dtype, so that float results are exact, in any order of
  evaluation. What could grow goes through `small`.
- Types are explicit and agree, so that NumPy's and JAX's rules of promotion don't matter.
- Indices are in bounds; where an index stands twice, only operations that allow it are used.
- Loops end: their counters are out of reach of the statements in their bodies.
- What native JAX control flow refuses when it is traced (a ref among the operands twice, or also
  closed over) isn't generated there; inside `refs.jit` it is.

To cover something new, add a node in `strategies_syntax`, draw it here, and say in
`tests/test_oracle.py` that it must turn up.
"""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tests.strategies_indices import EVERYTHING, TracedInt
from tests.strategies_syntax import (
    Add,
    Block,
    Call,
    Cond,
    Fori,
    Free,
    Freeze,
    Let,
    Literal,
    MakeEmptyRef,
    MakeRef,
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
from tests.strategies_values import ALL, BOOL, INT, Drawing, Features, Handle, Scope


def programs(**features):
    """Programs. The arguments are those of `Features`: a law that allows less says so."""
    wanted = Features(**features)
    return st.integers(0, 2**64 - 1).map(lambda seed: Builder(seed, wanted).program())


class Builder(Drawing):
    """Draws statements. A method draws one of its kind, or None where there is nothing for it."""

    # --- The whole ---

    def program(self, given=None):
        """A program over the refs given, or over refs that it makes."""
        allows = {handle.name: handle.allows for handle in given or ()}
        cells = [*allows] or [Name(self.type(), self.fresh("g")) for _ in range(self.between(1, 3))]
        inputs = [Name(self.type(), self.fresh("x")) for _ in range(self.upto(2))]
        make_refs = [MakeRef(x.name, self.literal(x.type)) for x in cells if not given]
        make_inputs = [Let(x.name, self.literal(x.type)) for x in inputs]
        scope, args, params = Scope(), [], []
        for cell, name in enumerate(cells):
            handles = 1 + (self.maybe(one_in=3) if self.features.aliases else 0)
            closed_over = self.maybe(one_in=4)
            for _ in range(handles - closed_over):
                arg, view = self.argument(name)
                param = Name(arg.type, self.fresh("w" if view else "r"), view)
                args.append(arg)
                params.append(param.name)
                scope.handles.append(Handle(param, cell, allows.get(name, ALL)))
            if closed_over:
                scope.handles.append(Handle(name, cell, allows.get(name, ALL)))
        for x in inputs:
            args.append(x)
            params.append(x.name)
            scope.values.append(x)
        self.counts["cell"] = len(cells)
        body = self.statements(scope, self.between(1, 7))
        result = self.results(scope, len(inputs))
        while self.features.returned_refs and self.maybe(one_in=3):
            result = (*result, self.returned(scope).name) if self.returned(scope) else result
        block = Block("program", tuple(params), tuple(body), result)
        return Program(tuple(make_refs), tuple(make_inputs), block, tuple(args))

    def argument(self, ref):
        """The ref itself, or now and then a view of it."""
        if self.features.view_arguments and self.maybe(one_in=8):
            return self.at(Scope(), ref), True
        return ref, False

    # --- Statements ---

    def statements(self, scope, count):
        result = []
        for _ in range(count):
            if self.size > 0:
                self.size -= 1
                result += self.statement(scope)
        return result

    def statement(self, scope):
        """One statement, and what must stand with it."""
        kinds = [self.store, self.add, self.swap, self.update, self.let, self.store, self.add]
        kinds += [self.make_ref, self.make_view]
        if any(h.home == scope.block for h in scope.handles):
            kinds += [self.end_ref, self.end_ref]
        if scope.depth < self.features.max_depth:
            kinds += self.nesting()
        return self.choose(kinds)(scope) or self.let(scope)

    def nesting(self):
        return [self.cond, self.scan, self.while_loop, self.fori, self.wrapped, self.switch]

    def let(self, scope):
        value = self.read(scope) if self.maybe() else self.expr(scope, self.some_type(scope))
        return [Let(self.bind(scope, value.type), value)]

    def store(self, scope):
        if (target := self.target(scope)) is None:
            return None
        ref, index, type = target
        return [Store(ref, index, self.written(scope, ref, index, type), self.how(ref))]

    def swap(self, scope):
        if (target := self.target(scope)) is None:
            return None
        ref, index, type = target
        value = self.written(scope, ref, index, type)
        how = self.how(ref, "function", "view")
        return [Swap(self.bind(scope, type), ref, index, value, how)]

    def add(self, scope):
        if (target := self.target(scope, to="add")) is None:
            return None
        ref, index, type = target
        if type.dtype == "bool_" and not self.features.add_to_bools:
            return None
        how = self.how_to_add(scope, ref, index)
        if how == "brackets":  # reads, then writes: where an index stands twice, one write wins
            value = self.written(scope, ref, index, type)
        else:
            value = self.expr(scope, self.broadcasting(type))
        return [Add(ref, index, self.small(value), how)]

    def how_to_add(self, scope, ref, index):
        return self.how(ref)

    def update(self, scope):
        how = self.choose(("multiply", "min", "max", "apply"))
        if (target := self.target(scope, unique=how == "apply")) is None:
            return None
        ref, index, type = target
        if type.dtype == "complex64" and how in ("min", "max"):
            how = "multiply"
        if type.dtype == "bool_" and how == "multiply" and not self.features.add_to_bools:
            how = "min"
        match how:
            case "multiply":
                # Nothing grows by these factors.
                value = self.expr(scope, self.broadcasting(type))
                value = self.unit(value)
            case "apply":
                x = Name(Type(type.dtype), "x")  # it is elementwise
                inside = scope if self.features.apply_closes_over else Scope()
                value = self.binary(x, self.expr(inside, Type(type.dtype), depth=0))
            case _:
                value = self.expr(scope, self.broadcasting(type))
        return [Update(ref, index, how, value)]

    def make_ref(self, scope):
        type = self.some_type(scope)
        name = Name(type, self.fresh("r"))
        value = self.expr(scope, type)
        scope.handles.append(Handle(name, self.cell(), home=scope.block))
        if self.maybe(one_in=4):
            # What is in it before the first write is anybody's guess.
            return [MakeEmptyRef(name.name, type), Store(name, EVERYTHING, value, self.how(name))]
        return [MakeRef(name.name, value)]

    def make_view(self, scope):
        if not scope.handles:
            return None
        handle = self.choose(scope.handles)
        view = self.at(scope, handle.name)
        name = Name(view.type, self.fresh("w"), view=True)
        scope.handles.append(replace(handle, name=name, home=None))
        return [Let(name.name, view)]

    def end_ref(self, scope):
        handle = self.choose([h for h in scope.handles if h.home == scope.block])
        scope.handles = [h for h in scope.handles if h.cell != handle.cell]
        if self.maybe(one_in=2):
            return [Free(handle.name)]
        return [Freeze(self.bind(scope, handle.name.type), handle.name)]

    # --- Control flow ---

    def cond(self, scope):
        pred = self.expr(scope, BOOL)
        args, params, inner = self.operands(scope)
        branches, types = self.branches(inner, params, 2)
        return [Cond(self.binds(scope, types), pred, branches, args)]

    def switch(self, scope):
        count = self.between(2, 3)
        index = Call(INT, "jnp.abs", (TracedInt(self.expr(scope, INT), count),))
        args, params, inner = self.operands(scope)
        branches, types = self.branches(inner, params, count)
        return [Switch(self.binds(scope, types), index, branches, args)]

    def branches(self, inner, params, count):
        """Blocks whose results have the types of the first one's."""
        blocks = [self.block(inner(), params)]
        types = [x.type for x in blocks[0].result]
        blocks += [self.block(inner(), params, types) for _ in range(count - 1)]
        return tuple(blocks), types

    def wrapped(self, scope):
        wrapper = self.choose(self.features.wrappers)
        ours = wrapper.startswith("refs.")
        args, params, inner = self.operands(scope, ours)
        inside = inner()
        block = self.block(inside, params)
        names = self.binds(scope, [x.type for x in block.result])
        if ours and self.maybe(one_in=4) and (returned := self.returned(inside)):
            name = replace(returned.name, name=self.fresh("r"))
            home = scope.block if returned.home == inside.block else None
            scope.handles.append(replace(returned, name=name, home=home))
            block = replace(block, result=(*block.result, returned.name))
            names = (*names, name.name)
        return [Wrapped(names, wrapper, block, args)]

    def returned(self, scope):
        """A ref to return."""
        handles = [h for h in scope.handles if not h.name.view]
        return self.choose(handles) if handles else None

    def scan(self, scope):
        carry = self.result_types(scope)
        length = self.between(1, 3)
        inner = self.inside(scope)
        xs, params = [], []
        if self.features.scan_over_refs and self.maybe():
            longs = [h for h in scope.handles if h.name.type.shape and not h.name.view]
            if longs:
                handle = self.choose(longs)
                length, *shape = handle.name.type.shape
                row = Name(Type(handle.name.type.dtype, tuple(shape)), self.fresh("r"))
                inner.handles = [h for h in inner.handles if h.cell != handle.cell]
                inner.handles.append(replace(handle, name=row, home=None))
                xs.append(handle.name)
                params.append(row.name)
        for type in self.result_types(scope):
            xs.append(self.expr(scope, Type(type.dtype, (length, *type.shape))))
            params.append(self.bind(inner, type))
        init = tuple(self.expr(scope, type) for type in carry)
        params = (self.binds(inner, carry), tuple(params) if xs else "_")
        known = len(inner.values)
        body = self.statements(inner, self.between(1, 3))
        rows = self.results(inner, known)
        block = Block(
            self.fresh("f"), params, tuple(body), (self.carried(inner, params[0], carry), rows)
        )
        stacked = [Type(row.type.dtype, (length, *row.type.shape)) for row in rows]
        names = (self.binds(scope, carry), self.binds(scope, stacked))
        unroll = self.choose((1, 1, 2))
        return [Scan(names, block, init, tuple(xs), length, self.maybe(), unroll)]

    def fori(self, scope):
        carry = self.result_types(scope)
        init = tuple(self.expr(scope, type) for type in carry)
        lower: Any = self.between(-1, 1)
        upper: Any = lower + self.upto(3)
        if self.maybe():
            upper = Call(INT, "jnp.abs", (TracedInt(self.expr(scope, INT), 4),))
        inner = self.inside(scope)
        params = (self.bind(inner, INT), self.binds(inner, carry))
        body = self.statements(inner, self.between(1, 3))
        result = self.carried(inner, params[1], carry)
        block = Block(self.fresh("f"), params, tuple(body), result)
        return [Fori(self.binds(scope, carry), lower, upper, block, init)]

    def while_loop(self, scope):
        """A loop that counts to a small number, in its carry or in a ref."""
        types = self.result_types(scope)
        init = tuple(self.expr(scope, type) for type in types)
        limit = Literal(INT, self.upto(3))
        where = self.choose(("carry", "ref", "pred"))
        before: list[Any] = []
        if where != "carry":
            counter = Name(INT, self.fresh("r"))
            handle = Handle(counter, self.cell(), home=scope.block)
            before.append(MakeRef(counter.name, Literal(INT, 0)))
            scope.handles.append(replace(handle, allows=("read",)))
            count = Add(counter, EVERYTHING, Literal(INT, 1), self.how(counter))
            counted: Any = Read(INT, counter, EVERYTHING, self.how(counter))
        blocks = []
        for part in ("pred", "body"):
            inner = self.inside(scope)
            names = self.binds(inner, types)
            if where == "carry":
                counted = Name(INT, self.fresh("i"))
                names = (*names, counted.name)
                inner.values.append(counted)
            if part == "pred":
                inner.depth = self.features.max_depth
                body = self.statements(inner, self.upto(1))
                body += [count] if where == "pred" else []
                result = Call(BOOL, "<=" if where == "pred" else "<", (counted, limit))
                if self.maybe(one_in=3):
                    result = Call(BOOL, "&", (result, self.expr(inner, BOOL)))
            else:
                body = self.statements(inner, self.between(1, 3))
                result = self.carried(inner, names, types)
                body += [count] if where == "ref" else []
                if where == "carry":
                    result = (*result, Call(INT, "+", (counted, Literal(INT, 1))))
            blocks.append(Block(self.fresh("f"), (names,), tuple(body), result))
        names = self.binds(scope, types)
        if where == "carry":
            names, init = (*names, self.bind(scope, INT)), (*init, Literal(INT, 0))
        else:
            scope.handles = [handle if h.cell == handle.cell else h for h in scope.handles]
        return [*before, While(names, *blocks, init)]

    def block(self, scope, params, types=None):
        """A function that returns results of these types, or whatever is there to return."""
        known = len(scope.values)
        body = self.statements(scope, self.between(1, 3))
        if types is None:
            result = self.results(scope, known)
        else:
            result = tuple(self.expr(scope, type) for type in types)
        return Block(self.fresh("f"), params, tuple(body), result)

    def results(self, scope, known):
        """Results, preferably the values that weren't known before: what isn't returned, nobody
        sees."""
        new = [x for x in scope.values[known:] if not self.maybe(one_in=3)]
        more = [self.expr(scope, self.some_type(scope)) for _ in range(self.upto(1))]
        return (*new, *more)

    def carried(self, scope, names, types):
        """What a step makes of its carry."""
        result = []
        for name, type in zip(names, types, strict=False):  # a counter has a name of its own
            new = self.expr(scope, type)
            result.append(new if self.maybe(one_in=4) else self.binary(Name(type, name), new))
        return tuple(result)

    def inside(self, scope):
        self.counts["block"] = block = self.counts.get("block", 0) + 1
        return Scope([*scope.values], [*scope.handles], scope.depth + 1, block)

    def operands(self, scope, ours=False):
        """Arguments and parameters of a call, and what makes the scope inside.

        Native JAX refuses a ref that is passed twice, or passed and closed over.
        """
        args, params, values, handles = [], [], [], []
        for _ in range(self.upto(3)):
            free = [h for h in scope.handles if ours or not h.name.view]
            if not ours:
                free = [h for h in free if h.cell not in [taken.cell for taken in handles]]
            if ours and handles:
                free = [h for h in free if h.cell == handles[0].cell]
            if free and self.maybe():
                handle = self.choose(free)
                param = replace(handle.name, name=self.fresh("w" if handle.name.view else "r"))
                args.append(handle.name)
                handles.append(replace(handle, name=param, home=None))
            else:
                type = self.some_type(scope)
                args.append(self.expr(scope, type))
                param = Name(type, self.fresh("v"))
                values.append(param)
            params.append(param.name)
        hidden = [] if ours else [h.cell for h in handles]

        def inner():
            result = self.inside(scope)
            result.handles = [h for h in result.handles if h.cell not in hidden] + handles
            result.values += values
            return result

        if args and self.maybe(one_in=3):
            return (tuple(args),), (tuple(params),), inner
        return tuple(args), tuple(params), inner

    def result_types(self, scope):
        return tuple(self.some_type(scope) for _ in range(self.choose((1, 0, 2))))
