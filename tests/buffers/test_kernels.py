"""Kernels of operations outside of jit: a new index of the same kind compiles nothing."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs._buffers import kernels

pytestmark = pytest.mark.as_released


@pytest.fixture
def compiled(caplog):
    """The number of programs compiled since the last call."""
    with caplog.at_level(logging.WARNING), jax.log_compiles():

        def count():
            n = sum("Finished XLA compilation" in record.getMessage() for record in caplog.records)
            caplog.clear()
            return n

        yield count


OPERATIONS = {
    "read": lambda r, k: r[k],
    "write": lambda r, k: r.__setitem__(k, 1.0),
    "read a part": lambda r, k: r[k : k + 3],
    "add to a part": lambda r, k: r.at[k : k + 3].add(1.0),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_index_of_any_size(compiled, name):
    r = refs.new_ref(jnp.zeros(5003 + len(name)))
    OPERATIONS[name](r, 1234)  # no other test's: a number that one has used is on the device
    assert compiled() > 0
    for k in (2, 4095, 4096, 5000):
        OPERATIONS[name](r, k)
    assert compiled() == 0


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.int64, np.uint8, np.uint64, np.intp])
def test_integers_of_numpy_take_the_short_way(compiled, kind):
    r = refs.new_ref(jnp.arange(37.0))
    r[3], r[-1]
    compiled()
    assert float(r[kind(5)]) == 5
    if np.issubdtype(kind, np.signedinteger):
        assert float(r[kind(-1)]) == 36
    assert float(r[(kind(7),)]) == 7
    with pytest.raises(refs.errors.RefIndexError, match="index 37 is out of bounds"):
        r[kind(37)]
    assert compiled() == 0


def bits(x):
    return np.asarray(x).tobytes()


NUMBERS = [0, 1, -1, 256, 257, 2**40, 0.0, -0.0, 2.0, -3.0, 0.5, 1e9, 1e300, np.inf, np.nan]


@pytest.mark.parametrize("dtype", ["float32", "int32", "int8", "uint8", "bool", "bfloat16"])
@pytest.mark.parametrize("write", ["set", "add"])
def test_a_python_number_is_written_as_the_general_way_writes_it(dtype, write):
    for number in [*NUMBERS, True, False, 1j]:
        short, general = (refs.new_ref(jnp.zeros(3, dtype)) for _ in range(2))
        try:
            getattr(general.at[np.array([1])], write)(number)
        except refs.errors.RefError as error:
            with pytest.raises(type(error)):
                getattr(short.at[1], write)(number)
        else:
            for _ in range(2):  # The second time, it is on the device.
                again = refs.new_ref(jnp.zeros(3, dtype))
                getattr(again.at[1], write)(number)
                assert bits(again) == bits(general), number


FITTING = {
    "float32": [0, 1.0, True, -256, 2**40],
    "int32": [0, -1, False, 257],
    "uint8": [255],
    "bool": [True],
}
OTHERS = {"float32": [1j], "int32": [1.0, 2**40], "uint8": [-1, 256], "bool": [0, 1.0]}


@pytest.mark.parametrize("dtype", FITTING)
def test_python_numbers_take_the_short_way(compiled, dtype):
    r = refs.new_ref(jnp.zeros(41, dtype))
    r[0] = True
    compiled()
    for number in FITTING[dtype]:
        r[0] = number
        assert np.asarray(r)[0] == np.asarray(number, dtype)
    for number in OTHERS[dtype]:
        with pytest.raises(refs.errors.RefError):
            r[0] = number
    assert compiled() == 0


def test_reads_without_jit_are_copies():
    r = refs.new_ref(jnp.zeros(1))
    with jax.disable_jit():
        seen = [r[...], r[0], r[:1], r[:], r[jnp.array([0])]]
    pointers = [x.unsafe_buffer_pointer() for x in seen]
    assert r.unsafe_buffer_pointer() not in pointers
    r[...] = 5
    np.testing.assert_array_equal(np.array([x.sum() for x in seen]), 0)


def test_only_so_many_are_kept(compiled, monkeypatch):
    monkeypatch.setattr(kernels, "_MOST", 2)
    r = refs.new_ref(jnp.zeros(43))
    for n in (3, 4, 5, 3):
        assert r[:n].shape == (n,)
        assert compiled() > 0
    r[:3]
    assert compiled() == 0
