"""Programs of the primitives that read and update parts of arrays: see `primitive_cases`."""

import functools
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode as Mode

from tests.inplace.primitive_cases import INDEX_TYPES, MODES, group, indices, values

# --- Scatters ---

ELEMENTS = lax.ScatterDimensionNumbers((), (0,), (0,))
WINDOWS = lax.ScatterDimensionNumbers((1,), (), (0,))
ROWS_OF_LANES = lax.ScatterDimensionNumbers((), (1,), (1,), (0,), (0,))
LANES_OF_ROWS = lax.ScatterDimensionNumbers((), (0,), (0,), (1,), (0,))
METHODS = {
    "set": lax.scatter,
    "add": lax.scatter_add,
    "sub": lax.scatter_sub,
    "mul": lax.scatter_mul,
    "min": lax.scatter_min,
    "max": lax.scatter_max,
}


def scattering(x, i, v, method="set", dims=ELEMENTS, **keywords):
    return METHODS[method](x, i, v, dims, **keywords)


def applying(x, i, fun=jnp.square, **keywords):
    return lax.scatter_apply(x, i, fun, ELEMENTS, update_shape=i.shape[:-1], **keywords)


@group
def scatter_modes():
    x, i = values(200), np.array([3, -2, 199, 200, 3, 7], np.int32)
    own = np.array([3, -2, 7, 199, 200], np.int32)  # sorted as unsigned numbers aren't needed
    for mode in MODES:
        for name in METHODS:
            run = functools.partial(scattering, method=name, mode=mode)
            yield run, x, (i[:, None], values(6))
            unique = functools.partial(run, unique_indices=True)
            yield unique, x, (own[:, None], values(5))
        is_sorted = functools.partial(scattering, mode=mode, indices_are_sorted=True)
        yield is_sorted, x, (np.array([[3], [3], [7], [199], [200]], np.int32), values(5))
        yield functools.partial(applying, mode=mode), x, (i[:, None],)
        yield functools.partial(applying, fun=jnp.exp, mode=mode), x, (i[:2, None],)
        # Of so many rows a loop is made.
        yield functools.partial(applying, mode=mode), x, (np.arange(-2, 10)[:, None],)
        many = np.arange(-2, 10, dtype=np.int32)[:, None] * 20
        yield functools.partial(scattering, mode=mode), x, (many, values(12))
    yield lambda x, i: x.at[i].apply(jnp.negative), x, (i[:2],)
    yield lambda x, i: x.at[i].apply(jnp.negative), x, (np.int32(5),)
    yield lambda x, i: x.at[i].divide(4.0), x, (i[:2],)
    yield lambda x, i: x.at[i].power(2.0), x, (i[:2],)


DIMENSIONS = [
    # The shape, the indices, the shape of the rows, and the dimensions.
    ((200,), [[3], [198], [-1]], (3, 2), WINDOWS),
    ((200,), [[3], [198], [-1]], (2, 3), lax.ScatterDimensionNumbers((0,), (), (0,))),
    ((20, 9), [[3], [19], [20]], (3, 3), lax.ScatterDimensionNumbers((1,), (0,), (0,))),
    ((20, 20), [[3, 7], [7, 20], [-1, 0]], (3,), lax.ScatterDimensionNumbers((), (0, 1), (0, 1))),
    ((20, 20), [[3, 7], [7, 20], [-1, 0]], (3,), lax.ScatterDimensionNumbers((), (0, 1), (1, 0))),
    ((20, 20), [[3, 7], [18, 6]], (2, 2, 3), lax.ScatterDimensionNumbers((1, 2), (), (1, 0))),
    ((4, 80), [[3], [80], [-1], [79]], (4,), ROWS_OF_LANES),
    ((80, 4), [[3], [80], [-1], [79]], (4,), LANES_OF_ROWS),
    ((200,), [[[3], [4]], [[200], [3]]], (2, 2), ELEMENTS),
]  # fmt: skip


@group
def scatter_dimensions():
    for (shape, i, rows, dims), mode, name in itertools.product(
        DIMENSIONS, (Mode.CLIP, Mode.FILL_OR_DROP, Mode.PROMISE_IN_BOUNDS), ("set", "add")
    ):
        run = functools.partial(scattering, method=name, dims=dims, mode=mode)
        yield run, values(*shape), (np.array(i, np.int32), values(*rows))


