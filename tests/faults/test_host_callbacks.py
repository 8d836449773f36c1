"""Callbacks over refs that raise: who is told what, and what the refs hold then."""

import gc
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs.errors import CallbackError
from tests.faults.harness import OnPurpose, Switch, held, times, within_limit
from tests.faults.places import (
    LARGE,
    PLACES,
    SMALL,
    at_top,
    in_a_loop,
    in_a_loop_at_top,
    in_jit,
    ref,
    steps,
)

S = jax.ShapeDtypeStruct
places = pytest.mark.parametrize("place", PLACES, ids=lambda f: f.__name__)


@places
@pytest.mark.parametrize("writes_first", [False, True])
@pytest.mark.parametrize("n", [SMALL, LARGE])
def test_what_raises(n, writes_first, place):
    """The caller gets the exception as the cause, the refs what is promised, and it works again."""
    a, b, host = ref("a", n), ref("b"), Switch()

    def callback(x):
        x += writes_first
        host()
        x += not writes_first

    def body(a, b):
        b[...] += 1
        refs.io_callback(callback, None, a)
        b[...] += 1

    step = place(body)
    step(a, b)
    count = steps(place)
    assert (held(a), held(b)) == (count, 2 * count)
    for _ in range(2):
        before = held(a)
        old = held(b) if place is not at_top else held(b) + 1
        host.error = OnPurpose
        with pytest.raises(CallbackError, match=r"io_callback of `callback` at .*on purpose") as c:
            within_limit(lambda: step(a, b))
        assert isinstance(c.value.__cause__, OnPurpose)
        assert held(b) == old
        # A large ref's old value isn't promised; but a value it has.
        assert held(a) == before or (n == LARGE and held(a) == before + writes_first)
        host.error = None
        before, old = held(a), held(b)
        step(a, b)
        assert (held(a), held(b)) == (before + count, old + 2 * count)


