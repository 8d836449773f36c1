"""What is done alike to parts of a buffer is done at once; and many slices are one kernel."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import refs
from refs._inplace import alike
from tests.inplace.helpers import rewritten

pytestmark = pytest.mark.as_released

OPERATIONS = [
    lambda x, s, g: x * 0.5 + 1,
    lambda x, s, g: jnp.where(x > s, x, -x),
    lambda x, s, g: jnp.maximum(x - s * g, 0),
    lambda x, s, g: jnp.clip(x, -1, 1) + g,
    lambda x, s, g: g,
    lambda x, s, g: x,
    lambda x, s, g: lax.sqrt(lax.abs(x)) * (s * 2),
    lambda x, s, g: jnp.full_like(x, 3.0),
    lambda x, s, g: jnp.flip(x) + x,
]


def counted(jaxpr, *names):
    return sum(eqn.primitive.name in names for eqn in jaxpr.eqns)


def program(shapes, chosen):
    """A function of a buffer, a scalar and a vector: the chosen operations on its parts."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    starts = np.cumsum([0, *sizes])

    def run(x, s, g):
        parts = []
        for k, (n, shape) in enumerate(zip(sizes, shapes, strict=True)):
            part = lax.slice(x, (starts[k],), (starts[k] + n,)).reshape(shape)
            value = OPERATIONS[chosen[k]](part, s, jnp.sin(g[k]) * jnp.ones(shape))
            parts.append(value.reshape(-1))
        return lax.concatenate(parts, 0)

    x = jnp.asarray(np.random.default_rng(0).normal(size=starts[-1]), jnp.float32)
    return run, (x, jnp.float32(0.25), jnp.linspace(-1.0, 1.0, len(shapes)))


SHAPES = st.sampled_from([(), (1,), (3,), (2, 2), (4, 1, 2)])


@settings(max_examples=20)
@given(
    st.lists(st.tuples(SHAPES, st.sampled_from(range(len(OPERATIONS)))), min_size=2, max_size=12),
    st.sampled_from([0, 2, alike.MOST_GROUPS]),
)
def test_the_values_are_the_same(parts, most):
    shapes, chosen = zip(*parts, strict=True)
    before, alike.MOST_GROUPS = alike.MOST_GROUPS, most
    try:
        run, args = program(shapes, chosen)
        rewritten(run, *args)
    finally:
        alike.MOST_GROUPS = before


def test_the_whole_buffer_is_one_operation():
    run, args = program([(3,), (2, 2), (), (5,)] * 10, [0] * 40)
    new = rewritten(run, *args)
    assert [e.primitive.name for e in new.eqns if new.invars[0] in e.invars] == ["mul"]
    assert counted(new, "mul") == counted(new, "add") == 1
    assert counted(new, "concatenate") == 0


def test_neighbours_are_one_operation():
    run, args = program([(3,)] * 40, [0] * 20 + [1] * 20)
    new = rewritten(run, *args)
    assert (counted(new, "mul"), counted(new, "neg"), counted(new, "slice")) == (1, 1, 2)
    assert counted(new, "gather") == 0


def test_those_between_others_are_gathered():
    run, args = program([(3,)] * 40, [0, 1] * 20)
    new = rewritten(run, *args)
    assert (counted(new, "mul"), counted(new, "neg"), counted(new, "gather")) == (1, 1, 3)


def test_other_parameters_are_another_operation():
    def run(x):
        parts = [lax.slice(x, (4 * k,), (4 * k + 4,)) for k in range(20)]
        powers = [lax.integer_pow(part, 3 + k % 2) for k, part in enumerate(parts)]
        return lax.concatenate(powers, 0)

    rewritten(run, jnp.arange(80.0))


def test_different_numbers_are_one_array():
    def run(x):
        parts = [lax.slice(x, (4 * k,), (4 * k + 4,)) * (k + 0.5) for k in range(30)]
        return lax.concatenate(parts, 0)

    new = rewritten(run, jnp.ones(120))
    assert (counted(new, "mul"), counted(new, "slice"), counted(new, "concatenate")) == (1, 0, 0)


