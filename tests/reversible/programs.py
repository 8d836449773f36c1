"""Programs that can be undone: each takes two refs of shape [6] and weights of shape [n, 6]."""

import jax
import jax.numpy as jnp
import numpy as np

import refs

PERMUTATION = np.array([3, 1, 0, 2, 5, 4])
shift = refs.inverse(jnp.roll, lambda y, n: jnp.roll(y, -n))
stretch = refs.inverse(lambda x, s: x * jnp.exp(s), lambda y, s: y * jnp.exp(-s))


def end(a, b):
    return jnp.sum(a[...] * jnp.sin(b[...]))


def scan(layer, ws):
    refs.scan(lambda _, w: (None, layer(w)), None, ws)


def sums(a, b, ws):
    def layer(w):
        a[...] += jnp.tanh(b[...]) * w
        b[...] -= jnp.sin(a[...]) * w

    scan(layer, ws)
    return jnp.sum(a[...] * b[...])


def unrolled(a, b, ws):
    for w in ws:
        a[...] += jnp.tanh(b[...]) * w
        b[...] -= jnp.sin(a[...]) * w
    return a[0] * b[1]


def counted(a, b, ws):
    def step(i, _):
        a[...] += jnp.sin(b[...]) * ws[i]
        b[...] -= jnp.cos(a[...]) * ws[i].sum()

    refs.fori_loop(0, len(ws), step, None)
    return a[0] * b[1]


def indexed(a, b, ws):
    def step(i, _):
        a[i % 6] += jnp.sin(b[i % 6]) * ws[i % len(ws), 0]
        b[(i + 1) % 6] -= jnp.cos(a[i % 6])

    refs.fori_loop(0, 9, step, None)
    return a[0] * b[1]


def out_of_bounds(a, b, ws):
    def step(i, _):
        a[i] += jnp.sin(b[1]) * ws[0, 0]
        b[i + 3] -= jnp.cos(a[2])

    refs.fori_loop(0, 9, step, None)
    return a[0] * b[1]


def written_through(a, b, ws):
    """Written through constant numbers, in any order."""

    def layer(w):
        a[...] += jnp.sin(b[...]) * w
        a[PERMUTATION] = a[...]
        b[[4, -1]] = b[np.array([4, -1])] + 1.0 + jnp.sin(a[:2])
        b[...] -= jnp.cos(a[...])

    scan(layer, ws)
    return jnp.sum(a[...] * b[...])


def exchange_in_rows(a, b, ws):
    """Parts of one row, each of which is read before the other is written."""
    rows = refs.new_ref(jnp.stack([a[...], b[...]]))

    def layer(w):
        def row(_, r):
            r[...] += jnp.sin(a[...]) * w
            r[:2], r[2:4] = r[2:4], r[:2]
            r[4:] -= jnp.cos(r[:2])
            return _, None

        refs.scan(row, None, rows)
        a[...] += rows[0] * rows[1]

    scan(layer, ws)
    return jnp.sum(rows[...] * jnp.sin(a[...]))


def branching(a, b, ws):
    def layer(k, w):
        def even():
            a[...] += jnp.sin(b[...]) * w

        def odd():
            b[...] -= jnp.cos(a[...]) * w

        refs.cond(k % 2 == 0, even, odd)
        return k + 1, None

    refs.scan(layer, 0, ws)
    return a[0] * b[1]


def nested(a, b, ws):
    def layer(w):
        def inner(x):
            a[...] += jnp.sin(b[...]) * x
            b[...] += jnp.sin(a[...]) * x

        scan(inner, w)
        b[...] += a[...] ** 2 * 0.1

    scan(layer, ws)
    return a[0] * b[1]


def carried(a, b, ws):
    def layer(c, w):
        a[...] += jnp.sin(b[...]) * w * c
        b[...] += jnp.sin(a[...]) * w
        return c + 0.5 * w.sum(), a[...].sum()

    c, ys = refs.scan(layer, 1.0, ws)
    return a[0] * b[1] + c * ys.sum()


def rows(a, b, ws):
    many = refs.new_ref(jnp.stack([a[...], b[...], a[...] * b[...]]))

    def layer(r):
        r[...] += jnp.sin(b[...].sum()) * ws[0, 0]
        b[...] -= jnp.cos(r[...]) * 0.3

    scan(layer, many)
    return jnp.sum(many[...] * b[...])


def exchange(a, b, ws):
    def layer(w):
        old = a[...]
        a[...] = b[...]
        b[...] = -old + jnp.sin(a[...]) * w

    scan(layer, ws)
    return b[1] * a[0]


