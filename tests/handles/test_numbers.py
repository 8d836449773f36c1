"""A scalar ref as a number of Python's, any ref as an array of NumPy's: what it holds now."""

import builtins
import cmath
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs.errors import RefTypeError

# What is made of a scalar, as of a `jax.Array`.
CONVERSIONS = {
    "float": float,
    "int": int,
    "complex": complex,
    "round": round,
    "round to 1": lambda x: round(x, 1),
    "floor": math.floor,
    "ceil": math.ceil,
    "sqrt": math.sqrt,
    "isclose": lambda x: math.isclose(x, 3),
    "polar": cmath.polar,
    "format": lambda x: f"{x:.3f} {x:8} {x!s:.0}",
    "percent": lambda x: "%.2f %d" % (x, x),  # noqa: UP031
    "float32": np.float32,
}
INTEGERS = {
    "index": operator.index,
    "range": range,
    "item": lambda x: ["a", "b", "c", "d"][x],
    "hex": hex,
    "chr": chr,
    "times": lambda x: "ab" * operator.index(x),
    "shape": lambda x: np.zeros(x).shape,
    "bounds": lambda x: (list(range(9))[x:], np.arange(9)[x], np.arange(9)[:x].tolist()),
}


@pytest.mark.parametrize("value", [3, 2.5, np.int8(3), np.float16(3), np.uint32(3)], ids=repr)
@pytest.mark.parametrize("name", CONVERSIONS)
def test_as_an_array(name, value):
    convert, value = CONVERSIONS[name], jnp.asarray(value)
    got, expected = convert(refs.new_ref(value)), convert(value)
    assert type(got) is type(expected)
    assert got == expected


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8"])
def test_integers(name, dtype):
    convert, value = INTEGERS[name], jnp.asarray(3, dtype)
    ref = refs.new_ref(value)
    assert convert(ref) == convert(value)
    ref[...] -= 1
    assert convert(ref) == convert(value - 1)


def test_complex_and_trunc():
    assert complex(refs.new_ref(1 + 2j)) == 1 + 2j
    assert math.trunc(refs.new_ref(-2.5)) == -2
    assert type(math.trunc(refs.new_ref(7))) is int


def test_without_a_format_it_is_the_handles_text():
    r = refs.new_ref(1.5, name="r")
    assert f"{r}" == str(r) == "Ref(1.5, dtype=float32, name='r')"


def test_round_of_an_array_is_an_array():
    r = refs.new_ref(jnp.array([0.4, 1.6]))
    assert round(r).tolist() == refs.jit(round)(r).tolist() == [0, 2]


@pytest.mark.parametrize("name", ["float", "int", "complex", "index"])
def test_where_it_is_traced(name):
    convert = getattr(builtins, name, operator.index)
    r = refs.new_ref(3)
    for call in (lambda: refs.jit(convert)(r), refs.jit(lambda: convert(r))):
        with pytest.raises(
            (jax.errors.ConcretizationTypeError, jax.errors.TracerIntegerConversionError)
        ):
            call()


def test_a_ref_is_no_index_of_a_ref_or_an_array():
    i, q, x = refs.new_ref(1), refs.new_ref(jnp.arange(3)), jnp.arange(3)
    for call in (lambda i: q[i], lambda i: q[jax.ds(i, 2)], lambda i: q.at[i].add(1)):
        for run in (call, refs.jit(call)):
            with pytest.raises(RefTypeError, match="an index can't be a Ref"):
                run(i)
    for run in (lambda i: x[i], refs.jit(lambda i: x[i])):
        with pytest.raises(IndexError, match="valid indices"):
            run(i)
    assert q[i:].tolist() == x[i:].tolist() == [1, 2]
    with pytest.raises(RefTypeError, match=r"jax\.ds"):
        refs.jit(lambda: q[i:])()


# --- NumPy's arrays -------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 2)])
@pytest.mark.parametrize("dtype", [None, np.float32, np.float64, np.int32])
def test_an_array_of_numpys_that_is_no_copy_meant_to_be_one_is_read_only(shape, dtype):
    r = refs.new_ref(jnp.ones(shape))
    for x in (np.asarray(r, dtype), r.__array__(dtype), r.__array__(dtype, copy=None)):
        assert x.dtype == (dtype or np.float32)
        assert not x.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            x[...] = 5
    for x in (np.array(r, dtype), r.__array__(dtype, copy=True)):
        x[...] = 5
    np.testing.assert_array_equal(r, np.ones(shape))


def test_it_stays_what_was_read():
    r = refs.new_ref(jnp.zeros(3))
    x = np.asarray(r)
    r[...] = 1
    assert x.tolist() == [0, 0, 0]


def test_an_array_of_numpys_is_always_a_copy():
    r = refs.new_ref(jnp.zeros(3))
    with pytest.raises(ValueError, match="copy"):
        r.__array__(copy=False)
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
        with pytest.raises(ValueError, match="without a copy"):
            np.asarray(r, copy=False)
        assert np.asarray(r, copy=True).flags.writeable


# --- 64 bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64", "complex128"])
def test_a_ref_of_64_bits_keeps_its_dtype_where_there_are_32(dtype):
    with jax.enable_x64(True):
        r = refs.new_ref(np.arange(3).astype(dtype))
        value, step = jnp.ones(3, dtype), refs.jit(lambda: refs.addupdate(r, ..., 1))
        step()
    writes = [
        lambda: refs.set(r, ..., 1),
        lambda: refs.set(r, ..., value),
        lambda: refs.set(r, 0, 1),
        lambda: refs.swap(r, ..., 1),
        lambda: r.at[0].add(1),
        lambda: r.at[0].apply(lambda x: x + 1),
        step,
        lambda: refs.fori_loop(0, 2, lambda i, _: refs.set(r, ..., 1), None),
        lambda: refs.vmap(lambda r: refs.set(r, ..., 1))(r),
    ]
    for write in writes:
        with pytest.raises(RefTypeError, match=f"of dtype {dtype}, where 64-bit types are dis"):
            write()
    expected = np.arange(3).astype(dtype) + 1
    for read in (r[...], r[:], np.asarray(r), refs.jit(lambda: r[...])()):
        assert read.dtype == dtype
        np.testing.assert_array_equal(read, expected)
    with jax.enable_x64(True):
        step()
        r[...] += 1
        assert r[0].dtype == dtype
    assert refs.freeze(r).dtype == dtype


def test_pinned_refs():
    if refs._jax.can_pin:
        assert refs.jit(lambda: refs.new_ref(1.0, pin=True)[...])() == 1
        assert refs.grad(lambda x: refs.new_ref(x, pin=True)[...] ** 2)(3.0) == 6
    assert refs.new_ref(1.0, pin=False)[...] == 1
