"""Primitives that aren't ours: bound as they are, whatever refs of their own they have."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import refs

X = np.arange(1, 9, dtype=np.float32)


def call(kernel, x, **options):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=shape, interpret=True, **options)


def kernel_of_one_block(x):
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2 + 1

    return call(kernel, x)(x)


def kernel_on_a_grid(x):
    """Sums blocks up in scratch memory, with a loop and a branch over the kernel's refs."""

    def kernel(x_ref, out_ref, sum_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            sum_ref[...] = jnp.zeros_like(sum_ref)

        def add(i, _):
            sum_ref[0] += x_ref[i]

        lax.fori_loop(0, 2, add, None)
        out_ref[...] = x_ref[...] + sum_ref[0]

    block = pl.BlockSpec((2,), lambda i: (i,))
    scratch = [pl.MemoryRef(jax.core.ShapedArray((1,), jnp.float32), pl.ANY)]
    options = {"in_specs": [block], "out_specs": block, "scratch_shapes": scratch}
    return call(kernel, x, grid=(4,), **options)(x)


def kernel_with_an_alias(x):
    def kernel(x_ref, y_ref, out_ref):
        out_ref[0] = y_ref[0] * 3

    return call(kernel, x, input_output_aliases={0: 0})(x, x + 1)


@jax.custom_vjp
def kernel_with_a_derivative(x):
    return kernel_of_one_block(x)


kernel_with_a_derivative.defvjp(lambda x: (kernel_of_one_block(x), None), lambda _, g: (2 * g,))


def body(r):
    r[0] += r[1]


own_p = Primitive("test_with_refs_of_its_own")
own_p.def_abstract_eval(lambda x, jaxpr: x)
own_p.def_impl(lambda x, jaxpr: jnp.asarray(x).at[0].add(x[1]))
mlir.register_lowering(own_p, mlir.lower_fun(own_p.impl, multiple_results=False))
ad.primitive_jvps[own_p] = lambda x, t, jaxpr: jax.jvp(lambda x: own_p.impl(x, jaxpr), x, t)
batching.primitive_batchers[own_p] = lambda x, axes, jaxpr: (
    jax.vmap(lambda x: own_p.impl(x, jaxpr), axes)(*x),
    0,
)


def primitive_of_the_future(x):
    return own_p.bind(x, jaxpr=jax.make_jaxpr(body)(jax.new_ref(x)))


@jax.custom_batching.custom_vmap
def mapped_by_a_rule(x):
    return x * 2


mapped_by_a_rule.def_vmap(lambda n, is_batched, x: (x * 2, True))


def solved(x):
    return lax.custom_linear_solve(lambda v: 2 * v, x, lambda f, b: b / 2, symmetric=True)


def descended(x):
    return jax.scipy.sparse.linalg.cg(lambda v: 2 * v, x)[0]


FUNCTIONS = {
    f.__name__: f
    for f in (
        kernel_of_one_block,
        kernel_on_a_grid,
        kernel_with_an_alias,
        kernel_with_a_derivative,
        primitive_of_the_future,
        mapped_by_a_rule,
        solved,
        descended,
    )
}
functions = pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)
smooth = pytest.mark.parametrize(
    "f", [kernel_with_a_derivative, primitive_of_the_future, solved, descended]
)
same = np.testing.assert_allclose


def stepping(f):
    def step(r):
        r[...] = f(r[...])
        return r[0]

    return step


@functions
@pytest.mark.parametrize(
    "wrap", [lambda f: f, refs.jit, refs.checkpoint], ids=["as it is", "jit", "checkpoint"]
)
def test_between_refs(f, wrap):
    r = refs.new_ref(X)
    first = wrap(stepping(f))(r)
    same(r[...], f(X))
    same(first, f(X)[0])


@functions
def test_in_loops_and_branches(f):
    r, step = refs.new_ref(X), stepping(f)
    refs.fori_loop(0, 2, lambda i, _: step(r), jnp.float32(0))
    refs.cond(r[0] != 0, lambda: step(r), lambda: r[0])
    refs.while_loop(lambda c: c < 1, lambda c: c + 1 + 0 * step(r), jnp.float32(0))
    same(r[...], f(f(f(f(X)))), rtol=1e-5)


@functions
def test_in_place(f):
    same(jax.jit(refs.in_place(f))(X), f(X))