def parts(a, b, ws):
    def layer(w):
        a[:3] += jnp.sin(a[3:]) * w[:3]
        a[3:] -= jnp.cos(a[:3]) * w[3:]
        a[::2] += a[1::2] ** 2 * 0.1
        a[0] -= b[2] * a[1]
        a[...] = a[::-1]
        b[...] += a[...]

    scan(layer, ws)
    return b[1] * a[0]


def permuted(a, b, ws):
    def layer(w):
        a[...] = a[PERMUTATION]
        b[...] += jnp.sin(a[...]) * w
        a[...] += jnp.sin(b[...])
        b[...] = b[[1, 0, 2, 3, 4, 5]]

    scan(layer, ws)
    return a[0] * b[1]


def scattered(a, b, ws):
    def layer(w):
        a.at[jnp.array([0, 0, 2])].add(jnp.sin(b[:3]) * w[:3])
        b[...] += jnp.sin(a[...])
        refs.addupdate(b, slice(0, 2), a[2:4])

    scan(layer, ws)
    return a[0] * b[1]


def of_calls(a, b, ws):
    """Values of functions with derivative rules, of calls, and of checkpointed functions."""

    @refs.checkpoint
    def layer(w):
        a[...] += jax.nn.gelu(b[...]) + jax.nn.relu(b[...]) * w
        b[...] += jax.jit(jnp.sin)(a[...]) + jax.checkpoint(jnp.cos)(a[...])
        a[...] += refs.vmap(jnp.sin)(b[...])

    scan(layer, ws)
    return a[0] * b[1]


def with_own_refs(a, b, ws):
    c = refs.new_ref(a[...] * b[...])

    def layer(w):
        d = refs.new_ref(jnp.zeros(6))
        d[...] += jnp.sin(b[...] + c[...])
        d[...] *= w
        a[...] += d[...] + refs.freeze(refs.new_ref(w))
        b[...] += jnp.sin(a[...])
        c[...] -= b[...] * w

    scan(layer, ws)
    return a[0] * b[1] + c[2]


def twice(a, b, ws):
    @refs.reversible
    def inner(ws):
        sums(a, b, ws)

    inner(ws)
    inner(2 * ws)
    return a[0] * b[1]


# These can be undone in every mode.
def scratch(a, b, ws):
    """A ref is overwritten in each step, twice, by what follows from others."""
    t = refs.new_ref(jnp.zeros(6))

    def layer(w):
        t[...] = jnp.sin(b[...]) * w
        a[...] += t[...]
        t[...] = jnp.sin(a[...])
        b[...] += t[...] * w

    scan(layer, ws)
    return end(a, b) + t[1]


EXACT = [
    sums, unrolled, counted, indexed, out_of_bounds, branching, nested, rows, exchange,
    exchange_in_rows, parts, permuted, written_through, scattered, of_calls,
    with_own_refs, twice, scratch,
]  # fmt: skip


def scaled(a, b, ws):
    def layer(w):
        a[...] *= 1.25
        a[...] += jnp.sin(b[...]) * w
        b[...] = b[...] / 1.5 - jnp.sin(a[...])

    scan(layer, ws)
    return a[0] * b[1]


def by_inverses(a, b, ws):
    def layer(w):
        a[...] = shift(a[...], 1) + b[...] * w
        b[...] = stretch(b[...], jnp.sin(a[...]) * w)
        a[...] = jax.vmap(shift, in_axes=(0, None))(a[...].reshape(2, 3), 1).reshape(6)

    scan(layer, ws)
    return a[0] * b[1]


def by_shapes(a, b, ws):
    def layer(w):
        x, y = jnp.split(a[...], 2)
        a[...] = jnp.concatenate([y + jnp.sin(b[:3]), x - w[:3]])
        b[...] = b[...].reshape(2, 3).T.reshape(6) + jnp.sin(a[...])

    scan(layer, ws)
    return a[0] * b[1]


# These give floats back up to rounding.
ROUNDED = [scaled, by_inverses, by_shapes, carried]


def expanding(a, b, ws):
    """What this shrinks, it expands when it is undone, and so what was rounded away."""

    def layer(w):
        a[...] *= 0.2
        a[...] += jnp.sin(b[...]) * w
        b[...] += jnp.sin(a[...])

    scan(lambda _: scan(layer, ws), jnp.zeros(6))
    return jnp.sum(a[...] + b[...])


def net(a, b, ws):
    """Layers of products with matrices: each row of `ws` is a pair of them."""

    def layer(_, w):
        a[...] += jnp.tanh(b[...] @ w[0])
        b[...] -= jnp.tanh(a[...] @ w[1])
        return _, None

    refs.scan(layer, None, ws)
    return jnp.sum(a[...] * b[...])
