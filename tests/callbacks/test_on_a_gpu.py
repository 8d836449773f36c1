"""Callbacks with `device="gpu"`, where there is a GPU: on the memory of the ref itself."""

import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs.errors import CallbackError
from tests.platforms import ON_CPU

pytestmark = pytest.mark.skipif(ON_CPU, reason="needs a GPU")


@pytest.mark.as_released
def test_cupy_has_the_memory_of_the_ref():
    cupy = pytest.importorskip("cupy")
    r, seen = refs.new_ref(jnp.arange(8.0)), set()
    address = r.unsafe_buffer_pointer()

    def host(x, k):
        with cupy.cuda.ExternalStream(x.stream):
            array = cupy.asarray(x)
            seen.add(array.data.ptr)
            array += 1
            array[0] = 10

    @refs.jit
    def step(k):
        r[1] = 5.0
        refs.io_callback(host, None, r, k, device="gpu")
        return r[...] * 1

    want = np.array([10, 6, 3, 4, 5, 6, 7, 8])
    np.testing.assert_array_equal(step(jnp.int32(1)), want)
    want[2:] += 1
    np.testing.assert_array_equal(step(jnp.int32(1)), want)

    def loop():
        refs.fori_loop(0, 3, lambda k, _: refs.io_callback(host, None, r, k, device="gpu"), None)

    refs.jit(loop)()
    want[1:] += 3
    np.testing.assert_array_equal(r, want)
    assert seen == {address} == {r.unsafe_buffer_pointer()}


@pytest.mark.as_released
def test_torch_has_the_memory_of_the_ref():
    torch = pytest.importorskip("torch")
    r, seen = refs.new_ref(jnp.arange(8.0)), set()

    def host(x):
        with torch.cuda.stream(torch.cuda.ExternalStream(x.stream)):
            for tensor in (torch.as_tensor(x, device="cuda"), torch.from_dlpack(x)):
                seen.add(tensor.data_ptr())
                tensor.add_(1)

    refs.jit(lambda: refs.io_callback(host, None, r, device="gpu"))()
    np.testing.assert_array_equal(r, np.arange(8.0) + 2)
    assert seen == {r.unsafe_buffer_pointer()}


def test_a_callback_that_raises_leaves_the_old_value():
    r = refs.new_ref(jnp.arange(8.0))

    def bad(x):
        raise ValueError("on purpose")

    with pytest.raises(CallbackError, match="on purpose"):
        refs.jit(lambda: refs.io_callback(bad, None, r, device="gpu"))()
    np.testing.assert_array_equal(r, np.arange(8.0))