@functions
def test_in_lanes(f):
    rows = refs.new_ref(jnp.stack([X, X + 1]))
    refs.vmap(stepping(f))(rows)
    same(rows[...], [f(X), f(X + 1)], rtol=1e-5)

    @refs.jit
    @refs.vmap
    def some(row, flag):
        lax.cond(flag, lambda: stepping(f)(row), lambda: row[0])

    before = rows[...]
    some(rows, jnp.array([False, True]))
    same(rows[...], [before[0], f(before[1])], rtol=1e-5)


@smooth
def test_differentiated(f, jit):
    def loss(x, r):
        r[...] = f(r[...] * x)
        return jnp.sum(r[...] ** 2)

    wanted = jax.grad(lambda x: jnp.sum(f(X * x) ** 2))(X)
    same(jit(refs.grad(loss))(X, refs.new_ref(X)), wanted, rtol=1e-5)


def test_pushed_forward():
    def square(x, r):
        r[...] = kernel_of_one_block(r[...] * x)
        return r[...]

    got = refs.jvp(lambda x: square(x, refs.new_ref(X)), (X,), (X,))
    wanted = jax.jvp(lambda x: kernel_of_one_block(X * x), (X,), (X,))
    same(got[0], wanted[0])
    same(got[1], wanted[1])


def solved_in_a_ref(new_ref, x):
    def solve(_, b):
        half = new_ref(jnp.zeros_like(b))
        half[...] += b / 2
        return half[...]

    return lax.custom_linear_solve(lambda v: 2 * v, x, solve, transpose_solve=solve)


def reduced_in_a_ref(new_ref, x):
    def add(a, b):
        sum_ = new_ref(a)
        sum_[...] += b
        return sum_[...]

    return lax.reduce(x, np.float32(0), add, (0,))


@pytest.mark.parametrize("new_ref", [refs.new_ref, jax.new_ref], ids=["ours", "jax's"])
@pytest.mark.parametrize("f, wanted", [(solved_in_a_ref, X / 2), (reduced_in_a_ref, X.sum())])
def test_a_function_of_arrays_that_makes_refs(f, wanted, new_ref):
    """JAX can't compile these: `jax.jit` says so."""
    run = functools.partial(f, new_ref)
    same(refs.jit(run)(X), wanted)
    same(refs.jit(jax.jit(run))(X), wanted)
    same(jax.jit(refs.in_place(run))(X), wanted)
    same(refs.jit(refs.grad(lambda x: run(x).sum()))(X), 0 * X + np.sum(wanted) / X.sum())
    same(refs.jit(refs.vmap(run))(jnp.stack([X, 2 * X])), [wanted, 2 * wanted])

    @refs.jit
    def beside_another_ref(r, steps):
        def step(_, x):
            r[...] += run(x)
            return x

        return lax.cond(steps > 0, lambda: lax.fori_loop(0, steps, step, X), lambda: X)

    r = refs.new_ref(jnp.zeros_like(wanted))
    beside_another_ref(r, 3)
    same(r[...], 3 * wanted)


FIRST_KERNEL = """
import jax, jax.numpy as jnp, refs
from jax.experimental import pallas as pl

def kernel(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2

r = refs.new_ref(jnp.arange(4.0))
shape = jax.ShapeDtypeStruct(r.shape, r.dtype)
call = pl.pallas_call(kernel, out_shape=shape, interpret=True)
for _ in range(2):
    refs.jit(lambda x: r.set(call(r[...] * x)))(2.0)
assert r[...].tolist() == [0, 16, 32, 48]
"""


def test_the_first_kernel_of_a_process():
    """JAX imports more while it is traced, and so has more settings than before."""
    subprocess.run([sys.executable, "-c", FIRST_KERNEL], check=True)


def merged(a, b):
    return a + b + a * b


@pytest.mark.parametrize("derivative", ["grad", "jacfwd", "hessian"])
def test_a_reduction_of_what_a_ref_holds(derivative, jit):
    """With a computation of the user's, which is a jaxpr without refs."""
    r, start = refs.new_ref(jnp.asarray(X)), refs.new_ref(jnp.float32(0))

    def reduced(r):
        r[...] *= 2
        return lax.reduce(r[...], start[...], merged, (0,))

    def pure(x):
        return lax.reduce(2 * x, np.float32(0), merged, (0,))

    found = jit(getattr(refs, derivative)(reduced))(r)
    np.testing.assert_allclose(found, getattr(jax, derivative)(pure)(X), rtol=1e-6)
    np.testing.assert_array_equal(r[...], 2 * X)
