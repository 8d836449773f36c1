"""A function that is given an array where it is given a ref at other times, beside another ref."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs

X = np.arange(3.0, dtype=np.float32)
KINDS = {
    "array": jnp.asarray,
    "ref": refs.new_ref,
    "packed": lambda x: refs.pack([jnp.asarray(x), jnp.zeros(2)])[0],
    "native": lambda x: jax.new_ref(jnp.asarray(x)),
    "NumPy": np.array,
}


def closure(n):
    @refs.jit
    def f(w):
        n[...] += 1
        return w[...] * 2

    return f


def argument(n):
    @refs.jit
    def f(w, n):
        n[...] += 1
        return w[...] * 2

    return lambda w: f(w, n)


def first_argument(n):
    @refs.jit
    def f(n, w):
        n[...] += 1
        return w[...] * 2

    return lambda w: f(n, w)


def only_read(n):
    f = refs.jit(lambda w: (w[...] * 2, n[...]))

    def step(w):
        n[...] += 1
        return f(w)[0]

    return step


def tree(n):
    @refs.jit
    def f(state):
        state["n"][...] += 1
        return state["layers"][0][...] * 2

    return lambda w: f({"layers": [w, None], "n": n})


def method(n):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Layer:
        w: object
        n: object

        @refs.jit
        def step(self, scale):
            self.n[...] += 1
            return self.w[...] * scale

    return lambda w: Layer(w, n).step(2)


def bound_method(n):
    """Of an instance that is no pytree."""

    class Model:
        @refs.jit
        def step(self, w):
            n[...] += 1
            return w[...] * 2

    return Model().step


def loop(n):
    @refs.jit
    def f(w):
        def body(k, x):
            n[...] += 1 - k
            return x + w[...]

        return jax.lax.fori_loop(0, 2, body, jnp.zeros(3))

    return f


def static(n):
    f = refs.jit(lambda w, scale: (w[...] * scale, n.addupdate(1))[0], static_argnums=1)
    return lambda w: f(w, 2)


def keyword(n):
    f = refs.jit(lambda *, w, scale: (w[...] * scale, n.addupdate(1))[0], static_argnames="scale")
    return lambda w: f(w=w, scale=2)


def donated(n):
    @refs.jit(donate_argnums=0)
    def f(w):
        n[...] += 1
        return w[...] * 2

    return f


def gradient(n):
    def loss(x, w):
        n[...] += 1
        return (x * w[...] * 2).sum()

    f = refs.jit(refs.grad(loss))
    return lambda w: f(jnp.ones(3), w)


def nested(n):
    @refs.jit
    def inner(w):
        n[...] += 1
        return w[...] * 2

    return refs.jit(lambda w: inner(w) + 0)


def with_callback(n):
    @refs.jit
    def f(w):
        n[...] += refs.io_callback(lambda: np.int32(1), jax.ShapeDtypeStruct((), jnp.int32))
        return w[...] * 2

    return f


def own_refs(n):
    @refs.jit
    def f(w):
        n[...] += 1
        own = refs.new_ref(w[...])
        own[...] *= 2
        return own[...]

    return f


FORMS = [
    *(closure, argument, first_argument, only_read, tree, method, bound_method, loop, static),
    *(keyword, donated, gradient, nested, with_callback, own_refs),
]


PAIRS = [
    *(("array", "ref"), ("ref", "array"), ("NumPy", "ref"), ("array", "packed")),
    *(("array", "native"), ("packed", "ref")),
]


@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.parametrize("form", FORMS)
def test_either(form, first, second):
    """Each twice, in turn: a call of one is no call of the other."""
    n = refs.new_ref(0)
    f = form(n)
    for k, kind in enumerate([first, second, first, first, second, second]):
        w = KINDS[kind](X + k)
        np.testing.assert_array_equal(f(w), 2 * (X + k))
        assert int(n) == k + 1
        if form is not donated or kind not in ("array", "NumPy"):
            np.testing.assert_array_equal(np.asarray(w[...]), X + k)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_two_that_change_places(first, second):
    f = refs.jit(lambda a, b: a[...] - b[...])
    for k in range(6):
        pair = KINDS[first](X + k), KINDS[second](X)
        for a, b in (pair, pair[::-1]):
            sign = 1 if a is pair[0] else -1
            np.testing.assert_array_equal(f(a, b), np.full(3, sign * k))
