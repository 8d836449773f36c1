"""What keeps a wrong gradient of a reversible function from being returned.

A wrong entry of the table of inverses is noticed: by the laws, since the gradient is another, and
by the function itself, since what it restores isn't what it kept. And where rounding errors grow,
as the steps that made a state grow are undone, the gradient is right or NaN.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import reshard

import refs
from refs import _jax
from refs._reversible.inverses import INVERSES
from refs._reversible.parts import new_version_p
from tests.laws import ways

# --- Each entry of the table of inverses


def added_by(add):
    return lambda x, y: add(add(x, jnp.sin(y)), jnp.cos(y))  # not one sum: that needs no entry


def broadcast(x, y):
    return lax.squeeze(lax.broadcast_in_dim(x, (1, *x.shape), (1,)), (0,))


def split(x, y):
    return lax.concatenate(lax.split(x, (1, 3))[::-1], 0)


ON_ONE = jax.sharding.SingleDeviceSharding(jax.devices()[0])

# What may be done to the contents of a ref, given those of another: each needs the entry.
MOVES = [
    (lax.add_p, added_by(lax.add)),
    (lax.add_p, lambda x, y: jnp.sin(y) + (jnp.cos(y) + x)),
    (_jax.add_any_p, added_by(_jax.add_any_p.bind)),
    (lax.sub_p, lambda x, y: x - jnp.sin(y) - jnp.cos(y)),
    (lax.sub_p, lambda x, y: jnp.sin(y) - x),
    (lax.mul_p, lambda x, y: x * 1.25),
    (lax.mul_p, lambda x, y: (2 + jnp.sin(y)) * x),
    (lax.div_p, lambda x, y: x / (2 + jnp.sin(y))),
    (lax.div_p, lambda x, y: 1.25 / x),
    (lax.neg_p, lambda x, y: -x),
    (lax.rev_p, lambda x, y: x[::-1]),
    (lax.transpose_p, lambda x, y: x.reshape(2, 2).T.reshape(4)),
    (lax.reshape_p, lambda x, y: x.reshape(2, 2).T.reshape(4)),
    (lax.squeeze_p, broadcast),
    (lax.broadcast_in_dim_p, broadcast),
    (lax.concatenate_p, split),
    (lax.split_p, split),
    (lax.stack_p, lambda x, y: jnp.stack([*x][::-1])),
    (lax.unstack_p, lambda x, y: jnp.stack(lax.unstack(x)[::-1])),
    (lax.copy_p, lambda x, y: lax.copy_p.bind(x)),
    (lax.scatter_add_p, lambda x, y: x.at[jnp.array([0, 2, 2, 9])].add(jnp.sin(y))),
    (lax.scatter_sub_p, lambda x, y: x.at[jnp.array([0, 2, 2, 9])].subtract(jnp.sin(y))),
    (lax.optimization_barrier_p, lambda x, y: lax.optimization_barrier(x)),
    (lax.sharding_constraint_p, lambda x, y: lax.with_sharding_constraint(x, ON_ONE)),
    (_jax.passing_primitives[1], lambda x, y: checkpoint_name(x, "x")),
]
# The same for the contents of a ref of integers.
OF_INTEGERS = [
    (lax.xor_p, lambda n: (n ^ 5) ^ 2),
    (lax.not_p, lambda n: ~n),
    (lax.add_p, lambda n: (n + 3) + 4),
    (lax.sub_p, lambda n: 3 - n),
    (lax.neg_p, lambda n: -n),
    (lax.rev_p, lambda n: n[::-1]),
]


def of_floats(move):
    """A function whose gradient needs what a ref held before a move, and that ref."""
    a = refs.new_ref(jnp.array([0.4, 0.7, -0.6, 1.1]))
    b = refs.new_ref(jnp.array([0.2, -0.9, 0.5, 0.3]))

    def f(k):
        b[...] += jnp.sin(k * a[...])
        a[...] = move(a[...], b[...])
        return jnp.sum(jnp.sin(a[...]) * b[...])

    return f


def of_integers(move):
    n = refs.new_ref(jnp.arange(4))
    b = refs.new_ref(jnp.array([0.2, -0.9, 0.5, 0.3]))

    def f(k):
        b[...] += jnp.sin(k * n[...])
        n[...] = move(n[...])
        return jnp.sum(n[...] * b[...])

    return f


def of_two_types(_):
    """What a ref held is known only from another one's contents, of a wider type."""
    a = refs.new_ref(jnp.array([0.4, 0.7, -0.6, 1.1], jnp.bfloat16))
    wide = refs.new_ref(jnp.zeros(4, jnp.float32))

    def f(k):
        out = jnp.sum(jnp.sin(k * a[...]))
        wide[...] = a[...].astype(jnp.float32)
        a[...] = jnp.ones(4, jnp.bfloat16)
        return out.astype(jnp.float32)

    return f


