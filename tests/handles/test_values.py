"""What a ref takes: values that its dtype can hold are converted, others are refused.

The oracle for what is taken is `jax.numpy`'s `.at[...].set`: what it casts without a word, a ref
casts; what it warns about is an error here.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs._indexing.values import convert, fit
from refs.errors import RefTypeError, RefValueError

DTYPES = ["bool", "uint8", "int8", "int32", "uint32", "float16", "bfloat16", "float32", "complex64"]


def dtype_of(name):
    return jnp.dtype(getattr(jnp, name.replace("bool", "bool_")))


ARRAYS = [("jnp", name) for name in DTYPES] + [
    ("np", name) for name in ["bool", "uint8", "int32", "int64", "float32", "float64", "complex64"]
]
# True is 1, and no conversion below rounds these.
PYTHON = [True, 1, 100, 2.5, 1j]


def make(kind, name):
    return (jnp if kind == "jnp" else np).ones(2, dtype_of(name) if kind == "jnp" else name)


def by_jax_numpy(dtype, value):
    """What `.at[...].set` gives, or None where it warns or refuses."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return jnp.zeros(2, dtype).at[...].set(value)
        except (TypeError, ValueError, FutureWarning):
            return None


def eagerly(update, dtype, value):
    ref = refs.new_ref(jnp.zeros(2, dtype))
    update(ref, ..., value)
    return ref


def traced(update, dtype, value):
    ref = refs.new_ref(jnp.zeros(2, dtype))
    refs.jit(lambda: update(ref, ..., value))()
    return ref


