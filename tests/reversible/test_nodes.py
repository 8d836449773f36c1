"""Each kind of write, read and operation on arrays that is undone, or that nothing asks of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import refs
from refs.errors import NotReversibleError
from tests.platforms import as_on_cpu
from tests.reversible.common import FIXED, X, Y, agree, gradients
from tests.reversible.programs import end, scan

pytestmark = pytest.mark.usefixtures("x64")


def minus_what_was(a, b, ws):
    def layer(w):
        a[...] = w - a[...]
        b[...] += jnp.sin(a[...])
        b[...] = -(b[...] * -1.0) / -1.0

    scan(layer, ws)
    return end(a, b)


def of_moves(a, b, ws):
    def layer(w):
        a[...] = jnp.flip(a[...].reshape(2, 3).T, 0).reshape(6) - w
        b[...] = jnp.squeeze(b[...].reshape(6, 1), 1) + jnp.sin(a[...])

    scan(layer, ws)
    return end(a, b)


def of_constants(a, b, ws):
    a[...] = np.full(6, 0.5)
    b[...] = ws[1]
    scan(lambda w: b.at[...].add(jnp.sin(a[...]) * w), ws)
    return end(a, b)


def of_empty_refs(a, b, ws):
    c = jax.empty_ref(jax.ShapeDtypeStruct((6,), np.float64))
    c[...] = ws[0]
    d = refs.empty_ref(jax.ShapeDtypeStruct((6,), np.float64))
    d[...] = jnp.sin(ws[1])
    scan(lambda w: (a.at[...].add(jnp.sin(c[...]) * w), b.at[...].add(a[...]))[0], ws)
    out = end(a, b) + d[0]
    refs.free_ref(c)
    return out


def of_named_values(a, b, ws):
    def layer(w):
        a[...] += checkpoint_name(jnp.sin(b[...]), "sine") * w
        b[...] += lax.stop_gradient(a[...]) * w

    scan(layer, ws)
    return end(a, b)


def of_switches(a, b, ws):
    def layer(k, w):
        def nothing():
            pass

        def add():
            a[...] += jnp.sin(b[...]) * w

        def loop():
            refs.fori_loop(0, 2, lambda _, __: b.at[...].add(-jnp.cos(a[...])), None)

        refs.switch(k % 3, [nothing, add, loop])
        return k + 1, None

    refs.scan(layer, 0, ws)
    return end(a, b)


def backwards_and_unrolled(a, b, ws):
    def layer(_, w):
        a[...] += jnp.sin(b[...]) * w
        b[...] -= jnp.cos(a[...])
        return _, a[0]

    _, ys = refs.scan(layer, None, ws, reverse=True, unroll=2)
    return end(a, b) + jnp.sum(ys**2)


def at_bits(a, b, ws):
    n, flag = refs.new_ref(np.arange(6)), refs.new_ref(np.array([True, False]))

    def layer(w):
        n[...] ^= 5
        n[...] = ~n[...]
        flag[...] = ~flag[...]
        n[...] += flag[0]
        a[...] += jnp.sin(b[...]) * w * jnp.cos(n[...] * 0.1)
        b[...] += jnp.where(flag[0], a[...], jnp.sin(a[...]))

    scan(layer, ws)
    return end(a, b)


def at_other_places(a, b, ws):
    many = refs.new_ref(jnp.stack([a[...], b[...]]))

    def layer(k, w):
        many[0, 1:4] += jnp.sin(b[:3]) * w[:3]
        many.at[1].at[2:].add(a[2:])
        many[..., -1] -= w[:2]
        a[lax.rem(k, 6)] += 0.5
        a.at[jnp.array([7, -1, 2])].add(w[:3])
        b[...] += jnp.sum(many[...], 0) * 0.1
        return k + 1, None

    refs.scan(layer, 0, ws)
    return end(a, b) + jnp.sum(many[...] ** 2)


def whole_by_indices(a, b, ws):
    m = refs.new_ref(jnp.outer(a[...], b[...]))
    rows, columns = np.array([[2], [0], [1], [5], [3], [4]]), np.array([[1, 0, 2, 3, 5, 4]])

    def layer(w):
        m[...] = m[rows, columns]
        m[...] += w
        a[...] += jnp.sin(m[0])

    scan(layer, ws)
    return end(a, b)


def of_results_that_are_not_used(a, b, ws):
    def layer(w):
        y, _ = lax.top_k(b[...], 6)
        a[...] += jnp.sin(y) * w
        b[...] += jnp.cumsum(jnp.round(a[...]) + a[...] * w)

    scan(layer, ws)
    return end(a, b)


def of_scalars(a, b, ws):
    s = refs.new_ref(a[0])

    def layer(w):
        s[...] += jnp.sum(w * b[...])
        a[...] += jnp.sin(s[...])
        a[1:3] -= s[...]
        b[...] = b[...] - s[...]

    scan(layer, ws)
    return end(a, b) + s[...]


def of_exchanges_of_parts(a, b, ws):
    def layer(w):
        old = a.swap(b[...])
        b[...] = old
        x = a[:3]
        a[:3] = a[3:]
        a[3:] = x + jnp.sin(w[:3])
        b[...] += jnp.sin(a[...]) * w

    scan(layer, ws)
    return end(a, b)


def of_what_it_reads_only(a, b, ws):
    def layer(w):
        b[...] += jnp.sin(a[...]) * w
        b[...] += a[0]

    scan(layer, ws)
    return jnp.sum(b[...] ** 2)


def of_nothing(a, b, ws):
    refs.fori_loop(0, 0, lambda _, __: a.at[...].add(jnp.sin(b[...])), None)
    return end(a, b)


def overwritten(a, b, ws):
    """What is written here has no cotangent: it is overwritten before anything reads it."""
    c = refs.new_ref(b[...] * 2)
    c[...] += jnp.sin(b[...])
    c[...] = -c[...][::-1]
    c[...] = jnp.sin(b[...]) - 0.5 * c[...]
    c[...] = 1.0 - c[...]
    c[...] *= jnp.full(6, 0.5)
    c[...] = jnp.cos(b[...] * ws[0])
    a[...] += c[...]
    return end(a, b)


EXACT = [
    overwritten,
    minus_what_was, of_moves, of_constants, of_empty_refs, of_named_values, of_switches,
    backwards_and_unrolled, at_bits, at_other_places, whole_by_indices,
    of_results_that_are_not_used, of_scalars, of_exchanges_of_parts, of_what_it_reads_only,
    of_nothing,
]  # fmt: skip


def of_divisions(a, b, ws):
    def layer(w):
        a[...] = (2 + w) / a[...]
        b[...] = (b[...] * (2 + w)) / (1.5 + w) - jnp.sin(a[...])
        a[...] = jnp.sin(b[...]) - a[...]

    scan(layer, ws)
    return end(a, b)


def of_wider_types(a, b, ws):
    x = refs.new_ref(jnp.arange(6, dtype=np.int32))
    z = refs.new_ref(a[...] + 1j * b[...])

    def layer(w):
        x[...] = 3 - x[...]
        z[...] = -z[...] + w
        a[...] += jnp.sin(b[...]) * x[...] + z[...].real
        b[...] = b[...].astype(np.float64)[:, None].reshape(6) + w

    scan(layer, ws)
    return end(a, b) + jnp.sum(jnp.abs(z[...]) ** 2)


def of_concatenations(a, b, ws):
    def layer(w):
        x, y, z = jnp.split(a[...], [1, 3])
        a[...] = jnp.concatenate([z, x * 2, y - w[:2]])
        b[...] = jnp.expand_dims(b[...], 0)[0] + jnp.sin(a[...])

    scan(layer, ws)
    return end(a, b)


def by_different_factors(a, b, ws):
    def layer(w):
        a[...] *= np.array([1.0, 2, 3, 4, 5, 6])
        a[...] += jnp.sin(b[...]) * w

    scan(layer, ws[:2])
    return end(a, b) + jnp.sum(a[...] ** 2)


ROUNDED = [of_divisions, of_wider_types, of_concatenations, by_different_factors]


@pytest.mark.parametrize("program", EXACT + ROUNDED)
def test_gradient(program):
    agree(gradients(refs.reversible(program)), gradients(program))


@pytest.mark.parametrize("program", EXACT)
def test_exact_gradient(program):
    agree(gradients(refs.reversible(program, mode=FIXED)), gradients(program), 1e-7)


def test_branches_that_lose_what_was():
    def program(a, b, ws):
        def layer(k, w):
            refs.cond(k == 1, lambda: a.set(jnp.tanh(a[...])), lambda: None)
            b[...] += jnp.sin(a[...]) * w
            return k + 1, None

        refs.scan(layer, 0, ws)
        return end(a, b)

    with pytest.raises(NotReversibleError, match="`tanh` at"):
        gradients(refs.reversible(program))


def test_refs_that_are_made_inside_of_loops_and_calls():
    def program(a, b, ws):
        @jax.jit
        def helper(x, w):
            c = refs.new_ref(x)
            c[...] += w
            return refs.freeze(c)

        def layer(w):
            a[...] += helper(jnp.sin(b[...]), w)
            b[...] += refs.checkpoint(helper)(a[...], w)

        scan(layer, ws)
        return end(a, b)

    for mode in ("float", FIXED):
        agree(gradients(refs.reversible(program, mode=mode)), gradients(program), 1e-8)


def test_a_ref_as_a_constant_of_inner_functions():
    """Closed over by a function that is traced apart, and scanned while it is read."""

    def program(a, b, ws):
        rows = refs.new_ref(ws)

        def layer(r):
            r[...] += jnp.sin(b[...])
            b[...] += r[...] * 0.1

        def total(r):
            b[...] += jnp.sin(r[...])

        scan(layer, rows)
        scan(total, rows)
        return end(a, b) + jnp.sum(rows[...])

    agree(gradients(refs.reversible(program)), gradients(program))


def test_scalars_are_overwritten_in_an_exact_mode():
    def program(a, b, ws):
        s = refs.new_ref(a[0])
        s[...] = 0.5
        a[...] += jnp.sin(b[...]) * s[...]
        s[...] += a[0]
        return end(a, b) + s[...] ** 2

    agree(gradients(refs.reversible(program, mode=FIXED)), gradients(program), 1e-8)


def test_refs_that_loops_hold_as_constants():
    r, s = refs.new_ref(X), refs.new_ref(Y)

    def program(k):
        @jax.jit
        def add(k):
            r[...] += jnp.sin(k * s[...])

        refs.fori_loop(0, 3, lambda _, __: add(k), None)
        return r[0]

    want = refs.grad(program)(1.5)
    agree(refs.grad(refs.reversible(program))(1.5), want)


def test_empty_and_named_refs():
    def program(a, b, ws):
        empty = refs.empty_ref(jax.ShapeDtypeStruct((6,), b.dtype))
        named = checkpoint_name(empty, "empty")
        named[...] += jnp.sin(b[...])
        a[...] += empty[...]
        return end(a, b)

    agree(gradients(refs.reversible(program)), gradients(program))


def test_exact_products_with_arrays_of_a_constant():
    def program(a, b, ws):
        def step(_):
            a[...] *= jnp.full(6, 0.75)
            a[...] = 0.5 - a[...] + jnp.sin(b[...])
            b[...] += jnp.sin(a[...])

        scan(step, ws)
        return end(a, b)

    agree(gradients(refs.reversible(program, mode=FIXED)), gradients(program), 1e-7)


@pytest.mark.parametrize(
    "lossy", [jnp.tanh, lambda x: jnp.where(x > 0, x, -x)], ids=["tanh", "select_n"]
)
def test_the_write_that_is_blamed(lossy, request):
    """Not the sum before it, which can't be undone because of it."""

    def program(a, b, ws):
        def layer(w):
            a[...] += jnp.sin(w * b[...])
            b[...] += jnp.sin(w * a[...])
            a[...] = lossy(a[...])

        scan(layer, ws)
        return end(a, b)

    name = request.node.callspec.id
    with pytest.raises(NotReversibleError, match=rf"the old value is lost: `{name}` at test_nodes"):
        gradients(refs.reversible(program))


@as_on_cpu  # elsewhere it isn't defined which of the two is written
def test_an_element_that_is_named_twice():
    def program(a, b, ws):
        a[np.array([0, 0, 1])] += jnp.sin(b[:3])
        return end(a, b)

    agree(gradients(refs.reversible(program)), gradients(program))
