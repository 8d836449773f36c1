"""scan: state closed over is carried, a ref among the xs gives each step its row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from tests.discharge.helpers import agree, equations

X = np.arange(4, dtype=np.int32)
ROWS = np.arange(12, dtype=np.int32).reshape(4, 3)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("unroll", [1, 3])
def test_state_closed_over_and_ys(reverse, unroll):
    def program(r, xs):
        def body(c, x):
            r[0] += x
            r[1] = c
            return c + r[0], r[...]

        return lax.scan(body, np.int32(1), xs, reverse=reverse, unroll=unroll)

    def plain(a, xs):
        c, ys = np.int32(1), []
        for x in xs[::-1] if reverse else xs:
            a[0] += x
            a[1] = c
            c = c + a[0]
            ys.append(a.copy())
        return c, np.stack(ys[::-1] if reverse else ys)

    pure = agree(program, plain, [X], X + 1, ways=["closed over"])
    [loop] = equations(pure, "scan")
    assert loop.params["reverse"] is reverse
    assert loop.params["unroll"] == unroll


def test_written_is_carried_and_read_is_constant():
    def program(r, s):
        def body(_, x):
            r[x] = s[x] * 2
            return None, s[0]

        return lax.scan(body, None, jnp.arange(4))[1]

    def plain(a, b):
        a[...] = b * 2
        return np.full(4, b[0])

    pure = agree(program, plain, [X, X + 5])
    [loop] = equations(pure, "scan")
    assert len(loop.outvars) == 2  # r, and the ys


@pytest.mark.parametrize("length", [0, 1, 3])
def test_without_xs(length):
    def program(r):
        def body(c, _):
            r[c] += 10
            return c + 1, c

        return lax.scan(body, 0, length=length)

    def plain(a):
        for k in range(length):
            a[k] += 10
        return np.int32(length), np.arange(length, dtype=np.int32)

    agree(program, plain, [X])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("unroll", [1, 2])
def test_a_ref_among_the_xs(reverse, unroll):
    def program(r, xs):
        def body(c, step):
            row, x = step
            row[0] += c
            row[1:] *= x
            return c + row[0], row[...]

        return lax.scan(body, np.int32(1), (r, xs), reverse=reverse, unroll=unroll)

    def plain(a, xs):
        c, ys = np.int32(1), np.zeros_like(a)
        for k in reversed(range(4)) if reverse else range(4):
            a[k, 0] += c
            a[k, 1:] *= xs[k]
            c = c + a[k, 0]
            ys[k] = a[k]
        return c, ys

    agree(program, plain, [ROWS], X + 2, ways=["passed"])


def test_a_ref_among_the_xs_that_is_only_read():
    def program(r):
        return lax.scan(lambda c, row: (c + row[0], row[::-1]), np.int32(0), r)

    pure = agree(program, lambda a: (a[:, 0].sum(dtype=np.int32), a[:, ::-1].copy()), [ROWS])
    [loop] = equations(pure, "scan")
    assert len(loop.outvars) == 2


def test_a_ref_among_the_xs_that_is_never_touched():
    def program(r):
        return lax.scan(lambda c, row: (c + 1, None), np.int32(0), r)[0]

    agree(program, lambda a: np.int32(4), [ROWS])


def test_a_vector_among_the_xs_gives_scalars():
    def program(r):
        def body(c, cell):
            cell[...] = refs.swap(cell, ..., c) + 1
            return cell[...], None

        return lax.scan(body, np.int32(5), r)[0]

    def plain(a):
        c = np.int32(5)
        for k in range(4):
            a[k] += 1
            c = a[k].copy()
        return c

    agree(program, plain, [X])


@pytest.mark.parametrize("reverse", [False, True])
def test_a_ref_both_among_the_xs_and_closed_over(reverse):
    r = refs.new_ref(ROWS)

    @refs.jit
    def program(passed):  # JAX can't tell that `passed` is `r`
        def body(i, row):
            r[0, 0] += 1  # in the step of row 0, the row sees it
            row[0] += r[0, 0] + r[i, 1]
            r[i] += 100
            return i + 1, row[...]

        return lax.scan(body, np.int32(0), passed, reverse=reverse)[1]

    def plain(a):
        ys = np.zeros_like(a)
        for i, k in enumerate(reversed(range(4)) if reverse else range(4)):
            a[0, 0] += 1
            a[k, 0] += a[0, 0] + a[i, 1]
            a[i] += 100
            ys[k] = a[k]
        return ys

    expected = ROWS.copy()
    for _ in range(2):
        np.testing.assert_array_equal(program(r), plain(expected))
        np.testing.assert_array_equal(r[...], expected)


def test_the_same_ref_twice_among_the_xs():
    first = refs.new_ref(ROWS)

    @refs.jit
    def program(second):
        def body(c, rows):
            one, two = rows
            one[0] += 1
            two[0] *= 2
            return c + one[0], None

        return lax.scan(body, np.int32(0), (first, second))[0]

    expected = ROWS.copy()
    for _ in range(2):
        expected[:, 0] = (expected[:, 0] + 1) * 2
        assert program(first) == expected[:, 0].sum()
        np.testing.assert_array_equal(first[...], expected)


def test_one_row_under_two_names_in_an_inner_function():
    """A write under one name is seen under the other."""
    first = refs.new_ref(ROWS)

    @jax.jit
    def inner(one, two):
        one[0] += 1
        two[0] *= 2
        one[1] = two[0]

    @refs.jit
    def program(second):
        lax.scan(lambda c, rows: (inner(*rows), c)[::-1], np.int32(0), (first, second))

    expected = ROWS.copy()
    for _ in range(2):
        expected[:, 0] = (expected[:, 0] + 1) * 2
        expected[:, 1] = expected[:, 0]
        program(first)
        np.testing.assert_array_equal(first[...], expected)


def test_what_jax_refuses_is_an_error_of_ours():
    r = refs.new_ref(ROWS)
    scan = lambda body, xs: lambda: lax.scan(body, 0, xs)  # noqa: E731
    for fun in (
        scan(lambda c, rows: (c, rows[0][0]), (r, r)),
        scan(lambda c, row: (c, row[0] + r[0, 0]), r),
    ):
        with pytest.raises(refs.errors.RefEscapeError):
            refs.make_jaxpr(fun)()


def test_rows_of_rows():
    def program(r):
        def outer(c, row):
            def inner(c, cell):
                cell[...] += c
                return c + 1, None

            return lax.scan(inner, c, row)

        return lax.scan(outer, np.int32(0), r)[0]

    def plain(a):
        a += np.arange(12, dtype=np.int32).reshape(4, 3)
        return np.int32(12)

    agree(program, plain, [ROWS])


def test_a_row_in_a_cond_and_a_jit_and_a_while_loop():
    @jax.jit
    def bump(row, x):
        row[0] += x

    def program(r):
        def body(c, row):
            bump(row, c)
            lax.cond(row[0] > 5, lambda: row.at[1].set(0), lambda: None)

            def more(_):
                row[2] += 3

            lax.while_loop(lambda _: row[2] < 9, more, None)
            return c + 1, None

        lax.scan(body, np.int32(0), r)

    def plain(a):
        for k in range(4):
            a[k, 0] += k
            if a[k, 0] > 5:
                a[k, 1] = 0
            while a[k, 2] < 9:
                a[k, 2] += 3

    agree(program, plain, [ROWS], ways=["passed"])


def test_scans_in_scans_over_the_same_state():
    def program(r):
        def outer(c, x):
            def inner(c, y):
                r[y] += c * x
                return c + 1, r[x]

            c, ys = lax.scan(inner, c, jnp.arange(3))
            return c, jnp.sum(ys)

        return lax.scan(outer, np.int32(1), jnp.arange(2))

    def plain(a):
        c, out = np.int32(1), []
        for x in range(2):
            ys = []
            for y in range(3):
                a[y] += c * x
                c += 1
                ys.append(a[x].copy())
            out.append(sum(ys))
        return c, np.int32(out)

    agree(program, plain, [X], ways=["closed over"])


def test_map_and_associated_functions():
    def program(r, xs):
        def step(x):
            r[0] += x
            return r[0] * x

        return lax.map(step, xs)

    def plain(a, xs):
        out = []
        for x in xs:
            a[0] += x
            out.append(a[0] * x)
        return np.stack(out)

    agree(program, plain, [X], X + 1)


def test_a_ref_carried_only_through_its_accumulation():
    def program(r, xs):
        def body(_, x):
            refs.addupdate(r, jnp.stack([x % 4, 0]), x)
            return None, None

        lax.scan(body, None, xs)

    def plain(a, xs):
        for x in xs:
            np.add.at(a, [x % 4, 0], x)

    agree(program, plain, [X], X + 3)


def test_gradients_through_carried_state_and_rows():
    def program(cells, x):
        r, table = cells

        def body(c, row):
            r[0] = r[0] * x + row[0]
            row[0] = r[0]
            return c * r[0], None

        return lax.scan(body, x, table)[0]

    def by_hand(x):
        state, product = 2.0, x
        for row in ROWS.astype(np.float32):
            state = state * x + row[0]
            product = product * state
        return product

    pure = refs.functionalize(program)
    start = [jnp.float32([2.0]), jnp.asarray(ROWS, jnp.float32)]
    got = jax.grad(lambda x: pure(start, x)[0])(0.5)
    np.testing.assert_allclose(got, jax.grad(by_hand)(0.5), rtol=1e-5)