def check_like_jax_numpy(run, dtype, value):
    want = by_jax_numpy(dtype, value)
    if want is None:
        for update in (refs.set, refs.swap, refs.addupdate):
            with pytest.raises(RefTypeError, match="can't be held by a ref of dtype"):
                run(update, dtype, value)
    else:
        got = run(refs.set, dtype, value)[...]
        assert got.dtype == want.dtype == dtype
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("value", ARRAYS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_are_taken_as_jax_numpy_takes_them(dtype, value):
    check_like_jax_numpy(eagerly, dtype_of(dtype), make(*value))


@pytest.mark.parametrize("value", PYTHON, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_python_scalars_are_taken_as_jax_numpy_takes_them(dtype, value):
    check_like_jax_numpy(eagerly, dtype_of(dtype), value)


@pytest.mark.parametrize(
    "dtype, value",
    [
        ("float32", jnp.ones(2, jnp.int32)),
        ("float32", True),
        ("int32", 2.5),
        ("int32", jnp.ones(2)),
        ("float32", 1j),
        ("uint8", jnp.ones(2, jnp.int32)),
        ("bfloat16", jnp.ones(2, jnp.float32)),
        ("bool", 1),
    ],
    ids=str,
)
def test_the_same_inside_a_trace(dtype, value):
    check_like_jax_numpy(traced, dtype_of(dtype), value)


def test_a_traced_value_is_taken_as_a_concrete_one():
    ref = refs.new_ref(jnp.zeros(2, jnp.int32))
    write = refs.jit(lambda x: refs.set(ref, ..., x))
    write(3)  # a weakly typed integer
    assert ref[...].tolist() == [3, 3]
    for value in (2.5, 1j, jnp.ones(2)):
        with pytest.raises(RefTypeError):
            write(value)
    assert ref[...].tolist() == [3, 3]


# --- The rules that matter, said one by one ---


def test_ints_into_a_float_ref_are_numbers_not_bits():
    ref = refs.new_ref(jnp.zeros(3))
    ref[0] = 7
    ref[1] = jnp.int32(7)
    refs.jit(lambda: refs.set(ref, 2, jnp.int32(7)))()
    assert ref[...].tolist() == [7.0, 7.0, 7.0]


def test_the_message_names_the_dtypes_and_the_cast():
    ref = refs.new_ref(jnp.zeros(2, jnp.int32), name="n")
    with pytest.raises(
        RefTypeError,
        match=r"^set of ref `n` \(created at test_values\.py:\d+\): a value of dtype float32 can't "
        r"be held by a ref of dtype int32: cast it yourself, `value\.astype\(int32\)`, if the loss "
        r"is meant$",
    ):
        ref[0] = jnp.float32(2.5)


INTEGER_RANGES = [
    ("uint8", 0, 255),
    ("int8", -128, 127),
    ("int32", -(2**31), 2**31 - 1),
    ("uint32", 0, 2**32 - 1),
    ("int4", -8, 7),
    ("uint4", 0, 15),
]


@pytest.mark.parametrize("dtype, least, most", INTEGER_RANGES)
def test_python_integers_out_of_range_are_errors(dtype, least, most):
    dtype = dtype_of(dtype)
    ref = refs.new_ref(jnp.ones(2, dtype))
    for value in (least - 1, most + 1, 2**40, -(2**40), 10**30):
        with pytest.raises(RefValueError, match=f"{value} is out of the range of {dtype}"):
            ref[0] = value
        with pytest.raises(RefValueError, match="out of the range"):
            refs.jit(refs.addupdate, static_argnums=(1, 2))(ref, 0, value)
    assert ref[...].astype(jnp.int32).tolist() == [1, 1]
    ref[0], ref[1] = least, most
    assert [int(x) for x in ref[...]] == [least, most]


def test_big_python_integers_in_a_float_ref_are_rounded():
    ref = refs.new_ref(jnp.zeros(1))
    ref[0] = 2**30 + 1
    assert ref[0] == float(2**30)


def test_python_lists_are_arrays():
    ref = refs.new_ref(jnp.zeros(2))
    ref[...] = [1, 2.5]
    assert ref[...].tolist() == [1.0, 2.5]
    with pytest.raises(RefTypeError):
        refs.set(refs.new_ref(jnp.zeros(2, jnp.int32)), ..., [1, 2.5])


@pytest.mark.parametrize("value", [None, "word", {}, object()], ids=lambda v: type(v).__name__)
def test_what_is_no_array_is_refused(value):
    ref = refs.new_ref(jnp.zeros(2))
    for update in (refs.set, refs.swap, refs.addupdate):
        with pytest.raises((TypeError, ValueError)):
            update(ref, ..., value)
    assert ref[...].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("run", [eagerly, traced])
def test_a_ref_is_no_value(run):
    other = refs.new_ref(jnp.zeros(2), name="other")
    for update in (refs.set, refs.swap, refs.addupdate):
        with pytest.raises(RefTypeError, match="can't hold a Ref"):
            run(update, jnp.float32, other)


# --- Dtypes out of the ordinary ---


@pytest.mark.parametrize("number", [1, 1.0])
def test_a_number_that_equals_one_that_was_taken_is_no_bool(number):
    ref = refs.new_ref(jnp.zeros(3, bool))
    for _ in range(2):
        ref[...] = True
        with pytest.raises(RefTypeError, match="bool"):
            ref[...] = number


def test_bool():
    ref = refs.new_ref(jnp.zeros(3, bool))
    ref[0] = True
    ref.at[1:].set(np.array([False, True]))
    assert ref[...].tolist() == [True, False, True]
    ref[1:] += np.array([True, False])  # or, as in NumPy
    assert ref[...].tolist() == [True, True, True]
    ref.at[[0, 0]].min(False)
    ref.at[2].multiply(False)  # and
    assert ref[...].tolist() == [False, True, False]


@pytest.mark.parametrize("index", [0, ..., [0, 0]], ids=str)
def test_accumulating_into_bools_is_or_as_in_numpy(jit, index):
    ref = refs.new_ref(jnp.zeros(1, bool))
    jit(lambda: refs.addupdate(ref, index, True))()
    jit(lambda: ref.at[index].add(False))()
    assert ref[...].tolist() == [True]


def test_bfloat16():
    ref = refs.new_ref(jnp.ones(3, jnp.bfloat16))
    ref[...] *= 2.5
    refs.addupdate(ref, [0, 0], 1)
    assert ref.dtype == jnp.bfloat16
    assert ref[...].astype(jnp.float32).tolist() == [4.5, 2.5, 2.5]


def test_int4():
    ref = refs.new_ref(jnp.array([1, 2, 3], jnp.int4))
    ref[0] = 7
    ref[1:] += jnp.int4(1)
    refs.jit(lambda: refs.set(ref, ..., ref[::-1]))()
    assert ref.dtype == jnp.int4
    assert ref[...].astype(jnp.int32).tolist() == [4, 3, 7]


def test_uint8_wraps_in_arithmetic_as_numpy_does():
    ref = refs.new_ref(jnp.full(2, 250, jnp.uint8))
    refs.addupdate(ref, ..., 10)
    assert ref[...].tolist() == [4, 4]


@pytest.fixture
def keys():
    return jax.random.split(jax.random.key(0), 3)


def bits(keys):
    return jax.random.key_data(keys).tolist()


@pytest.mark.parametrize("run", [lambda f, r: f(r), lambda f, r: refs.jit(f)(r)])
def test_prng_keys_are_read_and_written(run, keys):
    ref = refs.new_ref(keys, name="keys")
    new = jax.random.key(7)

    def program(ref):
        first = ref[0]
        old = refs.swap(ref, 1, new)
        ref[0] = new
        ref[1:] = ref[:0:-1]
        return first, old

    first, old = run(program, ref)
    assert bits(first) == bits(keys[0])
    assert bits(old) == bits(keys[1])
    assert bits(ref[...]) == [bits(new), bits(keys[2]), bits(new)]


def test_prng_keys_can_be_split_in_place():
    ref = refs.new_ref(jax.random.key(0))

    @refs.jit
    def draw():
        new, use = jax.random.split(ref[...])
        ref[...] = new
        return jax.random.normal(use)

    new, use = jax.random.split(jax.random.key(0))
    assert draw() == jax.random.normal(use)
    assert bits(ref[...]) == bits(new)


def test_keys_and_numbers_do_not_mix(keys):
    key_ref, number_ref = refs.new_ref(keys), refs.new_ref(jnp.zeros(3, jnp.uint32))
    for value in (0, 1.0, jnp.uint32(1)):
        with pytest.raises(RefTypeError):
            key_ref[0] = value
    with pytest.raises(RefTypeError):
        number_ref[0] = keys[0]
    with pytest.raises(TypeError):
        refs.addupdate(key_ref, 0, keys[0])
    assert bits(key_ref[...]) == bits(keys)


def test_the_repr_of_keys_shows_shape_and_dtype(keys):
    text = repr(refs.new_ref(keys, name="keys"))
    assert text.startswith("Ref(")
    assert text.endswith(", name='keys')")
    assert text.count("(") == text.count(")")


# --- A refused value changes nothing ---


@pytest.mark.as_released
@pytest.mark.parametrize("run", [lambda f, r: f(r), lambda f, r: refs.jit(f)(r)])
@pytest.mark.parametrize("value", [2.5, 1j, 2**40, np.ones(3, np.int32)], ids=str)
def test_errors_leave_the_ref_untouched(run, value):
    ref = refs.new_ref(jnp.arange(4))
    pointer = ref.unsafe_buffer_pointer()
    programs = [
        lambda ref: refs.set(ref, slice(0, 2), value),
        lambda ref: refs.swap(ref, slice(0, 2), value),
        lambda ref: refs.addupdate(ref, slice(0, 2), value),
        lambda ref: ref.at[:2].multiply(value),
        lambda ref: ref.at[[0, 0]].max(value),
        lambda ref: ref.at[1:].at[:2].set(value),
    ]
    for program in programs:
        with pytest.raises((RefTypeError, RefValueError)):
            run(program, ref)
    assert ref[...].tolist() == [0, 1, 2, 3]
    assert ref.unsafe_buffer_pointer() == pointer


def test_a_trace_that_fails_late_leaves_the_ref_untouched():
    ref = refs.new_ref(jnp.arange(3))

    @refs.jit
    def program():
        ref[0] = 5
        ref[1] = 2.5

    with pytest.raises(RefTypeError):
        program()
    assert ref[...].tolist() == [0, 1, 2]


# --- The functions themselves ---


def test_convert_keeps_an_array_that_fits():
    x = jnp.arange(3)
    assert convert(x, x.dtype) is x


def test_convert_makes_weak_types_strong():
    weak = jnp.asarray(1.0)
    assert weak.weak_type
    assert not convert(weak, jnp.dtype("float32")).weak_type


@pytest.mark.parametrize("shape", [(), (3,), (1,), (1, 1, 3), (2, 3), (1, 2, 3), (2, 1)], ids=str)
def test_fit_broadcasts_as_an_assignment_does(shape):
    value = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    want = np.zeros((2, 3), np.int32)
    want[...] = value
    np.testing.assert_array_equal(fit(value, (2, 3), jnp.dtype("int32")), want)


@pytest.mark.parametrize("shape", [(2,), (4, 3), (2, 2, 3), (3, 2)], ids=str)
def test_fit_names_both_shapes(shape):
    with pytest.raises(RefValueError) as error:
        fit(np.zeros(shape, np.int32), (2, 3), jnp.dtype("int32"))
    assert str(shape) in str(error.value)
    assert "can't be broadcast to the indexed shape (2, 3)" in str(error.value)


def test_strict_promotion():
    """What has no promotion with the ref's dtype isn't held by it, either."""
    r = refs.new_ref(jnp.zeros(3, jnp.int8), name="r")
    with jax.numpy_dtype_promotion("strict"), pytest.raises(RefTypeError, match="cast it yourself"):
        r[...] = jnp.ones(3, jnp.int32)
    assert not r[...].any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_large_python_integers_are_rounded_as_floats(dtype):
    ref = refs.new_ref(jnp.zeros(2, dtype))
    for value in (2**63, -(10**20), 10**300):
        with np.errstate(over="ignore"):
            want = np.asarray(float(value), ref.dtype)
        ref[0] = value
        refs.jit(refs.set, static_argnums=(1, 2))(ref, 1, value)
        assert ref[0] == ref[1] == want


@pytest.mark.parametrize("write", [refs.set, refs.addupdate])
def test_a_numpy_array_can_be_changed_after_a_write(write):
    r = refs.new_ref(np.zeros(2**22, np.float32))
    for idx in (..., slice(None, None, 2)):
        for _ in range(5):
            r[...] = 0
            value = np.ones(r[idx].shape, np.float32)
            write(r, idx, value)
            value[...] = 5  # as a simulator does with the array that it returned
            np.testing.assert_array_equal(r[idx].max(), 1)
