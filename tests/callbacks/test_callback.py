"""`refs.io_callback` and `refs.pure_callback`: what a callback is given, and what comes of it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import refs
from refs.errors import RefIndexError, RefTypeError, RefValueError

S = jax.ShapeDtypeStruct
same = np.testing.assert_array_equal
kinds = pytest.mark.parametrize("call", [refs.io_callback, refs.pure_callback])


def ref(*shape, name="r"):
    size = np.prod(shape, dtype=int)
    return refs.new_ref(jnp.arange(size, dtype=jnp.int32).reshape(shape), name=name)


def add_one(x, *_):
    x += 1


# --- Arguments ------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: object
    right: object


@kinds
def test_pytrees_and_keywords(call, jit):
    r, q, p = ref(3), ref(2, name="q"), ref(name="p")
    seen = []

    def host(tree, scale, *, other, where=None):
        assert isinstance(tree["pair"], Pair)
        assert where is None
        tree["pair"].left[...] += scale
        tree["list"][0][...] = 10
        other["p"][...] -= 1
        seen.append((tree["pair"].right.tolist(), type(scale)))

    def step(x, k):
        call(host, None, {"pair": Pair(r, x), "list": [q, None]}, k, other={"p": p}, where=None)

    jit(step)(np.arange(2), 5)
    same(r[...], [5, 6, 7])
    same(q[...], [10, 10])
    assert p[...] == -1
    assert seen == [([0, 1], np.ndarray)]


def test_what_may_be_written(jit):
    r = ref(2, 2)
    flags = {}

    def host(whole, part, copied, array, number):
        given = {"whole": whole, "part": part, "copied": copied, "array": array, "number": number}
        assert all(type(x) is np.ndarray for x in given.values())
        flags.update({name: x.flags.writeable for name, x in given.items()})
        for x in (array, number):
            with pytest.raises(ValueError, match="read-only"):
                x[...] = 1

    jit(lambda x: refs.io_callback(host, None, r, r.at[0], r.at[np.array([1])], x, 3))(jnp.ones(2))
    assert flags == {"whole": True, "part": True, "copied": True, "array": False, "number": False}


DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16"),
    *(name for name in vars(ml_dtypes) if name.startswith("float8_") and hasattr(jnp, name)),
]


@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 0, 3), (1, 1)], ids=str)
def test_dtypes_and_shapes(shape, jit):
    with jax.enable_x64(True):
        for name in DTYPES:
            dtype = jnp.dtype(name)
            # Not all of them have a zero.
            old = np.ones(shape, dtype)
            new = np.full(shape, name != "bool" and 2, dtype)
            r, q = refs.new_ref(jnp.asarray(old)), refs.new_ref(jnp.asarray(old))

            def host(x, y, z):
                assert x.dtype == y.dtype == z.dtype == dtype  # noqa: B023
                assert x.shape == y.shape == z.shape == shape
                same(x, z)
                x[...] = new  # noqa: B023
                return x, y

            def step(z):
                return refs.io_callback(host, (S(shape, dtype),) * 2, r, q, z)  # noqa: B023

            one, other = jit(step)(jnp.asarray(old))
            assert r.dtype == one.dtype == other.dtype == dtype
            same(r[...], new)
            same(one, new)
            same(q[...], old)
            same(other, old)


def test_what_numpy_has_not(jit):
    keys = refs.new_ref(jax.random.split(jax.random.key(0), 2))
    small = refs.new_ref(jnp.zeros(2, jnp.int4))
    with pytest.raises(RefTypeError, match=r"PRNG keys.*Pass `jax.random.key_data\(keys\)`"):
        jit(lambda: refs.io_callback(add_one, None, keys))()
    with pytest.raises(RefTypeError, match=r"dtype int4: .*`x.astype\('int8'\)`"):
        jit(lambda: refs.io_callback(add_one, None, small))()
    with pytest.raises(RefTypeError, match=r"dtype int4"):
        jit(lambda: refs.io_callback(lambda: 0, S((), jnp.int4)))()


def test_the_same_ref_twice(jit):
    r, seen = ref(4), []

    def host(x, y, part):
        x[0] = 7
        seen.append((int(y[0]), int(part[0]), np.shares_memory(x, part)))
        part[1] = 8
        y += 1

    jit(lambda r, s: refs.io_callback(host, None, r, s, s.at[:2]))(r, r)
    same(r[...], [8, 9, 3, 4])
    assert seen == [(7, 7, True)]


def test_the_refs_old_value_stays_what_it_was(jit):
    """Passed together with the ref, read before, and held outside as JAX's and NumPy's."""
    r, seen = ref(3), []
    outside, view = r[...], np.asarray(r)

    def host(x, old, reversed_):
        x += 10
        seen.append((old.tolist(), reversed_.tolist()))

    def step():
        old = r[...]
        refs.io_callback(host, None, r, r[...], r[::-1])
        return old

    same(jit(step)(), [0, 1, 2])
    same(r[...], [10, 11, 12])
    same(outside, [0, 1, 2])
    same(view, [0, 1, 2])
    assert seen == [([0, 1, 2], [2, 1, 0])]


def test_refs_that_begin_with_one_value_are_two(jit):
    def step(x):
        pairs = [[refs.new_ref(x) for _ in range(2)] for x in (x, jnp.zeros(2, jnp.int32))]
        for a, b in pairs:
            refs.io_callback(add_one, None, a, b)
        return [r[...] for pair in pairs for r in pair], x

    for _ in range(2):
        (a, b, c, d), x = jit(step)(jnp.zeros(2, jnp.int32))
        same(a, [1, 1])
        same(c, [1, 1])
        same([b, d, x], np.zeros((3, 2)))


def test_a_native_ref(jit):
    r, mine = jax.new_ref(jnp.arange(3)), ref(3)

    def host(x, y):
        x += y
        y *= 10

    for _ in range(2):
        jit(lambda r: refs.io_callback(host, None, r, mine))(r)
    same(r[...], [0, 12, 24])
    same(mine[...], [0, 100, 200])


# --- Views ----------------------------------------------------------------------------------------


VIEWS = {
    # The first is among the quick tests.
    "window to the end": lambda r, i: r.at[jax.ds(-2, 2)],
    "row": lambda r, i: r.at[i],
    "element": lambda r, i: r.at[i, -1],
    "slice": lambda r, i: r.at[1:, ::2],
    "reversed": lambda r, i: r.at[::-1],
    "window": lambda r, i: r.at[jax.ds(i, 2)],
    "window of 0": lambda r, i: r.at[jax.ds(i, 0)],
    "window with a stride": lambda r, i: r.at[jax.ds(i - 1, 2, 2)],
    "window of 0 with a stride": lambda r, i: r.at[jax.ds(i - 1, 0, 2)],
    "window with a stride from the end": lambda r, i: r.at[:, jax.ds(i - 4, 2, 2)],
    "window from the end": lambda r, i: r.at[jax.ds(i - 3, 2)],
    "new axis": lambda r, i: r.at[:, None, i],
    "nested": lambda r, i: r.at[1:].at[:, i].at[0],
    "integers": lambda r, i: r.at[np.array([2, 0])],
    "traced integers": lambda r, i: r.at[:, jnp.array([3, 1]) - i],
    "integers apart": lambda r, i: r.at[None].at[0, :, np.array([1, 0])],
    "mask": lambda r, i: r.at[np.array([True, False, True])],
    "mask of two axes": lambda r, i: r.at[np.arange(12).reshape(3, 4) % 5 == 0],
    "a view of integers": lambda r, i: r.at[np.array([2, 0])].at[i],
    "integers of integers": lambda r, i: r.at[np.array([2, 0])].at[:, np.array([1, 3])],
    "nothing": lambda r, i: r.at[2:1],
    "all": lambda r, i: r.at[()],
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_that_part(name, jit):
    """Whatever JAX reads there, is there, and what is written there, JAX reads."""
    r, q, take = ref(3, 4), ref(3, 4), VIEWS[name]
    shape = take(r, 1).shape
    seen = []

    def host(x, scale):
        seen.append(x.copy())
        x *= scale

    def step(i):
        before = take(r, i).get()
        refs.io_callback(host, None, take(r, i), -1)
        take(q, i).set(-before)
        return before

    before = jit(step)(np.int32(1))
    assert seen[0].shape == shape
    same(seen[0], before)
    same(r[...], q[...])


def test_parts_out_of_bounds(jit):
    r, called = ref(3), []
    step = jit(lambda i: refs.io_callback(called.append, None, r.at[i]))
    for i in 3, -4:
        with pytest.raises(RefIndexError, match=r"part of ref `r` .*index -?\d is out of bounds"):
            step(jnp.int32(i))
    with pytest.raises(RefIndexError, match=r"ref `r` .*the part is out of bounds"):
        jit(lambda i: refs.io_callback(called.append, None, r.at[jax.ds(i, 2)]))(jnp.int32(2))
    assert not called
    same(r[...], [0, 1, 2])


def test_rows_in_a_scan_over_refs(jit):
    r, q = ref(3, 2, 2), ref(3, 2, name="q")
    seen = []

    def host(row, part, k):
        seen.append((int(k), row.shape, part.shape))
        row[0] += 100 * k
        part[...] = -k
        return row.sum()

    def step(carry, xs):
        row, short, k = xs
        total = refs.io_callback(host, S((), jnp.int32), row, short.at[1], k)
        row[1, 1] += carry
        return carry + 1, (total, row[...])

    want, want_q = np.arange(12, dtype=np.int32).reshape(3, 2, 2), np.arange(6).reshape(3, 2)
    for reverse in False, True:
        seen.clear()
        order = (2, 1, 0) if reverse else (0, 1, 2)
        totals = np.zeros(3, int)
        for carry, k in enumerate(order):
            want[k, 0] += 100 * k
            want_q[k, 1] = -k
            totals[k] = want[k].sum()
            want[k, 1, 1] += carry
        xs = r, q, jnp.arange(3)
        _, (got, rows) = jit(lambda xs, way=reverse: refs.scan(step, 0, xs, reverse=way))(xs)
        same(got, totals)
        same(rows, want)
        same(r[...], want)
        same(q[...], want_q)
        assert seen == [(k, (2, 2), ()) for k in order]


def test_rows_of_rows(jit):
    r = ref(2, 3, 4)

    def inner(_, row):
        refs.io_callback(add_one, None, row.at[1:])

    def outer(_, rows):
        refs.scan(lambda _, row: (None, inner(_, row)), None, rows)
        refs.io_callback(add_one, None, rows.at[0, 0])
        return None, None

    jit(lambda: refs.scan(outer, None, r))()
    want = np.arange(24).reshape(2, 3, 4)
    want[:, :, 1:] += 1
    want[:, 0, 0] += 1
    same(r[...], want)


# --- Results --------------------------------------------------------------------------------------


@kinds
def test_results(call, jit):
    r = ref(3)

    def host(x):
        return {"a": x.sum(), "b": (x, [np.float32(0.5), None])}

    types = {"a": S((), jnp.int32), "b": (S((3,), jnp.int32), [S((), jnp.float32), None])}

    def step():
        out = call(host, types, r)
        r[...] = out["b"][0] * out["a"]
        return out

    out = jit(step)()
    assert out["a"] == 3
    same(out["b"][0], [0, 1, 2])
    assert out["b"][1][0] == 0.5
    assert out["b"][1][1] is None
    same(r[...], [0, 3, 6])


@pytest.mark.parametrize("empty", [None, (), [], {}], ids=str)
def test_no_results(empty, jit):
    r = ref(2)
    assert jit(lambda: refs.io_callback(lambda x: empty, empty, r))() == empty


@pytest.mark.parametrize(
    ("value", "type", "error", "text"),
    [
        (lambda: np.zeros(3), S((2,), "float32"), RefValueError, r"shape \(3,\) as result 0"),
        (lambda: np.zeros((1, 2)), S((2,), "float32"), RefValueError, r"shape \(1, 2\)"),
        (lambda: 1.0, S((2,), "float32"), RefValueError, r"shape \(\)"),
        (lambda: 1.5, S((), "int32"), RefTypeError, r"float.*result 0"),
        (lambda: 1j, S((), "float32"), RefTypeError, r"complex.*result 0"),
        (lambda: None, S((), "int32"), RefTypeError, r"returned 0 arrays, .* has 1"),
        (lambda: 1, None, RefTypeError, r"returned 1 arrays, .* has 0"),
        (lambda: (1, 2), (S((), "int32"),) * 3, RefTypeError, r"returned 2 arrays, .* has 3"),
        (lambda: "text", S((), "int32"), RefTypeError, r"dtype <U4"),
    ],
)
def test_results_that_were_not_announced(value, type, error, text, jit):
    r = ref(2)

    def host(x):
        x += 1
        return value()

    with pytest.raises(error, match=text) as caught:
        jit(lambda: refs.io_callback(host, type, r))()
    assert str(caught.value).startswith("io_callback of `host` at test_callback.py:")
    same(r[...], [0, 1])


def test_results_are_cast_within_their_kind(jit):
    """As NumPy's own sums and Python's numbers need it."""
    types = [S((), d) for d in ("float32", "bfloat16", "int8", "complex64", "float32", "bool")]
    got = jit(lambda: refs.pure_callback(lambda: [np.float64(0.5), 0.5, 3, 1.5, 2, True], types))()
    assert [str(x.dtype) for x in got] == [str(t.dtype) for t in types]
    assert [complex(x) for x in got] == [0.5, 0.5, 3, 1.5, 2, 1]


def test_other_containers_will_do(jit):
    """As JAX has it: the leaves count."""
    one, other = jit(lambda: refs.pure_callback(lambda: [1, 2], (S((), "int32"),) * 2))()
    assert (one, other) == (1, 2)


def test_a_python_int_for_an_unsigned_result(jit):
    """`len(x)` is one."""
    assert jit(lambda: refs.pure_callback(lambda: 3, S((), "uint32")))() == 3


# --- In programs of JAX's own ---------------------------------------------------------------------


def test_a_handle_of_jax_in_its_own_jit():
    native = jax.new_ref(jnp.arange(3))
    jax.jit(lambda: refs.io_callback(add_one, None, native))()
    same(native[...], [1, 2, 3])


def test_a_ref_in_a_loop_of_jax():
    def step(x):
        made = jax.new_ref(x)

        def body(k, total):
            [y] = refs.io_callback(lambda a: (add_one(a), a[:1])[1], [S((1,), jnp.int32)], made)
            return total + y[0]

        return jax.lax.fori_loop(0, 3, body, 0), made[...]

    total, x = jax.jit(step)(jnp.arange(3))
    same(total, 1 + 2 + 3)
    same(x, [3, 4, 5])