def index_types(mode, rows, methods):
    for k, (dtype, n) in enumerate(INDEX_TYPES):
        i = indices(dtype, n, rows)[:, None]
        run = functools.partial(scattering, method=methods[k % 2], mode=mode)
        yield run, values(n), (i, values(len(i)) + 1)


@group
def scatter_index_types_dropped():
    return index_types(Mode.FILL_OR_DROP, 7, ("set", "add"))


@group
def scatter_index_types_clipped():
    return index_types(Mode.CLIP, 7, ("add", "set"))


@group
def scatter_value_types():
    i = np.array([[3], [-2], [200], [3]], np.int32)
    for dtype in ("float16", jnp.bfloat16, "int8", "uint64", "bool", "complex64", "float64"):
        for name in ("set", "add", "mul", "max")[: 1 if dtype == "bool" else 4]:
            if (dtype, name) != ("complex64", "max"):
                x = values(200, dtype=dtype)
                yield functools.partial(scattering, method=name), x, (i, values(4, dtype=dtype))


# --- Gathers ---


def gathering(x, i, dims, sizes, mode, **keywords):
    return lax.gather(x, i, dims, sizes, mode=mode, **keywords)


def beside(read):
    """The read, and an update: without one the pass leaves a program alone."""
    return lambda x, *operands: (read(x, *operands), x.at[(0,) * x.ndim].set(1))


def of_scatter(dims, shape, rows):
    """The dimensions and sizes of the gather that reads the rows of a scatter."""
    numbers = lax.GatherDimensionNumbers(
        *(dims.update_window_dims, dims.inserted_window_dims, dims.scatter_dims_to_operand_dims),
        *(dims.operand_batching_dims, dims.scatter_indices_batching_dims),
    )
    gone = (*dims.inserted_window_dims, *dims.operand_batching_dims)
    window = iter(rows[d] for d in dims.update_window_dims)
    return numbers, tuple(1 if d in gone else next(window) for d in range(len(shape)))


@group
def gather():
    for (shape, i, rows, dims), mode in itertools.product(DIMENSIONS, MODES[:3]):
        numbers, whole = of_scatter(dims, shape, rows)
        run = functools.partial(gathering, dims=numbers, sizes=whole, mode=mode)
        yield beside(run), values(*shape), (np.array(i, np.int32),)
    for (dtype, n), mode in itertools.product(INDEX_TYPES, MODES[:3]):
        if mode != Mode.FILL_OR_DROP or n == 1000:
            numbers, whole = of_scatter(ELEMENTS, (n,), (1,))
            run = functools.partial(gathering, dims=numbers, sizes=whole, mode=mode)
            yield beside(run), values(n), (indices(dtype, n, 6)[:, None],)
    for fill in (7.0, None):
        run = functools.partial(gathering, dims=numbers, sizes=whole, mode="fill", fill_value=fill)
        yield beside(run), values(1000), (np.array([[3], [-1], [1000]], np.int32),)


@group
def gather_transposed():
    """The transpose of a gather is a scatter of the same mode."""
    tokens = np.array([1, 100, -101, 1], np.int32)
    for mode in (None, "clip", "fill", "promise_in_bounds"):

        def loss(table, tokens, mode=mode):
            return (table.at[tokens].get(mode=mode) * 2).sum()

        yield jax.grad(loss), values(100, 4), (tokens,)
        yield lambda x, *o, loss=loss: x + jax.grad(loss)(x, *o), values(100, 4), (tokens,)


# --- Masked rows ---


@group
def masked_rows():
    """Lanes that write back what was there, as `vmap` makes them of masked writes."""
    for dtype, n in INDEX_TYPES:
        i = indices(dtype, n, 7)
        mask = np.arange(len(i)) % 3 != 1
        for width in (1, 3):

            def write(x, i, mask, width=width):
                old = lax.dynamic_slice(x, (i,), (width,), allow_negative_indices=False)
                new = lax.select(jnp.broadcast_to(mask, old.shape), jnp.full_like(old, 99), old)
                return lax.dynamic_update_slice(x, new, (i,), allow_negative_indices=False)

            yield jax.vmap(write), values(len(i), n), (i, mask)


