"""A compiled function that calls back is called again the short way, where that is right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs


def add(x, k):
    x += k


def failing(x, k):
    x += k
    if k == 3:
        raise ValueError("three")


@pytest.fixture
def step():
    @refs.jit
    def step(r, k):
        refs.io_callback(add, None, r, k)
        return k + 1

    r = refs.new_ref(jnp.zeros(3))
    for _ in range(3):
        step(r, 1)
    assert r[0] == 3
    return step


def test_another_ref(step):
    r = refs.new_ref(jnp.ones(3))
    assert step(r, 2) == 3
    assert r[1] == 3


def test_another_shape_or_dtype(step):
    for like in (jnp.ones(5), jnp.ones(3, jnp.int32), jnp.ones((2, 2))):
        r = refs.new_ref(like)
        for _ in range(3):
            assert step(r, 2) == 3
        np.testing.assert_array_equal(r[...], np.asarray(like) + 6)


def test_an_array_in_place_of_a_ref_and_the_reverse(step):
    with pytest.raises(AttributeError):  # of the callback: it is traced anew
        refs.jit(lambda r, k: r.no_such)(jnp.ones(3), 1)
    r = refs.new_ref(jnp.float32(2.0))
    with pytest.raises(Exception):  # noqa: B017, PT011
        step(jnp.ones(3), 1)
    s = refs.new_ref(jnp.zeros(3))
    with pytest.raises(Exception):  # noqa: B017, PT011  `k + 1` of a ref
        step(s, r)
    step(s, 1)
    assert s[0] == 1


def test_a_ref_that_has_ended(step):
    r = refs.new_ref(jnp.ones(3))
    step(r, 1)
    refs.freeze(r)
    with pytest.raises(refs.errors.RefStateError):
        step(r, 1)


def test_one_ref_twice_and_then_two():
    def both(x, y):
        x += 1
        y += 10

    @refs.jit
    def step(r, s):
        refs.io_callback(lambda x: add(x, 1), None, r)
        refs.io_callback(lambda x: add(x, 10), None, s)

    r, s = refs.new_ref(jnp.zeros(3)), refs.new_ref(jnp.zeros(3))
    for first, second in ((r, s), (r, s), (r, r), (r, r), (s, r), (r, s), (s, s)):
        step(first, second)
    assert (r[0], s[0]) == (1 + 1 + 11 + 11 + 10 + 1, 10 + 10 + 1 + 10 + 11)


def test_a_ref_that_is_also_closed_over():
    g = refs.new_ref(jnp.zeros(2))

    @refs.jit
    def step(r):
        refs.io_callback(lambda x: add(x, 1), None, r)
        refs.io_callback(lambda x: add(x, 10), None, g)

    r = refs.new_ref(jnp.zeros(2))
    for ref in (r, r, g, r, g):
        step(ref)
    assert (r[0], g[0]) == (3, 52)


def test_jax_refs_between(step):
    r, n = refs.new_ref(jnp.zeros(3)), jax.new_ref(jnp.zeros(3))
    for ref in (r, n, n, r, n):
        step(ref, 1)
    assert (r[0], n[0]) == (2, 3)


def test_failures_and_successes_in_turn():
    @refs.jit
    def step(r, k):
        refs.io_callback(failing, None, r, k)

    r = refs.new_ref(jnp.zeros(3))
    for k in (1, 2, 3, 1, 3, 2):
        if k == 3:
            with pytest.raises(refs.errors.CallbackError, match="three"):
                step(r, k)
        else:
            step(r, k)
    assert r[0] == 6


def test_it_is_called_once_a_step(step):
    calls = []

    @refs.jit
    def count(r, k):
        refs.io_callback(lambda x, k: calls.append(int(k)), None, r, k)

    for n in (3, 3, 4, 4, 3):
        count(refs.new_ref(jnp.zeros(n)), n)
    assert calls == [3, 3, 4, 4, 3]


def test_methods():
    class Counter:
        def __init__(self):
            self.r = refs.new_ref(jnp.zeros(2))

        @refs.jit
        def step(self, k):
            refs.io_callback(add, None, self.r, k)

    a, b = Counter(), Counter()
    for counter in (a, b, a, a, b):
        counter.step(1)
    assert (a.r[0], b.r[0]) == (3, 2)


def test_static_arguments():
    def program(r, sign):
        refs.io_callback(lambda x: add(x, sign), None, r)

    step = refs.jit(program, static_argnums=1)
    r = refs.new_ref(jnp.zeros(2))
    for sign in (1, 1, -1, 10, 10, 1):
        step(r, sign)
    assert r[0] == 22


def test_no_jit_and_jit(step):
    r = refs.new_ref(jnp.zeros(3))
    with jax.disable_jit():
        step(r, 1)
    step(r, 1)
    assert r[0] == 2