def of_new_refs(_):
    """What a ref held is known only from a ref that was made of it."""
    a = refs.new_ref(jnp.array([0.4, 0.7, -0.6, 1.1]))

    def f(k):
        out = jnp.sum(jnp.sin(k * a[...]))
        c = refs.new_ref(a[...])
        a[...] = jnp.ones(4)
        return out + c[0]

    return f


def of_meshes(_):
    """A ref over an explicit mesh; its value is placed in another way on the way."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    split, whole = (jax.NamedSharding(mesh, spec) for spec in (jax.P("d"), jax.P()))
    a, b = (
        refs.new_ref(jax.device_put(jnp.array(x), split))
        for x in ([0.4, 0.7, -0.6, 1.1], [0.2, -0.9, 0.5, 0.3])
    )

    def f(k):
        b[...] += jnp.sin(k * a[...])
        a[...] = reshard(reshard(a[...], whole), split)
        return jnp.sum(jnp.sin(a[...]) * b[...])

    return f


def shifted(x, y):
    return refs.inverse(lambda x: x + 0.7, lambda x: x - 0.7)(x)


ENTRIES = [
    *((primitive, of_floats, move) for primitive, move in MOVES),
    *((primitive, of_integers, move) for primitive, move in OF_INTEGERS),
    (lax.convert_element_type_p, of_two_types, None),
    (new_version_p, of_new_refs, None),
    (_jax.cast_primitives[0], of_meshes, None),
    *((p, of_floats, shifted) for p in INVERSES if p.name == "inverse"),
]
NAMES = [f"{primitive}-{make.__name__}-{k}" for k, (primitive, make, _) in enumerate(ENTRIES)]


def test_each_entry_has_a_program():
    assert {primitive for primitive, *_ in ENTRIES} == {*INVERSES}


@pytest.mark.parametrize(("primitive", "make", "move"), ENTRIES, ids=NAMES)
def test_a_wrong_entry_is_noticed(primitive, make, move, monkeypatch):
    right = refs.grad(make(move))(1.3)
    assert 0.1 < abs(right) < np.inf

    def found(**options):
        return refs.grad(refs.reversible(make(move), **options))(1.3)

    np.testing.assert_allclose(found(), right, 1e-2 if make is of_two_types else 1e-5)
    entry = INVERSES[primitive]

    def wrong(given):
        x = entry.find(given)
        return x + jnp.ones_like(x)

    monkeypatch.setitem(INVERSES, primitive, entry._replace(find=wrong))
    unchecked = found(tolerance=None)
    assert not abs(unchecked - right) < 0.02 * abs(right)
    assert np.isnan(found())


# --- States that grow


@ways.fewer(2)
@given(st.integers(0, 2**32 - 1), st.integers(1, 300), st.sampled_from([0.02, 0.1, 0.5, 1.0, 2.0]))
def test_a_gradient_through_an_expanding_map_is_right_or_not_a_number(seed, steps, size):
    random = np.random.RandomState(seed)
    start, c = (
        random.normal(size=(2, 3)).astype(np.float32),
        np.float32(size * random.normal(size=2)),
    )
    got = np.asarray(expansion(jnp.float32, start, c, steps, refs.reversible), np.float64)
    if not np.isfinite(got).all():
        return
    with jax.enable_x64(True):
        right = np.asarray(expansion(jnp.float64, start, c, steps, lambda f: f))
    assert np.abs(got - right).max() <= 1e-2 * np.abs(right).max()


def expansion(dtype, start, c, steps, wrap, by=lambda x: x):
    """The gradient of a function of what a map makes of a state in so many steps."""
    a, b = (refs.new_ref(jnp.asarray(x, dtype)) for x in start)

    def f(c):
        def step(_, __):
            a[...] += c[0] * by(b[...])
            b[...] += c[1] * by(a[...])
            return _, None

        refs.scan(step, None, None, steps)
        return jnp.sum(a[...] + 2 * b[...])

    return refs.grad(wrap(f))(jnp.asarray(c, dtype))


# A known limit, which the page names: what is restored is compared with the largest number of its
# ref, as an element that happens to be small may be far off in its own size.
@pytest.mark.xfail(strict=True, reason="the check is relative to the whole ref")
def test_an_element_that_is_small_among_others_is_right_or_not_a_number():
    start = np.array([[16.0, 1.3e-6], [32.0, 4.8e-6]])
    c = np.array([[0.051, 0.059], [0.0006, 0.108]])
    got, right = (
        expansion(jnp.float32, start, c, 150, wrap, jnp.sin)
        for wrap in (refs.reversible, lambda f: f)
    )
    assert np.isnan(got).all() or np.abs(got - right).max() <= 1e-2 * np.abs(right).max()
