"""cond and switch: every branch returns the cells that any branch writes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from tests.discharge.helpers import agree, equations

X = np.arange(4, dtype=np.int32)


@pytest.mark.parametrize("p", [False, True])
def test_cond_of_a_ref_operand(p):
    def yes(r, x):
        r[1] += x
        return r[0]

    def no(r, x):
        r[...] = r[::-1] * x
        return r[1] + x

    def plain(a, p, x):
        if p:
            a[1] += x
            return a[0].copy()
        a[...] = a[::-1].copy() * x
        return a[1] + x

    agree(lambda r, p, x: lax.cond(p, yes, no, r, x), plain, [X], np.bool_(p), np.int32(3))


@pytest.mark.parametrize("p", [False, True])
def test_cond_whose_branches_close_over_different_refs(p):
    def program(r, s, p):
        def yes():
            r[0] += 1

        def no():
            s[...] *= 2

        lax.cond(p, yes, no)
        return r[0] + s[1]

    def plain(a, b, p):
        if p:
            a[0] += 1
        else:
            b *= 2
        return a[0] + b[1]

    agree(program, plain, [X, X], np.bool_(p))


@pytest.mark.parametrize("p", [False, True])
def test_only_one_branch_writes(p):
    def program(r, s, p):
        def yes(x):
            r[0] = x
            return s[3]

        def no(x):
            return x + s[0]

        return lax.cond(p, yes, no, r[2] + 5)

    def plain(a, b, p):
        x = a[2] + 5
        if p:
            a[0] = x
            return b[3]
        return x + b[0]

    pure = agree(program, plain, [X, X], np.bool_(p))
    [call] = equations(pure, "cond")
    assert len(call.outvars) == 2  # the result and r; s is only read


def test_branches_that_only_read_return_no_state():
    def program(r, p):
        return lax.cond(p, lambda: r[0], lambda: r[1])

    pure = agree(program, lambda a, p: a[0 if p else 1].copy(), [X], np.bool_(True))
    [call] = equations(pure, "cond")
    assert len(call.outvars) == 1


def test_branches_without_refs_are_left_alone():
    def program(r, p):
        r[0] = lax.cond(p, lambda x: x + 1, lambda x: x, r[0])

    agree(program, lambda a, p: a.__setitem__(0, a[0] + int(p)), [X], np.bool_(True))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_switch(n):
    def branch(k):
        def run(r, x):
            r[k] = x + k
            return r[0] * k

        return run

    branches = [branch(k) for k in range(n)]

    def plain(a, i, x):
        k = min(max(int(i), 0), n - 1)
        a[k] = x + k
        return a[0] * k

    for i in (-1, n - 1, n + 3):
        agree(
            lambda r, i, x: lax.switch(i, branches, r, x),
            plain,
            [X + 1],
            np.int32(i),
            np.int32(9),
            ways=["passed"] if i < n - 1 else ["closed over"],
        )


def test_switch_of_more_branches_than_write():
    def program(r, i):
        def write(k):
            return lambda: r.at[k].add(10)

        def nothing():
            return None

        lax.switch(i, [nothing, write(1), nothing, write(3)])

    def plain(a, i):
        if i % 2:
            a[i] += 10

    for i in range(4):
        agree(program, plain, [X], np.int32(i), ways=["closed over"])


def test_the_predicate_reads_what_a_branch_writes():
    def program(r):
        for _ in range(3):
            lax.cond(r[0] > 1, lambda: r.at[0].set(0), lambda: r.at[0].add(1))
        return r[0] > 0

    def plain(a):
        for _ in range(3):
            a[0] = 0 if a[0] > 1 else a[0] + 1
        return a[0] > 0

    agree(program, plain, [X])


@pytest.mark.parametrize("p, q", [(False, True), (True, False), (True, True)])
def test_nested(p, q):
    def program(r, p, q):
        def yes():
            r[0] += 1
            return lax.cond(q, lambda: refs.swap(r, 1, 50), lambda: r[2])

        return lax.cond(p, yes, lambda: r[3])

    def plain(a, p, q):
        if not p:
            return a[3].copy()
        a[0] += 1
        if not q:
            return a[2].copy()
        old = a[1].copy()
        a[1] = 50
        return old

    agree(program, plain, [X], np.bool_(p), np.bool_(q), ways=["closed over"])


def test_the_same_ref_under_two_names():
    def yes(r, s):
        r[0] += 1
        s[0] *= 3
        return r[0]

    def program(r, p):
        return lax.cond(p, lambda: yes(r, r), lambda: r[0])

    def plain(a, p):
        if p:
            a[0] = (a[0] + 1) * 3
        return a[0].copy()

    agree(program, plain, [X], np.bool_(True))


def test_refs_made_in_a_branch_live_there():
    def program(r, p):
        def yes(x):
            mine = refs.new_ref(x)
            mine[0] = 7
            r[...] += mine[...]
            return refs.freeze(mine)

        return lax.cond(p, yes, lambda x: x, r[...])

    def plain(a, p):
        mine = a.copy()
        mine[0] = 7
        a += mine
        return mine

    agree(program, plain, [X], np.bool_(True))


def test_an_index_of_a_row_chooses_the_branch():
    def program(r, i):
        lax.cond(r[i] > 1, lambda: r.at[i].multiply(-1), lambda: None)

    def plain(a, i):
        if a[i] > 1:
            a[i] *= -1

    for i in (0, 3):
        agree(program, plain, [X], np.int32(i), ways=["passed"])


def test_platform_dependent():
    def program(r, x):
        def default(x):
            r[0] += x
            return r[1]

        return lax.platform_dependent(x, cpu=default, default=default)

    def plain(a, x):
        a[0] += x
        return a[1].copy()

    agree(program, plain, [X], np.int32(2))


def test_gradients_go_through_the_branch_taken():
    def program(cells, p, x):
        [r] = cells

        def yes():
            r[0] = x * x

        def no():
            r[0] *= x

        lax.cond(p, yes, no)
        return r[0]

    pure = refs.functionalize(program)
    state = [jnp.float32([4.0])]
    assert jax.grad(lambda x: pure(state, True, x)[0])(3.0) == 6.0
    assert jax.grad(lambda x: pure(state, False, x)[0])(3.0) == 4.0