@pytest.mark.as_released
@pytest.mark.parametrize("place", [at_top, in_jit, in_a_loop], ids=lambda f: f.__name__)
@pytest.mark.parametrize("n", [SMALL, LARGE])
@pytest.mark.parametrize("keep_old", [None, False, True])
def test_whether_the_old_value_is_kept(keep_old, n, place):
    r = ref(n=n)
    pointer = r.unsafe_buffer_pointer()
    kept = keep_old or (keep_old is None and n == SMALL)

    def callback(x):
        x[: n // 2] += 1
        if x[0] == steps(place):  # the last of them
            raise OnPurpose("here")

    with pytest.raises(CallbackError) as caught:
        place(lambda r: refs.io_callback(callback, None, r, keep_old=keep_old))(r)
    want = np.zeros(n, np.int32)
    want[: n // 2] = 0 if kept else steps(place)
    np.testing.assert_array_equal(r[...], want)
    assert ("ref `r`" in str(caught.value)) == (not kept)
    assert ("keep_old=True" in str(caught.value)) == (not kept)
    if place is at_top:
        assert r.unsafe_buffer_pointer() == pointer


@pytest.mark.parametrize("keep_old", [False, None, True])  # the first is among the quick tests
@pytest.mark.parametrize("n", [SMALL, LARGE])
def test_the_second_of_two_raises(n, keep_old):
    """They have different refs: what one holds, the other doesn't know."""
    a, b, c, host = ref("a", n), ref("b", n), ref("c", n), Switch()

    def first(x, y):
        x += 1
        y += 1

    def second(x, z):
        x += 10
        host()

    @refs.jit
    def step():
        c[...] += 5
        refs.io_callback(first, None, a, b, keep_old=keep_old)
        c[...] += 5
        refs.io_callback(second, None, a, c, keep_old=keep_old)

    are_kept = keep_old or (keep_old is None and n == SMALL)
    for _ in range(2):  # In the first call there are copies anyway, as JAX's Python code runs it.
        x, y, z = map(held, (a, b, c))
        host.error = OnPurpose
        with pytest.raises(CallbackError, match="`second`"):
            step()
        assert held(a) in ((x,) if are_kept else (x, x + 11))
        assert held(b) == y  # the one that failed couldn't save it
        assert held(c) in ((z,) if are_kept else (z, z + 10))
        host.error = None
        step()


@pytest.mark.parametrize("n", [SMALL, LARGE])
def test_rows_of_a_scan_and_views_keep_the_whole(n):
    r = refs.new_ref(jnp.zeros((3, n), jnp.int32), name="r")

    def callback(x, k):
        x += 1
        if k == 1:
            raise OnPurpose("here")

    def rows(_, xs):
        return None, refs.io_callback(callback, None, xs[0], xs[1])

    def parts(k, _):
        refs.io_callback(callback, None, r.at[k, ::2], k)

    for step in (
        lambda: refs.scan(rows, None, (r, jnp.arange(3))),
        lambda: refs.fori_loop(0, 3, parts, None),
    ):
        before = np.asarray(r).copy()
        with pytest.raises(CallbackError):
            refs.jit(step)()
        assert r[...].shape == (3, n)
        if n == SMALL:
            np.testing.assert_array_equal(r[...], before)
        np.testing.assert_array_equal(r[2], before[2])


@places
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_comes_out_as_itself(error, place):
    a, host = ref("a"), Switch()

    def callback(x):
        x += 1
        host()

    step = place(lambda a: refs.io_callback(callback, None, a))
    step(a)
    host.error = error
    with pytest.raises(error, match="on purpose"):
        within_limit(lambda: step(a))
    assert held(a) == steps(place)
    host.error = None
    step(a)
    assert held(a) == 2 * steps(place)


@pytest.mark.parametrize("place", [at_top, in_jit, in_a_loop_at_top], ids=lambda f: f.__name__)
def test_callbacks_without_refs_raise_alike(place):
    def callback(x):
        raise OnPurpose("here")

    with pytest.raises(CallbackError) as caught:
        jax.block_until_ready(place(lambda: refs.io_callback(callback, S((), "int32"), 1) * 0)())
    assert isinstance(caught.value.__cause__, OnPurpose)


def test_many_failures_leave_nothing_behind():
    """No exception, and so no frame and no array of a callback, is kept by anyone."""
    r, alive = ref(), []

    class Big:
        def __init__(self):
            alive.append(1)

        def __del__(self):
            alive.pop()

    def callback(x):
        big = Big()
        raise OnPurpose(str(big))

    step = refs.jit(lambda: refs.io_callback(callback, None, r))
    for _ in range(times(5, 300)):
        with pytest.raises(CallbackError):
            step()
        with pytest.raises(CallbackError):
            in_a_loop_at_top(lambda: refs.io_callback(callback, None, r))()
    gc.collect()
    assert not alive


def test_a_failure_compiles_nothing_anew():
    """The calls after one are the calls before it."""
    r, host, traced = ref(), Switch(), []

    @refs.jit
    def step():
        traced.append(1)
        refs.io_callback(lambda x: host(), None, r)
        r[...] += 1

    step()
    for _ in range(3):
        host.error = OnPurpose
        with pytest.raises(CallbackError):
            step()
        host.error = None
        step()
    assert traced == [1]
    assert held(r) == 4


@pytest.mark.parametrize("place", [at_top, in_jit, in_a_loop_at_top], ids=lambda f: f.__name__)
@pytest.mark.parametrize("keep_old", [False, True])
def test_what_a_traceback_shows_is_not_the_memory(keep_old, place):
    """Debuggers look at the frames of what was raised, when the memory is long used otherwise."""
    r = ref(n=LARGE)

    def callback(x):
        x += 1
        raise OnPurpose("here")

    with pytest.raises(CallbackError) as caught:
        place(lambda r: refs.io_callback(callback, None, r, keep_old=keep_old))(r)
    found, error = [], caught.value
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            # Not what holds a JAX array rightly.
            if frame.f_code is callback.__code__ or "callbacks" in frame.f_code.co_filename:
                found += [x for x in frame.f_locals.values() if isinstance(x, np.ndarray)]
        error = error.__cause__ or error.__context__
    assert not [x for x in found if x.size == LARGE and x.base is not None]


def test_a_callback_whose_own_program_of_jax_fails():
    r = refs.new_ref(jnp.zeros(100_000))

    def inner():
        raise OnPurpose("inside")

    def callback(x):
        x += 1
        kind = jax.ShapeDtypeStruct((), "float32")
        try:
            jax.block_until_ready(jax.jit(lambda: refs.pure_callback(inner, kind))())
        except RuntimeError as error:
            raise ValueError(str(error)[-30:]) from None  # what marks the inner failure

    step = refs.jit(lambda: refs.io_callback(callback, None, r))
    with pytest.raises(CallbackError, match=r"`callback` at .* raised") as caught:
        step()
    assert isinstance(caught.value.__cause__, ValueError)
    assert held(r) == 1


def test_another_callback_that_fails_in_shard_map():
    # The large ref is in the hands of one callback, but the one that fails is JAX's.
    r, switch = refs.new_ref(jnp.zeros(100_000)), Switch()
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def host(x):
        switch()
        return x

    def shard(x):
        return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    mapped = refs.shard_map(
        shard, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"), check_vma=False
    )

    @refs.jit
    def step():
        refs.io_callback(lambda x: np.add(x, 1, out=x), jax.ShapeDtypeStruct(r.shape, r.dtype), r)
        return mapped(jnp.ones(2) * r[0])

    step()
    switch.error = OnPurpose
    with pytest.raises(Exception, match="on purpose"):
        jax.block_until_ready(step())
    assert held(r) == 1
