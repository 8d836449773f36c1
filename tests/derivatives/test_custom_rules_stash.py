"""Backward rules that write a ref argument which the forward rule gave them as a residual."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs

same = np.testing.assert_allclose


@jax.custom_vjp
def stash(r, x):
    return x


def stash_backward(r, g):
    r[...] = g
    return None, g


stash.defvjp(lambda r, x: (x, r), stash_backward)


def twice(r, x):
    x = stash(r, jnp.sin(x))
    return stash(r, jnp.sin(x))  # written first, by the backward pass


def once(f):
    """`f`, in a loop of one step."""
    return lambda x: lax.scan(lambda x, _: (f(x), ()), x, None, length=1)[0]


def in_scan(body):
    return lambda r, x: once(lambda x: body(r, x))(x)


PROGRAMS = {
    "alone": twice,
    "jax.jit": jax.jit(twice),
    "refs.jit": refs.jit(twice),
    "scan": in_scan(twice),
    "scan of remat": in_scan(jax.checkpoint(twice)),
    "refs.checkpoint": refs.checkpoint(twice),
    "cond": lambda r, x: lax.cond(x > 0, twice, lambda r, x: x, r, x),
}
WAYS = {
    "grad": lambda f: refs.grad(f, 1),
    "closed over": lambda f: lambda r, x: refs.grad(lambda x: f(r, x))(x),
    "vjp": lambda f: lambda r, x: refs.vjp(lambda x: f(r, x), x)[1](1.0)[0],
    "aux": lambda f: lambda r, x: refs.grad(lambda x: (f(r, x), x), has_aux=True)(x)[0],
    "of the ref too": lambda f: lambda r, x: refs.grad(f, (0, 1))(r, x)[1],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_ref_as_residual(program, way, jit):
    r = refs.new_ref(jnp.float32(0), name="r")
    slope = jit(WAYS[way](PROGRAMS[program]))(r, jnp.float32(1))
    same(slope, np.cos(np.sin(1)) * np.cos(1), rtol=1e-6)
    same(r[...], np.cos(np.sin(1)), rtol=1e-6)


def test_a_row_as_residual(jit):
    rows = refs.new_ref(jnp.zeros((2, 3)))

    def layers(rows, x):
        return lax.scan(lambda x, row: (stash(row, 2 * x), ()), x, rows)[0].sum()

    same(jit(refs.grad(layers, 1))(rows, jnp.ones(3)), [4, 4, 4])
    same(rows[...], [[2, 2, 2], [1, 1, 1]])


def test_lanes_accumulate_into_a_residual(jit):
    total = refs.new_ref(jnp.float32(0))
    f = jax.custom_vjp(lambda r, x: x)

    def backward(r, g):
        r[...] += g
        return None, g

    f.defvjp(lambda r, x: (x, r), backward)
    xs = jnp.array([1.0, 2.0, 3.0])
    jit(refs.grad(lambda xs: refs.vmap(lambda x: f(total, x * x))(xs).sum()))(xs)
    assert total[...] == 3


def test_each_lane_has_its_residual(jit):
    rows = refs.new_ref(jnp.zeros(3))
    xs = jnp.array([1.0, 2.0, 3.0])
    same(jit(refs.vmap(refs.grad(twice, 1)))(rows, xs), np.cos(np.sin(xs)) * np.cos(xs), rtol=1e-6)
    same(rows[...], np.cos(np.sin(xs)), rtol=1e-6)


# --- Into a ref that all lanes share, which the function takes as an argument ---------------------


@jax.custom_vjp
def tap(r, x):
    return x


def tap_backward(r, g):
    r.at[...].add(g)
    return None, g


tap.defvjp(lambda r, x: (x, r), tap_backward)
TAPS = {
    "vmap of grad": lambda f: refs.vmap(refs.grad(f)),
    "vmap of jit of grad": lambda f: refs.vmap(refs.jit(refs.grad(f))),
    "vmap of vjp": lambda f: refs.vmap(lambda x: refs.vjp(f, x)[1](1.0)[0]),
    "grad of vmap": lambda f: refs.grad(lambda xs: refs.vmap(f)(xs).sum()),
    "vmap of grad of scan": lambda f: refs.vmap(refs.grad(once(f))),
    "vmap of grad of checkpoint": lambda f: refs.vmap(refs.grad(refs.checkpoint(f))),
    "vmap of grad of cond": lambda f: refs.vmap(refs.grad(lambda x: refs.cond(x > 0, f, f, x))),
    "in a loop": lambda f: (
        lambda xs: refs.scan(lambda _, xs: (None, refs.vmap(refs.grad(f))(xs)), None, xs[None])[1][
            0
        ]
    ),
}


@pytest.mark.parametrize("way", TAPS)
def test_lanes_accumulate(way, jit):
    total = refs.new_ref(jnp.float32(1), name="total")
    xs = jnp.array([0.5, 2.0])
    gradient = jit(TAPS[way](lambda x: tap(total, x) ** 2))
    for n in (1, 2):
        same(gradient(xs), 2 * xs)
        same(total[...], 1 + n * 2 * xs.sum())


def test_lanes_accumulate_at_indices(jit):
    @jax.custom_vjp
    def tap_at(r, k, x):
        return x

    def backward(saved, g):
        r, k = saved
        r[k] += g
        return None, None, g

    tap_at.defvjp(lambda r, k, x: (x, (r, k)), backward)
    bins = refs.new_ref(jnp.zeros(3))
    lanes = refs.vmap(lambda k, x: refs.grad(lambda x: tap_at(bins, k, x) ** 2)(x))
    jit(lanes)(jnp.array([0, 2, 0]), jnp.array([1.0, 2.0, 3.0]))
    same(bins[...], [8, 0, 4])


def test_lanes_of_a_rule_that_also_reads(jit):
    """The forward rule reads a ref that the function only takes: it gets the value."""
    r = refs.new_ref(jnp.float32(3), name="r")
    f = jax.custom_vjp(lambda r, x: x)
    f.defvjp(lambda r, x: (x, r[...]), lambda scale, g: (None, scale * g))
    same(jit(refs.vmap(refs.grad(lambda x: f(r, x) ** 2)))(jnp.array([1.0, 2.0])), [6, 12])


def overwrites(last, total):
    last[...] = 5.0


def overwrites_in_a_loop(last, total):
    lax.fori_loop(0, 3, lambda k, _: last.set(k + 3.0), None)


def overwrites_and_reads(last, total):
    last[...] = total.shape[0] + 4.0
    total[...] += last[...]


OVERWRITES = [overwrites, overwrites_in_a_loop, overwrites_and_reads]
OVERWRITING_LANES = {
    "lanes": refs.vmap,
    "loops in lanes": lambda f: refs.vmap(once(f)),
    "lanes in lanes": lambda f: lambda xs: refs.vmap(refs.vmap(f))(xs[None]),
}


@pytest.mark.parametrize("lanes", OVERWRITING_LANES)
@pytest.mark.parametrize("write", OVERWRITES, ids=lambda f: f.__name__)
def test_lanes_overwrite_by_what_is_the_same_in_each(write, lanes, jit):
    if write is overwrites_in_a_loop and lanes == "lanes in lanes":
        pytest.skip("for the outer lanes a loop is no overwriting of the whole")
    last, total = refs.new_ref(0.0, name="last"), refs.new_ref(jnp.zeros(1), name="total")
    f = jax.custom_vjp(lambda x: 2 * x)

    def backward(_, g):
        write(last, total)
        return (2 * g,)

    f.defvjp(lambda x: (f(x), None), backward)
    gradient = jit(refs.grad(lambda xs: OVERWRITING_LANES[lanes](f)(xs).sum()))
    same(gradient(jnp.arange(3.0)), [2, 2, 2])
    assert last[...] == 5
    assert total[0] == (15 if write is overwrites_and_reads else 0)
    gradient(jnp.zeros(0))
    assert last[...] == 5


def test_lanes_whose_rule_overwrites_what_the_function_adds_to(jit):
    last = refs.new_ref(0.0, name="last")

    @jax.custom_jvp
    def double(x):
        last[...] += 1
        return 2 * x

    @double.defjvp
    def rule(primals, tangents):
        last[...] = 5.0
        return 2 * primals[0], 2 * tangents[0]

    same(jit(refs.vmap(refs.grad(double)))(jnp.arange(3.0)), [2, 2, 2])
    assert last[...] == 5


def test_an_error_in_lanes_names_the_line_of_the_rule():
    last = refs.new_ref(0.0, name="last")
    f = jax.custom_vjp(lambda x: 2 * x)

    def backward(x, g):
        last[...] = x  # here
        return (2 * g,)

    f.defvjp(lambda x: (2 * x, x), backward)
    with open(__file__) as file:
        line = next(k for k, text in enumerate(file, 1) if text.endswith("x  # here\n"))
    with pytest.raises(refs.errors.RefValueError, match=f"stash.py:{line}: all lanes share it"):
        refs.grad(lambda xs: refs.vmap(f)(xs).sum())(jnp.arange(3.0))
