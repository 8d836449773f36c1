"""What is permuted and written back over itself, where XLA may see the array under two shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import refs

pytestmark = pytest.mark.as_released

N = 12  # elements of a row
BLOCK = 4  # elements that are read, and written
ORDER = np.array([2, 0, 3, 1])

PERMUTED = {
    "the same place": lambda xp, b: 2 * b + 1,
    "reversed": lambda xp, b: b[::-1],
    "rolled": lambda xp, b: xp.roll(b, 1),
    "taken": lambda xp, b: b[ORDER],
    "summed": lambda xp, b: xp.cumsum(b),
    "sorted": lambda xp, b: -xp.sort(-b),
    "transposed": lambda xp, b: b.reshape(2, 2).T.reshape(BLOCK),
    "multiplied": lambda xp, b: (b[None] * np.triu(np.ones((BLOCK, BLOCK), int))).sum(1),
    "one for all": lambda xp, b: xp.broadcast_to(b[1] + 1, (BLOCK,)),
    "each and another": lambda xp, b: b + b[::-1],
}


def run(xp, steps, read, write, loop):
    """Runs steps: an element is incremented, or a block is permuted, once or in a loop."""
    for kind, name, at, to in steps:

        def step(k, name=name, at=at, to=to):
            write(to + k, BLOCK, PERMUTED[name](xp, read(at + k, BLOCK)))

        if kind == "element":
            write(at, 1, read(at, 1) + 1)
        elif kind == "block":
            step(0)
        else:
            loop(step)


def over_numpy(x, steps):
    x = x.copy()

    def write(at, n, value):
        x[at : at + n] = value

    def loop(step):
        for k in range(2):
            step(k)

    run(np, steps, lambda at, n: x[at : at + n].copy(), write, loop)
    return x


def over_ref(ref, steps, start, index=lambda block: block):
    """`index` makes an index of the ref of a block of a row."""

    def write(at, n, value):
        ref[index(jax.ds(start + at, n))] = value.astype(ref.dtype)

    def loop(step):
        lax.fori_loop(0, 2, lambda k, _: step(k), None)

    run(jnp, steps, lambda at, n: ref[index(jax.ds(start + at, n))], write, loop)


def in_rows(ref, steps, start):
    lax.scan(lambda _, row: (None, over_ref(row, steps, start)), None, ref)


def in_lanes(axis):
    def run_lanes(ref, steps, start):
        refs.vmap(lambda row, at: over_ref(row, steps, at), in_axes=(axis, 0))(ref, start[None])

    return run_lanes


def made_inside(ref, steps, start):
    new = refs.new_ref(ref[...].reshape(-1) + 0)
    over_ref(new, steps, start)
    ref[...] = new[...].reshape(ref.shape)


LAYOUTS = {
    "an axis": ((N,), over_ref),
    "a column": ((N, 1), lambda *args: over_ref(*args, index=lambda block: (block, 0))),
    "a row": ((1, N), lambda *args: over_ref(*args, index=lambda block: (0, block))),
    "the one row of a loop": ((1, N), in_rows),
    "the one lane": ((1, N), in_lanes(0)),
    "the one lane, last": ((N, 1), in_lanes(1)),
    "another shape": ((3, 4), made_inside),
}

kinds, names = st.sampled_from(["element", "block", "loop"]), st.sampled_from([*PERMUTED])
places = st.integers(0, N - BLOCK - 2)
in_place = st.tuples(kinds, names, places).map(lambda step: (*step, step[2]))
moved = st.tuples(st.just("block"), names, places, places)
steps = st.lists(in_place | moved, min_size=1, max_size=4)

FAULTY = [  # One of them at least is wrong in each layout that XLA takes for two shapes.
    [("element", "reversed", 1, 1), ("block", "reversed", 2, 2)],
    [("block", "the same place", 0, 1), ("block", "transposed", 5, 5)],
    [("loop", "sorted", 5, 5), ("block", "rolled", 5, 6)],
    [("element", "reversed", 0, 0), ("block", "one for all", 2, 2), ("block", "summed", 2, 3)],
]


def check(layout, steps):
    shape, program = LAYOUTS[layout]
    x = np.arange(N, dtype=np.int32) * 7 % 23
    ref = refs.new_ref(jnp.array(x).reshape(shape))
    refs.jit(lambda ref, start: program(ref, steps, start))(ref, jnp.int32(1))
    expected = over_numpy(np.roll(x, -1), steps)  # They start at the second element.
    np.testing.assert_array_equal(np.roll(np.asarray(ref[...]).reshape(-1), -1), expected)


@pytest.mark.parametrize("steps", FAULTY)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_are_permuted_as_in_numpy(layout, steps):
    check(layout, steps)


@given(layout=st.sampled_from([*LAYOUTS]), steps=steps)
def test_random_blocks_are_permuted_as_in_numpy(layout, steps):
    check(layout, steps)


def of_plain_jax(x, i):
    x = x.at[0, 1].add(1).reshape(-1)
    return lax.dynamic_update_slice(x, lax.dynamic_slice(x, (i,), (3,))[::-1], (i,))


def strided_over_what_was_moved(x):
    """A scatter into a block of another shape of the array: behind a fence, and before one."""
    x = x.reshape(-1)
    return x.at[1:].set(x[1:].at[::2].set(x[1::2] * 2))


def moved_over_an_update(x):
    x = x + 1
    return x.at[1:].set(x[:-1])[None]


@pytest.mark.parametrize(
    ("fun", "args"),
    [
        (of_plain_jax, (jnp.arange(6)[None], 2)),
        (moved_over_an_update, (jnp.ones((8, 16)),)),
        (strided_over_what_was_moved, (jnp.ones((64, 64)),)),
    ],
)
def test_plain_jax(fun, args):
    expected = jax.disable_jit()(fun)(*args)
    np.testing.assert_array_equal(jax.jit(refs.in_place(fun))(*args), expected)


@pytest.mark.parametrize("steps", [slice(1, None, 2), slice(None, None, -2), slice(2, None, 3)])
@pytest.mark.parametrize("moved", [lambda x: x.ravel(), lambda x: x.T, lambda x: x[None]])
def test_steps_of_what_was_moved(moved, steps):
    """Twice: what is behind a fence has a new name when it comes to another one."""

    def program(x):
        ref = refs.new_ref(moved(x))
        ref[steps] *= 2
        ref[steps] += ref[steps]
        return ref[...]

    x = np.arange(4096.0, dtype=np.float32).reshape(64, 64)
    expected = moved(x).copy()
    expected[steps] *= 4
    np.testing.assert_array_equal(refs.jit(program)(jnp.array(x)), expected)
