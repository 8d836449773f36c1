"""while_loop and fori_loop: the predicate sees the cells as they are, and may even write them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from tests.discharge.helpers import agree, equations

X = np.arange(5, dtype=np.int32)


def test_the_predicate_reads_what_the_body_writes():
    def program(r, n):
        def body(c):
            r[0] += 2
            return c * 2

        return lax.while_loop(lambda c: r[0] < n, body, 1)

    def plain(a, n):
        c = np.int32(1)
        while a[0] < n:
            a[0] += 2
            c *= 2
        return c

    pure = agree(program, plain, [X], np.int32(7))
    assert len(equations(pure, "while")) == 1


def test_nothing_is_carried_but_the_state():
    def program(r):
        def body(_):
            r[1] -= 1
            r[0] += r[1]

        lax.while_loop(lambda _: r[1] > 0, body, None)

    def plain(a):
        while a[1] > 0:
            a[1] -= 1
            a[0] += a[1]

    agree(program, plain, [X + 4])


def test_a_loop_that_is_never_entered():
    def program(r):
        def body(c):
            r[...] = -1
            return c + 1

        return lax.while_loop(lambda c: r[0] > 100, body, 3)

    agree(program, lambda a: np.int32(3), [X])


@pytest.mark.parametrize("n", [0, 1, 4])
def test_the_predicate_writes(n):
    def program(r, n):
        def test(c):
            r[0] += 1  # as often as the predicate is evaluated
            return c < n

        def body(c):
            r[1] += r[0]
            return c + 1

        return lax.while_loop(test, body, 0)

    def plain(a, n):
        c = np.int32(0)
        while True:
            a[0] += 1
            if not c < n:
                return c
            a[1] += a[0]
            c += 1

    agree(program, plain, [X], np.int32(n))


def test_the_predicate_writes_a_ref_of_its_own():
    def program(r, s):
        def test(_):
            return refs.swap(s, 0, s[0] + 1) < 3

        def body(_):
            r[s[0]] = 10

        lax.while_loop(test, body, None)

    def plain(a, b):
        while True:
            b[0] += 1
            if not b[0] - 1 < 3:
                return
            a[b[0]] = 10

    agree(program, plain, [X, np.int32([0])])


def test_one_ref_written_one_read_in_body_and_predicate():
    def program(r, limit, step):
        def body(c):
            r[...] += step[0]
            return c + 1

        return lax.while_loop(lambda c: jnp.sum(r[...]) < limit[0], body, 0)

    def plain(a, limit, step):
        c = np.int32(0)
        while a.sum() < limit[0]:
            a += step[0]
            c += 1
        return c

    pure = agree(program, plain, [X, np.int32([40]), np.int32([3])])
    [loop] = equations(pure, "while")
    assert len(loop.outvars) == 2  # the count and r: what is only read isn't carried


def test_an_array_carry_next_to_a_state_of_the_same_type():
    def program(r, x):
        def body(c):
            i, v = c
            r[...], v = v, r[...]
            return i + 1, v

        return lax.while_loop(lambda c: c[0] < 3, body, (0, x))

    def plain(a, x):
        v = x.copy()
        for _ in range(3):
            old = a.copy()
            a[...] = v
            v = old
        return np.int32(3), v

    agree(program, plain, [X], X * 10)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("lower, upper", [(0, 4), (2, 2), (1, 3)])
def test_fori_loop(traced, lower, upper):
    def program(r, n):
        def body(i, c):
            r[i] += c
            return c + r[i - 1]

        return lax.fori_loop(lower, n if traced else upper, body, np.int32(1))

    def plain(a, n):
        c = np.int32(1)
        for i in range(lower, upper):
            a[i] += c
            c = c + a[i - 1]
        return c

    pure = agree(program, plain, [X], np.int32(upper), ways=["closed over"])
    assert len(equations(pure, "while" if traced else "scan")) == 1 or lower == upper


def test_fori_loop_unrolled():
    def program(r):
        def body(i, _):
            r[i] *= 2

        lax.fori_loop(0, 5, body, None, unroll=True)

    def plain(a):
        a *= 2

    agree(program, plain, [X], ways=["passed"])


def test_loops_in_loops_and_a_cond():
    def program(r, n):
        def outer(i, total):
            def inner(c):
                lax.cond(c % 2 == 0, lambda: r.at[i].add(c), lambda: r.at[0].add(1))
                return c + 1

            return total + lax.while_loop(lambda c: (c < n) & (r[0] < 9), inner, i)

        return lax.fori_loop(1, 4, outer, 0)

    def plain(a, n):
        total = np.int32(0)
        for i in range(1, 4):
            c = i
            while c < n and a[0] < 9:
                if c % 2 == 0:
                    a[i] += c
                else:
                    a[0] += 1
                c += 1
            total += c
        return total

    agree(program, plain, [X], np.int32(6))


def test_refs_made_in_the_body():
    def program(r):
        def body(i, c):
            mine = refs.new_ref(r[...])
            mine[i] = 0
            r[0] += jnp.sum(mine[...])
            return c + mine[0]

        return lax.fori_loop(0, 3, body, 0)

    def plain(a):
        c = 0
        for i in range(3):
            mine = a.copy()
            mine[i] = 0
            a[0] += mine.sum()
            c += mine[0]
        return np.int32(c)

    agree(program, plain, [X])


def test_the_type_of_the_state_does_not_become_weak():
    def program(r, s):
        def body(i, _):
            r[...] = 1.0  # a weak float
            s[...] = s[...] + 2

        lax.fori_loop(0, jnp.int32(2), body, None)

    def plain(a, b):
        a[...] = 1
        b += 4

    agree(program, plain, [np.float32(3), np.ones(2, "int8")])


def test_refs_are_closed_over_by_jit_in_the_predicate():
    def program(r):
        test = jax.jit(lambda c: r[0] + c < 6)

        def body(c):
            r.at[0].add(1)
            return c + 1

        return lax.while_loop(test, body, 0)

    def plain(a):
        c = np.int32(0)
        while a[0] + c < 6:
            a[0] += 1
            c += 1
        return c

    agree(program, plain, [X])


def test_forward_gradients():
    def program(cells, x):
        [r] = cells

        def body(i, _):
            r[0] *= x

        lax.fori_loop(0, jnp.int32(3), body, None)
        return r[0]

    pure = refs.functionalize(program)
    value, tangent = jax.jvp(lambda x: pure([jnp.ones(1)], x)[0], (2.0,), (1.0,))
    assert (value, tangent) == (8.0, 12.0)
