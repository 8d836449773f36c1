"""JAX functions made of "hi" primitives, which are lowered late: they compile as in JAX.

Which functions those are differs between JAX's versions. The operand is read from a ref.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from refs import testing
from tests.switches import switched_on

X = np.array([3.0, 1.0, 4.0, 1.0, 2.0], np.float32)
TABLE = jnp.arange(5.0)


def root(x):
    return lax.custom_root(
        lambda y: y**3 - x,
        x,
        lambda f, y: lax.fori_loop(0, 30, lambda _, y: y - f(y) / (3 * y**2), y),
        lambda g, y: y / g(1.0),
    )


FUNCTIONS = {
    "searchsorted": lambda x: jnp.searchsorted(TABLE, x),
    "searchsorted_sort": lambda x: jnp.searchsorted(jnp.sort(x), x, method="sort", side="right"),
    "nonzero": lambda x: jnp.nonzero(x > 1, size=4, fill_value=-1)[0],
    "where": lambda x: jnp.where(x > 1, size=4)[0],
    "argwhere": lambda x: jnp.argwhere(x > 1, size=4),
    "unique": lambda x: jnp.unique(x, size=5, return_counts=True),
    "digitize": lambda x: jnp.digitize(x, TABLE),
    "histogram": lambda x: jnp.histogram(x, bins=3),
    "interp": lambda x: jnp.interp(x, TABLE, TABLE**2),
    "ldexp": lambda x: jnp.ldexp(x, 2),
    "frexp": jnp.frexp,
    "einsum": lambda x: jnp.einsum("i,j->ij", x, x),
    "expm": lambda x: jax.scipy.linalg.expm(jnp.diag(x)),
    "custom_root": jax.vmap(root),
    "checkpoint_name": lambda x: jax.ad_checkpoint.checkpoint_name(jnp.sin(x), "sine"),
    "checkpoint": jax.checkpoint(lambda x: jnp.cumsum(jnp.sin(x))),
}
SMOOTH = {"interp", "ldexp", "einsum", "expm", "custom_root", "checkpoint_name", "checkpoint"}

functions = pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)
smooth = pytest.mark.parametrize("f", [FUNCTIONS[k] for k in sorted(SMOOTH)], ids=sorted(SMOOTH))


def same(got, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, wanted)


@functions
def test_compiled(f):
    r = refs.new_ref(X - 1)

    @refs.jit
    def update_and_apply():
        r[...] += 1
        return f(r[...])

    same(update_and_apply(), f(X))


@functions
def test_in_place(f):
    same(refs.in_place(f)(X), f(X))
    same(jax.jit(refs.in_place(f))(X), f(X))


@functions
def test_in_a_loop_and_in_a_branch(f):
    r = refs.new_ref(X)
    start = jax.tree.map(jnp.zeros_like, f(X))
    same(refs.fori_loop(0, 2, lambda i, _: f(r[...]), start), f(X))
    same(refs.cond(True, lambda: f(r[...]), lambda: start), f(X))
    same(refs.scan(lambda c, x: (c, f(r[...])), 0, length=2)[1], jax.vmap(f)(np.stack([X, X])))


@functions
def test_in_lanes(f):
    r = refs.new_ref(jnp.stack([X, X + 1]))
    same(refs.vmap(lambda row: f(row[...]))(r), jax.vmap(f)(r[...]))


@functions
def test_checkpointed(f):
    r = refs.new_ref(X)
    same(refs.checkpoint(lambda: f(r[...]))(), f(X))
    same(refs.jit(refs.checkpoint(lambda: f(r[...])))(), f(X))


@smooth
def test_differentiated(f):
    def loss(x, r):
        r[...] *= x
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(r[...])))

    wanted = jax.grad(lambda x: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(X * x))))(X)
    same(refs.grad(loss)(X, refs.new_ref(X)), wanted)
    same(refs.jit(refs.grad(loss))(X, refs.new_ref(X)), wanted)


@pytest.mark.as_released
@functions
def test_the_rest_is_in_place(f):
    big = refs.new_ref(jnp.zeros(1000))

    def step(r):
        y = jax.tree.leaves(f(r[...]))[0]
        big[3] = y.ravel()[0].astype(jnp.float32)

    testing.assert_in_place(step, refs.new_ref(X), smaller_than=0)


def test_lanes_accumulate_in_a_checkpoint_that_is_one():
    total = refs.new_ref(jnp.zeros(2))

    @jax.checkpoint
    def add(x):
        total[...] += x
        return jnp.sin(x)

    with switched_on("jax_remat3"):
        got = refs.vmap(add)(X)
    same(got, jnp.sin(X))
    same(total[...], jnp.full(2, X.sum()))


@pytest.mark.parametrize("switch", ["jax_custom_vjp3", "jax_custom_jvp3"])
@pytest.mark.parametrize("way", ["op by op", "jit", "lanes", "checkpoint"])
def test_derivatives_of_custom_rules_that_touch_refs(switch, way):
    n = refs.new_ref(jnp.int32(0))

    def counted(x):
        n[...] += 1
        return jnp.sin(x)

    if switch == "jax_custom_vjp3":
        f = jax.custom_vjp(counted)
        f.defvjp(lambda x: (f(x), x), lambda x, g: (g * 3,))
    else:
        f = jax.custom_jvp(counted)
        f.defjvp(lambda xs, ts: (f(*xs), ts[0] * 3))
    gradient = {
        "op by op": refs.grad(f),
        "jit": refs.jit(refs.grad(f)),
        "lanes": refs.jit(lambda x: refs.vmap(refs.grad(f))(x[None])[0]),
        "checkpoint": refs.grad(refs.checkpoint(f)),
    }[way]
    with switched_on(switch):
        assert gradient(jnp.float32(1)) == 3
    assert n[...] == 1
