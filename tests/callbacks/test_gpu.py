"""Callbacks where memory isn't the host's: staged, and on a GPU as far as one gets without one."""

from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs import _jax
from refs._callbacks import eager
from refs._callbacks.failure import failure_of
from refs._callbacks.gpu import on_device
from refs._callbacks.plan import Plan
from refs._callbacks.primitives import ref_callback_p
from refs.errors import CallbackError


@pytest.fixture
def staged():
    """As on a platform for which jaxlib has no handler."""
    with mock.patch.dict(_jax.callbacks._TARGETS, clear=True):
        yield


def add(x, k):
    x[k] += 1
    return x.sum()


TOTAL = jax.ShapeDtypeStruct((), "float32")


@pytest.mark.usefixtures("staged")
def test_staged():
    r = refs.new_ref(jnp.zeros(4))

    @refs.jit
    def step(k):
        before = r[k]
        r[0] += 10
        total = refs.io_callback(add, TOTAL, r, k)
        return before, total, r[k]

    assert list(map(float, step(1))) == [0, 11, 1]
    assert list(map(float, step(1))) == [1, 22, 2]
    np.testing.assert_array_equal(r, [20, 2, 0, 0])


@pytest.mark.usefixtures("staged")
def test_staged_in_a_loop_and_on_a_part():
    r = refs.new_ref(jnp.zeros((3, 4)))
    refs.jit(
        lambda: refs.fori_loop(0, 3, lambda k, _: refs.io_callback(add, TOTAL, r.at[k], k), 0.0)
    )()
    np.testing.assert_array_equal(r, np.eye(3, 4))


@pytest.mark.usefixtures("staged")
def test_staged_in_lanes(jit):
    r = refs.new_ref(jnp.zeros((3, 4)))
    totals = jit(refs.vmap(lambda r, k: refs.io_callback(add, TOTAL, r, k)))(r, jnp.arange(3))
    np.testing.assert_array_equal(r, np.eye(3, 4))
    np.testing.assert_array_equal(totals, np.ones(3))


@pytest.mark.usefixtures("staged")
def test_staged_failure():
    r = refs.new_ref(jnp.zeros(3))

    def fails(x):
        x += 1
        raise ValueError("on purpose")

    with pytest.raises(CallbackError, match=r"on purpose.*keep their old values") as caught:
        refs.jit(lambda: refs.io_callback(fails, None, r))()
    assert isinstance(caught.value.__cause__, ValueError)
    np.testing.assert_array_equal(r, np.zeros(3))


def test_at_top_level_with_memory_elsewhere():
    r, s = refs.new_ref(jnp.zeros(3)), jax.new_ref(jnp.zeros(3))

    def fails(x):
        x += 1
        raise ValueError("on purpose")

    def both(x, y):
        x += 1
        y += 2

    with mock.patch.object(eager, "_is_on_host", return_value=False):
        refs.io_callback(both, None, r, s)
        with pytest.raises(CallbackError):
            refs.io_callback(fails, None, r)
        assert refs.io_callback(add, TOTAL, r, 2) == 4
    np.testing.assert_array_equal(r, [1, 1, 2])
    np.testing.assert_array_equal(s[...], [2, 2, 2])


# --- On a GPU -------------------------------------------------------------------------------------


def nothing(*_):
    pass


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_lowered_for_a_gpu(platform):
    def step(r, k):
        refs.io_callback(nothing, None, r, k, device="gpu")

    pure = jax.jit(refs.functionalize(step))
    text = pure.trace(jnp.zeros(4), 1).lower(lowering_platforms=(platform,)).as_text()
    [call] = [line for line in text.splitlines() if "custom_call" in line]
    assert "@xla_buffer_python_gpu_callback" in call
    assert "has_side_effect = true" in call
    assert "output_tuple_indices = [0]" in text or "output_operand_alias" in call
    assert "operand_index = 0" in text


class Buffer:
    """What jaxlib gives a handler on a GPU."""

    def __init__(self, pointer, shape):
        self.pointer, self.shape = pointer, shape

    @property
    def __cuda_array_interface__(self):
        data = {"data": (self.pointer, False), "shape": self.shape, "typestr": "<f4", "version": 2}
        return {**data, "strides": None}

    def __dlpack__(self, **options):
        return ("capsule", self.pointer, options)

    def __dlpack_device__(self):
        return (2, 0)


def test_what_a_callback_on_a_gpu_is_given():
    seen = []

    def callback(r, *, x):
        seen.append((r, x))

    def step(r, x):
        refs.io_callback(callback, None, r, x=x, device="gpu")

    r = refs.new_ref(jnp.zeros(4))
    jaxpr = refs.make_jaxpr(step)(r, jnp.zeros((2, 3)))
    [eqn] = [e for e in jaxpr.jaxpr.eqns if e.primitive is ref_callback_p]
    plan = Plan(eqn.params["spec"], 1, False, ((0, 0),))
    types = [jax.ShapeDtypeStruct((4,), "float32"), jax.ShapeDtypeStruct((2, 3), "float32")]
    # One value more goes through the call.
    handler = on_device(plan, types, n_kept=1)
    buffers = [
        Buffer(10, (4,)),
        Buffer(20, ()),
        Buffer(30, (2, 3)),
        Buffer(10, (4,)),
        Buffer(20, ()),
    ]
    assert handler(SimpleNamespace(stream=77), *buffers) == ()

    [(r, x)] = seen
    assert (r.shape, x.shape, r.dtype) == ((4,), (2, 3), np.dtype("float32"))
    assert r.__cuda_array_interface__["data"] == (10, False)
    assert x.__cuda_array_interface__["data"] == (30, True)
    assert r.__cuda_array_interface__["stream"] == x.stream == 77
    assert r.__dlpack__(stream=5) == ("capsule", 10, {"stream": 5})
    assert r.__dlpack_device__() == (2, 0)
    assert repr(x) == "DeviceArray(shape=(2, 3), dtype=float32)"


def test_what_a_callback_on_a_gpu_raises():
    def step(r):
        refs.io_callback(lambda r: 1 / 0, None, r, device="gpu")

    r = refs.new_ref(jnp.zeros(4))
    [eqn] = [e for e in refs.make_jaxpr(step)(r).jaxpr.eqns if e.primitive is ref_callback_p]
    plan = Plan(eqn.params["spec"], 1, False, ((0, 0),))
    handler = on_device(plan, [jax.ShapeDtypeStruct((4,), "float32")], n_kept=0)
    with pytest.raises(RuntimeError, match="division by zero") as caught:
        handler(SimpleNamespace(stream=1), Buffer(10, (4,)), Buffer(10, (4,)))
    failed = failure_of(caught.value)
    assert isinstance(failed.error, ZeroDivisionError)
    assert not failed.held  # The memory isn't the host's to copy.