def test_moments_and_parameters_share_what_they_have_in_common():
    def adam(p, m, g):
        m = 0.9 * m + 0.1 * g
        return p - 0.01 * m, m

    def run(p, m, *gs):
        new = [
            adam(*(lax.slice(x, (4 * k,), (4 * k + 4,)) for x in (p, m)), g * 2.0)
            for k, g in enumerate(gs)
        ]
        return tuple(lax.concatenate(parts, 0) for parts in zip(*new, strict=True))

    gs = [jnp.sin(jnp.full(4, float(k))) for k in range(30)]
    new = rewritten(run, jnp.ones(120), jnp.ones(120), *gs)
    assert counted(new, "slice") == 0
    # The moments are computed for themselves and for the parameters: XLA finds these equal.
    assert counted(new, "mul") <= 7


def test_what_others_use_too_is_computed_by_itself():
    def run(x):
        parts = [lax.exp(lax.slice(x, (4 * k,), (4 * k + 4,))) for k in range(20)]
        return lax.concatenate([p + 1 for p in parts], 0), parts[3]

    new = rewritten(run, jnp.ones(80))
    assert (counted(new, "exp"), counted(new, "add")) == (3, 3)


def test_types_and_sizes_that_stay():
    def run(x):
        parts = [lax.slice(x, (8 * k,), (8 * k + 8,)) for k in range(20)]
        return lax.concatenate([p.sum(keepdims=True) for p in parts], 0)

    jaxpr = jax.make_jaxpr(run)(jnp.ones(160))
    assert counted(rewritten(run, jnp.ones(160)), "reduce_sum") == counted(jaxpr, "reduce_sum")
    keys = jax.random.split(jax.random.key(0), 4)
    rewritten(lambda k: jax.random.key_data(lax.concatenate([k[:2], k[2:]], 0)), keys)


def test_a_number_in_another_shape():
    def run(x):
        one = lax.reshape_p.bind(np.float32(2), new_sizes=(1,), dimensions=None, sharding=None)
        return lax.concatenate([lax.slice(x, (0,), (3,)), one, lax.slice(x, (3,), (6,))], 0)

    rewritten(run, jnp.arange(6.0))


def test_slices_with_steps_and_operations_with_two_results():
    def run(x):
        largest, _ = lax.top_k(x, 2)
        return lax.concatenate([lax.slice(x, (0,), (6,), (2,)) + 1, largest + 1, x[3:] + 1], 0)

    rewritten(run, jnp.arange(6.0))


def test_parts_that_are_shown_to_the_host():
    seen = []

    def run(x):
        part = x[:4] * 2
        jax.debug.callback(seen.append, part)
        return jnp.concatenate([part, x[4:] * 2])

    got = jax.jit(refs.in_place(run))(jnp.arange(8.0))
    jax.effects_barrier()
    np.testing.assert_array_equal(got, jnp.arange(8.0) * 2)
    np.testing.assert_array_equal(seen, [[0, 2, 4, 6]])


def test_numbers_of_different_types():
    def run(x):
        parts = [lax.slice(x, (4 * k,), (4 * k + 4,)) for k in range(4)]
        powers = [np.int32(2), np.float32(0.5), np.int32(3), np.float32(1.5)]
        return lax.concatenate([lax.pow(p, y) for p, y in zip(parts, powers, strict=True)], 0)

    rewritten(run, jnp.arange(16.0) + 1)


def test_long_chains():
    def run(x):
        parts = []
        for k in range(4):
            part = lax.slice(x, (4 * k,), (4 * k + 4,))
            for _ in range(3 * alike.LONGEST):
                part = lax.sin(part)
            parts.append(part)
        return lax.concatenate(parts, 0)

    new = rewritten(run, jnp.ones(16))
    assert counted(new, "sin") < 4 * 3 * alike.LONGEST


def layers(n):
    """A network with as many parameters as there are layers, and its state."""
    packed = refs.pack([jnp.full(4, 1.0 + k) for k in range(n)])

    def run(x):
        for r in packed:
            x = jnp.tanh(x @ jnp.outer(r[...], x))
        return x

    return run


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="fences are conditionals on CPUs only")
def test_many_slices_have_places_that_xla_does_not_know():
    slice_ = re.compile(r" slice\(")
    few, many = (refs.jit(layers(n)).lower(jnp.ones(4)).compile().as_text() for n in (4, 40))
    assert "conditional" not in few
    assert many.count(" conditional(") == 1
    assert len(slice_.findall(many)) < 5
    run = layers(40)
    np.testing.assert_allclose(refs.jit(run)(jnp.ones(4)), run(jnp.ones(4)), rtol=1e-4)
