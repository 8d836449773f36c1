"""What the compiled gradient of a reversible function keeps: nothing for each step."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs.testing import assert_in_place
from tests.platforms import as_on_cpu
from tests.reversible.common import loss_of
from tests.reversible.programs import net

pytestmark = [as_on_cpu, pytest.mark.as_released]

ODD = 37  # no other size is this
WIDTH = 16
ROWS = 8
MODES = ["float", refs.Fixed(20)]


def weights(depth):
    w = jax.ShapeDtypeStruct((depth, WIDTH, WIDTH), jnp.float32)
    return (w, w)


STATE = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


def compiled(f, *args):
    return refs.jit(f).lower(*args).compile()


def temporaries(f, *args):
    return compiled(f, *args).memory_analysis().temp_size_in_bytes


def shapes(program, size):
    """The shapes of all arrays in the program one of whose axes is so long."""
    found = {
        tuple(map(int, s.split(","))) for s in re.findall(r"\[(\d+(?:,\d+)*)\]", program.as_text())
    }
    return {shape for shape in found if size in shape}


OF_WEIGHTS = {(ODD, WIDTH, WIDTH)}


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_temporaries_do_not_grow(mode):
    f = refs.grad(loss_of(net, mode=mode))
    few, many = (temporaries(f, weights(n), STATE) for n in (4, 64))
    assert many <= 1.1 * few


def test_those_of_the_plain_gradient_do():
    f = refs.grad(loss_of(net))
    few, many = (temporaries(f, weights(n), STATE) for n in (4, 64))
    assert many > 4 * few
    assert shapes(compiled(f, weights(ODD), STATE), ODD) > OF_WEIGHTS


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("tolerance", [1e-3, None])
def test_no_array_has_a_row_for_each_step(mode, tolerance):
    f = refs.grad(loss_of(net, mode=mode, tolerance=tolerance))
    assert shapes(compiled(f, weights(ODD), STATE), ODD) == OF_WEIGHTS


def test_no_array_has_a_row_for_each_step_of_a_fori_loop():
    def counted(a, b, w):
        def step(i, _):
            a[...] += jnp.sin(b[...]) * w
            b[...] -= jnp.sin(a[...]) / (1 + i)

        refs.fori_loop(0, ODD, step, None)
        return jnp.sum(a[...])

    for mode in MODES:
        f = refs.grad(loss_of(counted, mode=mode))
        assert not shapes(compiled(f, 1.0, STATE), ODD)
    assert shapes(compiled(refs.grad(loss_of(counted)), 1.0, STATE), ODD)


def test_no_array_has_a_row_for_each_step_of_an_inner_loop():
    def nested(a, b, w):
        def step(i, _):
            def inner(j, _):
                a[...] += jnp.sin(b[...]) * w
                b[...] -= jnp.sin(a[...])

            refs.fori_loop(0, ODD, inner, None)

        refs.fori_loop(0, 41, step, None)
        return jnp.sum(a[...])

    program = compiled(refs.grad(loss_of(nested, mode="float")), 1.0, STATE)
    assert not shapes(program, ODD)
    assert not shapes(program, 41)


def test_of_random_masks_only_the_counter_is_kept():
    def dropped(a, b, ws):
        n = refs.new_ref(0)

        def layer(_, w):
            n[...] += 1
            kept = jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), n[...]), 0.5, a.shape)
            a[...] += jnp.tanh(b[...] @ w[0]) * kept
            b[...] -= jnp.tanh(a[...] @ w[1])
            return _, None

        refs.scan(layer, None, ws)
        return jnp.sum(a[...])

    f = refs.grad(loss_of(dropped, mode="float"))
    assert shapes(compiled(f, weights(ODD), STATE), ODD) == OF_WEIGHTS


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_anchors_keep_a_row_every_so_many_steps(mode):
    f = refs.grad(loss_of(net, mode=mode, anchors=7))
    program = compiled(f, weights(ODD), STATE)
    assert shapes(program, ODD) == OF_WEIGHTS
    rows = -(-ODD // 7) + 1  # and one that most steps write to
    kept = {s for s in shapes(program, rows) if s[0] == rows}
    assert kept >= {(rows, ROWS, WIDTH)}
    assert all(s[1:] in {(ROWS, WIDTH), (1, ROWS, WIDTH)} for s in kept)


def test_the_temporaries_of_anchors_are_those_rows():
    few, many = (
        temporaries(refs.grad(loss_of(net, mode="float", anchors=n)), weights(ODD), STATE)
        for n in (ODD, 4)
    )
    row = ROWS * WIDTH * 4
    assert many - few <= 1.2 * 2 * row * (-(-ODD // 4) - 1) + 1024


def test_a_while_loop_keeps_nothing():
    def stepped(a, b, n):
        def step(k):
            a[...] += jnp.sin(b[...])
            b[...] -= jnp.cos(a[...])
            return k + 1

        refs.while_loop(lambda k: k < n, step, 0)
        return jnp.sum(a[...] * b[...])

    def loss(x, n):
        return refs.reversible(stepped)(refs.new_ref(x), refs.new_ref(2 * x), n)

    program = compiled(refs.grad(loss), STATE, jax.ShapeDtypeStruct((), jnp.int32))
    # The number of steps is an argument: all sizes are those of the state.
    sizes = {
        int(n)
        for shape in re.findall(r"\w+\[([\d,]+)\]", program.as_text())
        for n in shape.split(",")
    }
    assert sizes <= {1, 2, 3, 4, 5, 6, ROWS, WIDTH, ROWS * WIDTH}
    assert program.memory_analysis().temp_size_in_bytes < 16 * ROWS * WIDTH * 4


def test_a_hessian_vector_product_keeps_nothing():
    gradient = refs.grad(loss_of(net, mode="float"))

    def product(ws, along, x):
        return refs.jvp(lambda ws: gradient(ws, x), (ws,), (along,))[1]

    few, many = (temporaries(product, weights(n), weights(n), STATE) for n in (4, 64))
    assert many <= 1.1 * few
    assert shapes(compiled(product, weights(ODD), weights(ODD), STATE), ODD) == OF_WEIGHTS


@pytest.mark.xfail(
    strict=True, reason="a known limit: the cotangent of shared weights is made per lane"
)
def test_lanes_keep_nothing():
    loss = loss_of(net, mode="float")
    lanes = jax.ShapeDtypeStruct((3, ROWS, WIDTH), jnp.float32)

    def total(ws, xs):
        return jnp.sum(refs.vmap(loss, in_axes=(None, 0))(ws, xs))

    assert shapes(compiled(refs.grad(total), weights(ODD), lanes), ODD) == OF_WEIGHTS


def test_momentum_of_integers_keeps_some_bits():
    """0.9 loses log2(10 / 9) bits a step, which are put away 16 at a time."""

    def descent(x, v, n):
        def step(_, __):
            v[...] *= 0.9
            v[...] -= 0.1 * jnp.sin(x[...])
            x[...] += 0.1 * v[...]

        refs.fori_loop(0, n, step, None)
        return jnp.sum(x[...])

    def of(n, **options):
        def loss(x):
            return refs.reversible(lambda x, v: descent(x, v, n), **options)(
                refs.new_ref(x), refs.new_ref(x)
            )

        return temporaries(refs.grad(loss), STATE)

    size = ROWS * WIDTH
    grows = of(4096, mode=refs.Fixed(20)) - of(1024, mode=refs.Fixed(20))
    assert 0 < grows < 3072 * size * 4 / 32  # in float32, a step would be 4 bytes an element


def test_the_plain_program_updates_in_place():
    a, b = (refs.new_ref(np.ones((64, WIDTH), np.float32)) for _ in range(2))
    ws = tuple(np.ones((5, WIDTH, WIDTH), np.float32) for _ in range(2))
    wrapped = refs.reversible(net)
    assert_in_place(lambda: wrapped(a, b, ws))
    assert_in_place(lambda: net(a, b, ws))


def test_the_plain_program_is_the_plain_one():
    """Where nothing is differentiated, all is as without."""
    a, b = (refs.new_ref(np.ones((64, WIDTH), np.float32)) for _ in range(2))
    ws = tuple(np.ones((5, WIDTH, WIDTH), np.float32) for _ in range(2))
    plain = compiled(lambda: net(a, b, ws))
    wrapped = compiled(lambda: refs.reversible(net)(a, b, ws))
    of = lambda c: c.memory_analysis()  # noqa: E731
    assert of(wrapped).temp_size_in_bytes == of(plain).temp_size_in_bytes
    assert of(wrapped).alias_size_in_bytes == of(plain).alias_size_in_bytes
    names = [re.sub(r"metadata=\{[^}]*\}|[.\d]+", "", c.as_text()) for c in (plain, wrapped)]
    assert names[0].count(" copy(") == names[1].count(" copy(")


def test_a_training_step_updates_in_place():
    weights = refs.new_ref(np.ones((ODD, WIDTH, WIDTH), np.float32))

    def layer(a, b, ws):
        def one(_, w):
            a[...] += jnp.tanh(b[...] @ w)
            b[...] -= jnp.tanh(a[...] @ w)
            return _, None

        refs.scan(one, None, ws)
        return jnp.sum(a[...] * b[...])

    def step(x):
        g = refs.grad(loss_of(layer, mode="float"))(weights[...], x)
        weights[...] -= 0.1 * g

    program = compiled(step, STATE)
    size = ODD * WIDTH * WIDTH * 4
    assert program.memory_analysis().alias_size_in_bytes >= size
    assert program.memory_analysis().temp_size_in_bytes < 1.5 * size  # the gradient alone
