"""Indices of every integer type, near its limits and beyond the ref: as in `jax.numpy`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs._indexing.index import Index
from refs.errors import RefIndexError

TYPES = ["int8", "int16", "int32", "uint8", "uint16", "uint32"]


def values(dtype):
    info = np.iinfo(dtype)
    near = [info.min, info.min + 3, info.max, info.max - 3, info.max // 2 + 1, info.max // 2 + 4]
    return sorted({*near, 0, 3, 100, *(k for k in (-1, -5, -6, -100) if k >= info.min)})


def eagerly(program, *args):
    return program(*args)


def compiled(program, *args):
    return refs.jit(program)(*args)


ways = pytest.mark.parametrize("run", [eagerly, compiled])


@ways
@pytest.mark.parametrize("n", [5, 300])
@pytest.mark.parametrize("dtype", TYPES)
def test_integers_arrays_and_starts(run, dtype, n):
    x = np.arange(float(n), dtype=np.float32)

    def program(i):
        r = refs.new_ref(x)
        seen = [r[i], r[i[None]], r[jax.ds(i, 2)], r.at[::-1].at[i].get()]
        r[i] = -1.0
        r.at[i[None]].add(-2.0)
        r.at[1:].at[i].add(-4.0)
        r[jax.ds(i, 2)] = -3.0
        return [*seen, r[...]]

    for value in values(dtype):
        place = value + n if value < 0 else value
        nearest, start = np.clip(place, 0, n - 1), np.clip(place, 0, n - 2)
        want = x.copy()
        seen = [want[nearest], want[[nearest]], want[start : start + 2].copy()]
        seen.append(want[::-1][nearest])
        if 0 <= place < n:
            want[place] = -3
        inner = value + n - 1 if value < 0 else value
        if 0 <= inner < n - 1:
            want[1 + inner] -= 4
        want[start : start + 2] = -3
        got = run(program, jnp.asarray(np.array(value, dtype)))
        for w, g in zip([*seen, want], got, strict=True):
            np.testing.assert_array_equal(g, w, err_msg=f"{dtype} {value}")


@ways
def test_numpy_arrays_beyond_the_type_of_places(run):
    def program():
        r = refs.new_ref(jnp.arange(5.0))
        r[np.array([2**32, -(2**40), 1])] = 9.0
        r.at[::-1].at[np.array([2**32, 0])].add(1.0)
        return r[...]

    assert run(program).tolist() == [0, 9, 2, 3, 5]


@ways
def test_lanes_with_starts_of_their_own(run):
    r = refs.new_ref(jnp.zeros(5))

    @refs.vmap
    def lane(i):
        r.at[jax.ds(i, 2)].add(1.0)

    run(lane, jnp.array([0, 3, 2**32 - 1, 2**31 + 1], jnp.uint32))
    assert r[...].tolist() == [1, 1, 0, 3, 3]


@ways
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_an_axis_of_size_0(run, shape):
    r = refs.new_ref(jnp.zeros(shape), name="r")
    index = (slice(None),) * shape.index(0)
    here = rf"ref `r` .*: .* is out of bounds for axis {shape.index(0)} of size 0"
    with pytest.raises(RefIndexError, match=here):
        run(lambda i: r[(*index, i)], jnp.int32(0))
    with pytest.raises(RefIndexError, match=here):
        run(lambda i: r.at[(*index, i)].set(1.0), jnp.int32(0))
    with pytest.raises(RefIndexError, match=here):
        run(lambda i: r[(*index, i)], jnp.array([0, 1]))
    with pytest.raises(RefIndexError, match=here):
        run(lambda i: refs.swap(r, (*index, i), 1.0), jnp.array([0, 1]))
    with pytest.raises(RefIndexError, match=r"ref `r` .* is out of bounds for axis 0 of size 0"):
        run(lambda i: r.at[index].at[..., 0:0].at[:0].at[i].get(), jnp.array([0, 1]))

    def writes(i):
        r.at[(*index, i)].add(1.0)
        r[(*index, i)] = 1.0
        r.at[:0].at[i].set(1.0)
        return r[(*index, jax.ds(i[0], 0))], r[(*index, i[:0])]

    for part in run(writes, jnp.array([0, 1])):
        assert part.size == 0


def state_in_and_out(f):
    return lambda *args: refs.functionalize(lambda _, *args: f(*args))((), *args)[0]


@pytest.mark.parametrize("wrap", [lambda f: f, refs.jit, jax.jit, state_in_and_out])
def test_axes_whose_size_is_a_symbol(wrap):
    def f(x):
        q = refs.new_ref(jnp.zeros_like(x))
        q[...] = x
        q.at[0].add(1.0)
        q[:, 1] *= 2
        return q[...] + q[0]

    shape = jax.export.symbolic_shape("b, 2")
    exported = jax.export.export(jax.jit(wrap(f)))(jax.ShapeDtypeStruct(shape, jnp.float32))
    np.testing.assert_array_equal(exported.call(jnp.ones((2, 2))), [[4, 8], [3, 6]])


@pytest.mark.parametrize("wrap", [refs.jit, state_in_and_out])
@pytest.mark.parametrize("i", [0, 1, -1, 3, -9])
def test_places_on_an_axis_whose_size_is_a_symbol(wrap, i):
    def f(x, i):
        q = refs.new_ref(x)
        q[i] = 5.0
        q[i, 1] += 1
        part = q[jax.ds(i, 1), 1]
        q.at[i[None]].multiply(2)
        return q[...], q[i], part, q[i[None] + jnp.arange(1)]

    size, x, i = jax.export.symbolic_shape("b"), np.arange(6.0, dtype=np.float32), jnp.int32(i)
    types = jax.ShapeDtypeStruct((*size, 2), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    exported = jax.export.export(jax.jit(wrap(f)))(*types)
    x = jnp.asarray(x.reshape(3, 2))
    for got, want in zip(exported.call(x, i), refs.jit(f)(x, i), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "idx",
    [
        True, (True, 0), (slice(None), True), (..., True), (0, slice(None), True), (True, True),
        (True, slice(None), True), (None, True), (slice(None), True, True), (slice(None), 0, True),
        (0, None, True), (slice(None), True, 1),
    ],
)  # fmt: skip
def test_the_axis_of_a_scalar_true_stands_where_it_stands(idx):
    x = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    wanted = x.copy()
    part = x[idx]
    wanted[idx] = part * 2
    for wrap in (lambda f: f, refs.jit):
        r = refs.new_ref(x)

        def double(value, r=r):
            old = r[idx]
            r[idx] = value
            return old

        np.testing.assert_array_equal(wrap(double)(part * 2), part)
        np.testing.assert_array_equal(r, wanted)


def test_an_axis_longer_than_int32_can_count():
    """Its indices are int64, which only x64 has; abstractly, for nobody has the memory."""
    n = 2**31 + 8
    with jax.enable_x64(True):
        axis = jax.ShapeDtypeStruct((n,), "int8", is_ref=True)
        text = refs.jit(lambda r, i: r[i]).trace(axis, jnp.int64(-3)).lower().as_text()
    assert f"dense<{n}> : tensor<i64>" in text


@pytest.mark.parametrize("idx", [2**31 + 1, slice(2**31 + 1, 2**31 + 3), -1])
def test_places_of_more_than_31_bits(idx):
    """Such an array isn't made: it is read and written in a trace."""
    x = jax.ShapeDtypeStruct((2**32,), np.int8)
    index = Index.parse(idx, x.shape)
    key, operands = index.split()
    assert not operands
    assert key.join([]) == index
    value = jax.ShapeDtypeStruct(index.result_shape, np.int8)
    assert jax.eval_shape(index.read, x).shape == value.shape
    new = jax.eval_shape(lambda x, v: index.update(x, "add", v), x, value)
    assert new.shape == x.shape
    start = 2**32 - 1 if idx == -1 else 2**31 + 1
    assert str(start) in str(jax.make_jaxpr(index.read)(x))
