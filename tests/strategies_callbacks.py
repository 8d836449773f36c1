"""Random programs with host callbacks, at any depth, also in lanes of `refs.vmap`.

They are those of `strategies` and `strategies_lanes`, and a statement more. The callback is one
text for everybody, NumPy on NumPy arrays: what it writes and returns depends on all that it is
given and on where it stands there, so that a stale or misplaced element shows in the numbers.

What integer arrays and masks name is given as a copy, which is put back afterwards. So of such a
ref nothing else is among the arguments of that call: one of the two would win.
"""

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.strategies import Builder
from tests.strategies_indices import IntArray, Mask
from tests.strategies_lanes import WRAPPERS, LaneBuilder
from tests.strategies_syntax import At, Block, Cond, Names, Program, Type, pattern
from tests.strategies_values import BOOL, Features

HOST = '''
log = []


def host(seed, *types):
    """A callback that depends on all it is given, and returns arrays of these types."""

    def call(*args, **named):
        log.append(seed)
        total = seed
        for x in (*args, *named.values()):
            total = (total + weight(x)) % 64
            if x.flags.writeable:
                n = np.arange(x.size).reshape(x.shape)
                np.copyto(x, numbers(n * seed + total, x.dtype), where=(n + seed) % 3 != 0)
        return tuple(numbers(np.arange(m).reshape(shape) + total, d) for m, shape, d in types)

    return call


def weight(x):
    x = (x.real + 2 * x.imag if x.dtype.kind == "c" else x).astype(np.int64)
    return int((x * (np.arange(x.size).reshape(x.shape) % 5 + 1)).sum())


def numbers(n, dtype):
    """Small ones, in the dtype."""
    n = n % 7 if np.dtype(dtype).kind == "u" else n % 7 - 2
    return (n % 2 == 1 if np.dtype(dtype).kind == "b" else n).astype(dtype)

'''


@dataclass(frozen=True)
class Callback:
    """`names = refs.io_callback(host(seed, …), types, *args)`."""

    names: Names
    seed: int
    types: tuple[Type, ...]
    args: tuple
    named: Any  # one more argument, or None
    options: tuple[str, ...]  # the function, and more arguments for it

    def __str__(self):
        function, *options = self.options
        sizes = [(size(t.shape), t.shape, t.dtype.rstrip("_")) for t in self.types]
        host = f"host({', '.join(map(str, (self.seed, *sizes)))})"
        types = [f"jax.ShapeDtypeStruct({t.shape}, jnp.{t.dtype})" for t in self.types]
        args = [host, f"({''.join(f'{t}, ' for t in types)})", *map(str, self.args)]
        args += [f"named={self.named}"] if self.named is not None else []
        return f"{pattern(self.names)}refs.{function}({', '.join([*args, *options])})"


class CallbackProgram(Program):
    """A program, and the functions that its callbacks are made by."""

    def __str__(self):
        return HOST + super().__str__()


def size(shape):
    return shape[0] * size(shape[1:]) if shape else 1


def callback_programs(ordered=False, **features):
    """Programs with callbacks; ordered ones only, or of all kinds."""
    wanted = Features(**features)
    return seeds().map(lambda seed: OneByOne(seed, wanted).with_callbacks(ordered))


def mapped_callback_programs(**features):
    """Programs with callbacks in lanes of a map."""
    wanted = Features(**{"wrappers": WRAPPERS, "max_size": 8, **features})
    return seeds().map(lambda seed: InLanes(seed, wanted).with_callbacks(False))


def seeds():
    return st.integers(0, 2**64 - 1)


class Calling:
    """Draws callbacks among the other statements."""

    ordered = False

    def with_callbacks(self, ordered):
        self.ordered = ordered
        program = self.program()
        return CallbackProgram(program.cells, program.inputs, program.block, program.args)

    def statement(self, scope):
        if self.maybe(one_in=3):
            return self.guarded(scope) if self.maybe(one_in=4) else self.callback(scope)
        return super().statement(scope)

    def guarded(self, scope):
        """A callback in a branch, and nothing in the other: what XLA is tempted to copy for."""
        inner = self.inside(scope)
        blocks = [
            Block(self.fresh("f"), (), tuple(self.callback(inner)), ()),
            Block(self.fresh("f"), (), (), ()),
        ]
        return [Cond((), self.expr(scope, BOOL), tuple(self.shuffled(blocks)), ())]

    def callback(self, scope):
        args, taken = [], {}
        for _ in range(self.upto(3)):
            if not (handles := scope.visible("write")):
                break
            handle = self.choose(handles)
            part: Any = handle.name
            while self.maybe(one_in=3):
                part = self.at(scope, part)
            copied = is_copied(part)
            if handle.cell not in taken or not (copied or taken[handle.cell]):
                taken[handle.cell] = copied
                args.append(part)
        args += [self.expr(scope, self.some_type(scope)) for _ in range(self.upto(2))]
        args = self.shuffled(args)
        named = args.pop() if args and self.maybe(one_in=4) else None
        types = tuple(self.some_type(scope) for _ in range(self.upto(2)))
        names = self.binds(scope, types)
        seed = self.between(1, 60)
        return [Callback(names, seed, types, tuple(args), named, self.options())]

    def options(self):
        if self.ordered:
            return ("io_callback", "ordered=True")
        return self.choose(
            (
                ("io_callback",),
                ("io_callback", "keep_old=False"),
                ("io_callback", "ordered=True"),
                ("pure_callback",),
                ("pure_callback", "keep_old=True"),
            )
        )


class OneByOne(Calling, Builder):
    """Programs without maps."""


class InLanes(Calling, LaneBuilder):
    """Programs with a map. What lanes do has no order between them, and so no `ordered`."""

    def options(self):
        return self.choose(
            (
                ("io_callback",),
                ("pure_callback", "vmap_method='sequential'"),
                ("pure_callback", "vmap_method='sequential_unrolled'"),
            )
        )


def is_copied(part):
    """Whether a callback is given a copy of a part, for an array in one of its indices."""
    if not isinstance(part, At):
        return part.view
    return any(isinstance(e, IntArray | Mask) for e in part.index.items) or is_copied(part.base)
