"""Guards what `refs/_jax/` knows of how JAX calls: see `test_jax.py`."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.buffer_callback import buffer_callback

from refs import _jax


def test_a_function_that_failed_at_first_is_made_fast_again():
    fails = [True]

    def host(x):
        if fails[0]:
            raise ZeroDivisionError
        return np.asarray(x)

    shape = jax.ShapeDtypeStruct((), np.float32)
    compiled = jax.jit(lambda x: jax.pure_callback(host, shape, x))
    with pytest.raises(Exception, match="ZeroDivisionError"):
        jax.block_until_ready(compiled(1.0))
    fails[0] = False
    _jax.forget_fast_path(compiled)
    assert compiled(2.0) == 2
    assert compiled._cache_size() == 1


def test_an_array_that_was_deleted_is_recognised():
    gone = jnp.zeros(3)
    gone.delete()
    with pytest.raises(Exception, match="deleted") as caught:
        jax.jit(lambda x: x + 1)(gone)
    assert _jax.is_about_deleted(caught.value)
    assert not _jax.is_about_deleted(ValueError("else"))


def test_what_comes_before_python():
    calls = []
    compiled = jax.jit(lambda x, y: (x + y, y), donate_argnums=0, keep_unused=True)
    told = _jax.before_python(compiled, lambda: calls.append(1))

    def run(x, y=1.0):
        x = jnp.full(3, x)
        np.testing.assert_array_equal(told(x, y)[0], 3 + y)
        assert x.is_deleted()
        return len(calls)

    assert [run(3.0), run(3.0), run(3.0)] == [1, 1, 1]
    assert run(3.0, jnp.float32(2)) == 2
    with jax.default_matmul_precision("float32"):
        assert [run(3.0), run(3.0)] == [3, 3]
    assert run(3.0) == 3
    _jax.forget_fast_path(told)
    assert [run(3.0), run(3.0)] == [4, 4]
    jax.clear_caches()
    assert [run(3.0), run(3.0)] == [5, 5]
    assert told.lower(jnp.zeros(3), 1.0).as_text() == compiled.lower(jnp.zeros(3), 1.0).as_text()
    assert told.__name__ == compiled.__name__
    with jax.disable_jit():
        assert told(1.0, 2.0) == (3.0, 2.0)


def test_the_frame_of_a_callback_is_recognised():
    found = []

    def host(*x):
        frame = sys._getframe()
        while frame is not None:
            found.append(_jax.is_callback_frame(frame))
            frame = frame.f_back
        return np.float32(0)

    shape = jax.ShapeDtypeStruct((), np.float32)
    for call in (
        lambda: jax.pure_callback(host, shape),
        lambda: jax.experimental.io_callback(host, shape),
        lambda: jax.debug.callback(host),
    ):
        found.clear()
        jax.block_until_ready(jax.jit(call)())
        jax.effects_barrier()
        assert any(found)
    found.clear()
    on_buffers = buffer_callback(lambda *x: (host(*x), None)[1], shape, has_side_effect=True)
    jax.block_until_ready(jax.jit(on_buffers)())
    assert any(found)
    assert not _jax.is_callback_frame(sys._getframe())


def test_keys_are_their_bits():
    keys = jax.random.split(jax.random.key(3), 2)
    bits = _jax.unwrap_keys(keys)
    assert bits.dtype == np.uint32
    assert (_jax.wrap_keys(bits, keys.dtype) == keys).all()
    traced = jax.make_jaxpr(lambda k: _jax.wrap_keys(_jax.unwrap_keys(k), keys.dtype))(keys)
    assert traced.out_avals[0].dtype == keys.dtype


def test_at_top_level_and_inside_a_trace():
    assert _jax.trace_state.value is _jax.eval_trace
    seen = []
    jax.make_jaxpr(lambda x: seen.append(_jax.trace_state.value))(1.0)
    assert seen[0] is not _jax.eval_trace