@group
def masked_in_other_ways():
    x, i, mask = values(4, 100), np.array([3, -1, 99, 100], np.int32), np.arange(4) % 2

    def choose(x, i, which, cases=2, reverse=False):
        old = lax.dynamic_slice(x, (i,), (1,), allow_negative_indices=False)
        new = [old, *(old * 0 + k for k in range(1, cases))]
        chosen = lax.select_n(which[None], *(new[::-1] if reverse else new))
        return lax.dynamic_update_slice(x, chosen, (i,), allow_negative_indices=False)

    for dtype, cases, reverse in itertools.product(("bool", "int32"), (2, 3), (False, True)):
        if (dtype, cases) != ("bool", 3):
            run = functools.partial(choose, cases=cases, reverse=reverse)
            yield jax.vmap(run), x, (i, mask.astype(dtype))
            yield run, x[0], (i[2], mask.astype(dtype)[1])
    element = jax.vmap(lambda x, mask: lax.select(mask, x * 0 - 1, x))
    yield element, values(100), (np.arange(100) % 3 == 0,)

    def row_of_no_axes(x, mask):
        new = lax.select(mask, jnp.float32(9), lax.dynamic_slice(x, (), ()))
        return lax.dynamic_update_slice(x, new, ())

    yield jax.vmap(row_of_no_axes), values(100), (np.arange(100) % 3 == 0,)


# --- Slices ---

# XLA then writes outside of an array if a slice's start has fewer bits than its bounds.
OLD_EMITTERS = "xla_cpu_use_fusion_emitters=false" in os.environ.get("XLA_FLAGS", "")


@group
def slices():
    for dtype, n in INDEX_TYPES:
        if OLD_EMITTERS and np.iinfo(dtype).bits < 32:
            continue
        start = indices(dtype, n)

        def move(x, start, width=3):
            """Each block is read where the one before it is written."""
            read = []
            for k in range(len(start)):
                block = lax.dynamic_slice(x, (start[k],), (width,), allow_negative_indices=False)
                x = lax.dynamic_update_slice(
                    x, block * 2 + x[:width], (start[k - 1],), allow_negative_indices=False
                )
                read.append(block)
            return x, jnp.stack(read)

        yield move, values(n), (start,)
    both = (np.int8(3), np.int8(-3)), (np.uint8(99), np.uint8(7)), (np.int16(300), np.int16(19))
    for i, j in both:
        yield (
            lambda x, i, j: lax.dynamic_update_slice(
                x, lax.dynamic_slice(x, (j, i), (2, 3)) + 1, (i, j)
            ),
            values(20, 20),
            (i, j),
        )
        yield lambda x, i, j: x.at[i].set(x[j]).at[j].set(x[i]), values(100), (i, j)
        yield lambda x, i, j: x.at[i].add(x[j, 0]), values(20, 20), (i, j)


@group
def slices_of_slices():
    """XLA before 0.11.2 has slices of slices wrong, but not gathers and scatters of slices."""
    rows = np.array([3, 60, -1], np.int32)
    for start in np.array([0, 70, 99, -5], np.int32):

        def read_of(y, rows):
            return y.at[rows].get(mode="clip", wrap_negative_indices=False)

        def part(x, start):
            return lax.dynamic_slice(x, (start,), (50,), allow_negative_indices=False)

        def read(x, start, rows):
            return read_of(part(x, start), rows)

        def add(x, start, rows):
            return part(x, start).at[rows].add(1.0, mode="clip", wrap_negative_indices=False)

        def in_branches(x, start, rows):
            return lax.cond(start > 7, read, lambda *o: read(*o) + 1, x, start, rows)

        def in_a_loop(x, start, rows):
            y = part(x, start)
            return lax.fori_loop(0, 1, lambda k, c: c + read_of(y, rows + k), jnp.zeros(3))

        def deposit(x, start, rows):
            zeros = lax.dynamic_update_slice(jnp.zeros(50), rows * 1.0, (rows[1],))
            return part(x, start) + zeros

        def under_other_shapes(x, start, rows):
            y = lax.reshape(part(x, start), (1, 50)).T
            return y.at[rows, 0].get(mode="clip")

        for run in (read, add, in_branches, in_a_loop, deposit, under_other_shapes):
            yield beside(run), values(100), (start, rows)
        yield jax.grad(lambda x, *o: (read(x, *o) ** 2).sum()), values(100), (start, rows)
