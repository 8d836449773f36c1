"""Arrays whose elements were moved: permuted, rolled, cut and joined."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs.errors import NotReversibleError
from tests.reversible.common import MODES, agree, gradients
from tests.reversible.programs import end, scan

pytestmark = pytest.mark.usefixtures("x64")

ORDER = np.array([2, 0, 3, 1, 5, 4])
MOVES = {
    "roll": lambda r: jnp.roll(r[...], 2),
    "roll, two axes": lambda r: jnp.roll(r[...].reshape(2, 3), (1, 1), (0, 1)).reshape(6),
    "indexed by numpy": lambda r: r[...][ORDER],
    "indexed by jax": lambda r: r[...][jnp.array(ORDER)],
    "indexed from the end": lambda r: r[...][ORDER - 6],
    "drawn": lambda r: r[...][jax.random.permutation(jax.random.key(3), 6)],
    "take": lambda r: jnp.take(r[...], ORDER),
    "reads, joined": lambda r: jnp.concatenate([r[2:], r[:2]]),
    "parts that overlap": lambda r: (r[1:5], jnp.concatenate([r[2:], r[:2]]))[1],
    "elements, stacked": lambda r: jnp.stack([r[1], r[0], r[3], r[2], r[5], r[4]]),
    "unstacked": lambda r: jnp.stack([*r[...]][::-1]),
    "split": lambda r: jnp.concatenate(jnp.split(r[...], [1, 3])[::-1]),
    "every second one": lambda r: jnp.stack([r[...][1::2], r[...][::2]], 1).reshape(6),
    "axes, added and removed": lambda r: jnp.squeeze(jnp.expand_dims(r[...], 1), 1)[::-1],
    "a part that changes": lambda r: coupled(*jnp.split(r[...], 2)),
    "negated": lambda r: -jnp.flip(r[...]),
}


def coupled(x, y):
    return jnp.concatenate([y, x + jnp.sin(y)])


def moving(move):
    def program(a, b, ws):
        def layer(w):
            b[...] += jnp.sin(w * a[...])
            a[...] = move(a)
            a[...] += 0.3 * jnp.sin(b[...])

        scan(layer, ws)
        return end(a, b)

    return program


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_moved_elements_are_found_again(move, mode):
    program = moving(move)
    found = gradients(refs.reversible(program, mode=mode, tolerance=1e-12))
    agree(found, gradients(program), 1e-10 if mode == "float" else 1e-8)


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_integers_are_found_again(move):
    n = refs.new_ref(jnp.arange(6))
    b = refs.new_ref(jnp.zeros(6))

    def f(k):
        def step(_, __):
            b[...] += jnp.sin(k * n[...])
            n[...] = move(n).astype(int) if move is not MOVES["a part that changes"] else n[::-1]
            return _, None

        refs.scan(step, None, None, length=3)
        return jnp.sum(b[...] * n[...])

    before = n[...], b[...]
    want = refs.grad(f)(1.3)
    n[...], b[...] = before
    agree(refs.grad(refs.reversible(f))(1.3), want)


def test_a_permutation_in_a_branch_and_in_a_while_loop():
    def program(a, b, ws):
        def step(k):
            b[...] += jnp.sin(k * a[...])
            refs.cond(
                k % 2 == 0,
                lambda: refs.set(a, ..., a[...][ORDER]),
                lambda: refs.set(a, ..., jnp.roll(a[...], 1)),
            )
            a[...] += jnp.sin(b[...] * ws[0])
            return k + 1

        refs.while_loop(lambda k: k < 4, step, 0)
        return end(a, b)

    def plain(a, b, ws):
        for k in range(4):
            b[...] += jnp.sin(k * a[...])
            a[...] = jnp.roll(a[...], 1) if k % 2 else a[...][ORDER]
            a[...] += jnp.sin(b[...] * ws[0])
        return end(a, b)

    agree(gradients(refs.reversible(program)), gradients(plain))


@pytest.mark.parametrize(
    "lossy",
    [
        lambda r: r[...][np.array([0, 0, 2, 3, 4, 5])],
        lambda r: jnp.take(r[...], np.array([0, 9, 2, 3, 4, 5]), mode="clip"),
        lambda r: jnp.take(r[...], np.array([0, 9, 2, 3, 4, 5]), fill_value=0.5),
        lambda r: jnp.concatenate([r[1:], jnp.ones(1)]),
        lambda r: jnp.concatenate([r[1:], r[1:2]]),
    ],
    ids=["an element twice", "clipped", "filled", "shifted", "one is missing"],
)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_lost_elements_are_noticed(lossy, mode):
    with pytest.raises(NotReversibleError, match="can't be undone: the old value is lost"):
        gradients(refs.reversible(moving(lossy), mode=mode))


def test_an_order_that_is_computed_is_not_known():
    def program(a, b, ws):
        return moving(lambda r: r[...][jnp.argsort(ws[0])])(a, b, ws)

    with pytest.raises(NotReversibleError, match=r"`gather` at .* can't be undone"):
        gradients(refs.reversible(program))


def test_bits_of_moved_integers_are_the_same():
    """In `Fixed` what moves is no rounding: 1,000 rolls give the initial state to the bit."""
    x = jax.random.normal(jax.random.key(0), (64,))

    def f(k):
        a, b = refs.new_ref(x), refs.new_ref(-x)

        def step(_, __):
            a[...] = jnp.roll(a[...], 3) + k * jnp.sin(b[...])
            b[...] = b[...].reshape(8, 8).T.reshape(64)[np.arange(63, -1, -1)]
            b[...] += jnp.sin(a[...])
            return _, None

        refs.scan(step, None, None, length=1000)
        return jnp.sum(a[...] * b[...])

    exact = refs.reversible(f, mode=refs.Fixed(40), tolerance=0.0)
    assert np.isfinite(refs.jit(refs.grad(exact))(0.01))
