"""Indices of random programs: what they are, how they read, and how they are drawn."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Int:
    value: int

    def __str__(self):
        return str(self.value)


@dataclass(frozen=True)
class Slice:
    start: int | None = None
    stop: int | None = None
    step: int | None = None

    def __str__(self):
        start, stop, step = ("" if x is None else x for x in (self.start, self.stop, self.step))
        return f"{start}:{stop}" + (f":{step}" if self.step is not None else "")


@dataclass(frozen=True)
class NewAxis:
    def __str__(self):
        return "None"


@dataclass(frozen=True)
class Dots:
    def __str__(self):
        return "..."


@dataclass(frozen=True)
class IntArray:
    values: tuple
    traced: bool = False

    def __str__(self):
        if self.traced:
            return f"jnp.array({nested(self.values)}, jnp.int32)"
        return f"np.array({nested(self.values)})"


@dataclass(frozen=True)
class Mask:
    values: tuple

    def __str__(self):
        return f"np.array({nested(self.values)})"


@dataclass(frozen=True)
class TracedInt:
    """A scalar that is known only when the program runs, brought within (-size, size)."""

    value: Any
    size: int

    def __str__(self):
        return f"lax.rem(jnp.int32({self.value}), jnp.int32({self.size}))"


@dataclass(frozen=True)
class Window:
    """`jax.ds(start, size, stride)` along an axis, of which `room` elements are outside of it."""

    start: Any
    size: int
    room: int
    stride: int = 1

    def __str__(self):
        start = self.start
        if not isinstance(start, int):
            start = f"jnp.abs(lax.rem(jnp.int32({start}), jnp.int32({self.room + 1})))"
        return f"jax.ds({start}, {self.size}" + (f", {self.stride})" if self.stride > 1 else ")")


@dataclass(frozen=True)
class Index:
    items: tuple

    def __str__(self):
        """As it stands between brackets."""
        return ", ".join(map(str, self.items)) or "()"

    def argument(self):
        """As it stands among the arguments of a function."""
        if len(self.items) == 1 and not isinstance(self.items[0], Slice):
            # To these functions, as to JAX's, None by itself means the whole.
            return str(self) if str(self) != "None" else "(None,)"
        return f"np.s_[{self}]" if self.items else "()"

    def example(self):
        """An index for NumPy that takes as many elements as this one."""
        return tuple(map(example, self.items))

    def shape(self, shape):
        """The shape of what this index takes from an array of `shape`."""
        return np.empty(shape)[self.example()].shape

    def repeats(self, shape):
        """Whether an element is indexed twice."""
        taken = np.arange(math.prod(shape)).reshape(shape)[self.example()]
        return len(np.unique(taken)) < taken.size


EVERYTHING = Index((Dots(),))


def example(item):
    match item:
        case Int(value):
            return value
        case Slice(start, stop, step):
            return slice(start, stop, step)
        case NewAxis():
            return None
        case Dots():
            return ...
        case IntArray(values) | Mask(values):
            return np.array(values)
        case TracedInt():
            return 0
        case Window(_, size):
            return slice(0, size)
    raise AssertionError(item)


def nested(values):
    """Nested tuples, as nested lists."""
    return f"[{', '.join(map(nested, values))}]" if isinstance(values, tuple) else repr(values)


# --- Drawing them -------------------------------------------------------------------------------

KINDS = ("everything", "basic", "traced", "array", "mask", "window")


def draw_index(choices, shape, scalar, unique=False):
    """An index into `shape`, in bounds.

    `scalar()` draws an expression for an int32 scalar. With `unique`, no element is indexed twice.
    """
    kind = choices.choose(KINDS if shape else ("everything", "basic"))
    if kind == "everything":
        return EVERYTHING
    # Some axes are indexed from the front, some from the back, and dots stand for the others.
    front = choices.between(0 if kind == "basic" else min(1, len(shape)), len(shape))
    back = choices.upto(len(shape) - front)
    axes = [*range(front), *range(len(shape) - back, len(shape))]
    items = {axis: draw_basic(choices, shape[axis], scalar) for axis in axes}
    match kind:
        case "traced":
            axis = choices.choose(axes)
            items[axis] = TracedInt(scalar(), shape[axis])
        case "array":
            draw_arrays(choices, shape, axes, items, unique)
        case "mask":
            # A mask may span several axes; it stands at the first and takes the others' places.
            first = choices.upto(front - 1)
            last = choices.between(first, front - 1)
            items[first] = Mask(draw_mask(choices, shape[first : last + 1]))
            for axis in range(first + 1, last + 1):
                del items[axis]
        case "window":
            axis = choices.choose(axes)
            stride = choices.choose((1, 1, 2, 3))
            size = choices.between(1, (shape[axis] - 1) // stride + 1)
            room = shape[axis] - (size - 1) * stride - 1
            start = scalar() if choices.maybe() else choices.upto(room)
            items[axis] = Window(start, size, room, stride)
    before = [items[axis] for axis in range(front) if axis in items]
    after = [items[axis] for axis in range(len(shape) - back, len(shape)) if axis in items]
    dots = [Dots()] if after or choices.maybe() else []
    result = [*before, *dots, *after]
    if kind != "window" and choices.maybe(one_in=5):
        result.insert(choices.upto(len(result)), NewAxis())
    return Index(tuple(result))


def draw_basic(choices, size, scalar):
    match choices.choose(("int", "slice", "slice", "traced")):
        case "int":
            return Int(choices.between(-size, size - 1))
        case "traced":
            return TracedInt(scalar(), size)
    ends = [None, *range(-size, size + 1)]
    return Slice(choices.choose(ends), choices.choose(ends), choices.choose((None, 2, -1, -2)))


def draw_arrays(choices, shape, axes, items, unique):
    """Put an integer array on one of the axes, or on two of them."""
    axis = choices.choose(axes)
    size = shape[axis]
    count = choices.between(1, size) if unique else choices.between(1, 3)
    values = choices.shuffled(range(size))[:count] if unique else []
    while len(values) < count:
        values.append(choices.upto(size - 1))
    values = [i - size if choices.maybe(one_in=3) else i for i in values]
    items[axis] = IntArray(tuple(values), traced=choices.maybe())
    others = [a for a in axes if a != axis]
    if others and choices.maybe():
        # Of the pairs, the first number is distinct already.
        other = choices.choose(others)
        second = [choices.between(-shape[other], shape[other] - 1) for _ in values]
        items[other] = IntArray(tuple(second), traced=choices.maybe())
    elif not unique and choices.maybe(one_in=4):
        items[axis] = IntArray((tuple(values), tuple(values[::-1])), items[axis].traced)


def draw_mask(choices, shape):
    mask = np.array([choices.maybe() for _ in range(math.prod(shape))])
    return as_tuple(mask.reshape(shape).tolist())


def as_tuple(values):
    return tuple(map(as_tuple, values)) if isinstance(values, list) else values
