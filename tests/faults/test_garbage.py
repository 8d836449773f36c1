"""Memory: a ref's buffer goes with the last name for the ref, at once and without a collection."""

import gc
import itertools
import logging
import os
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from tests.faults.harness import add_one, held, times

SIZES = itertools.count(10_007, 2)


class Watched:
    """A new ref, and how one sees that it and its buffer are gone."""

    def __init__(self, size=None):
        # Arrays of this size are the ref's own: no other test has any.
        self.size = next(SIZES) if size is None else size
        self.ref = refs.new_ref(np.zeros(self.size, np.float32), name="watched")
        self.handle = weakref.ref(self.ref)

    def drop(self):
        """Drops our name; there must have been no other."""
        assert self.alive() == 1  # neither a copy that was forgotten
        self.ref = None
        self.is_gone()

    def is_gone(self):
        assert self.handle() is None
        assert self.alive() == 0

    def alive(self):
        return alive(self.size)


def alive(size):
    """How many arrays of so many elements there are."""
    return sum(x.size == size for x in jax.live_arrays())


@pytest.fixture(autouse=True)
def _no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def fails(program, error):
    """`pytest.raises`, which makes cycles of its own."""
    try:
        program()
    except error:
        return
    pytest.fail("nothing was raised")


# --- One ref --------------------------------------------------------------------------------------


def test_never_used():
    Watched().drop()


USES = {
    "getitem": lambda r: r[...],
    "part": lambda r: r[3],
    "setitem": lambda r: r.__setitem__(3, 1),
    "iadd": lambda r: r.__setitem__(..., r[...] + 1),
    "masked": lambda r: r.__setitem__(np.arange(r.size) % 2 == 0, 1),
    "addupdate": lambda r: refs.addupdate(r, 0, 1),
    "swap": lambda r: refs.swap(r, ..., 2),
    "view": lambda r: r.at[2:].at[0].add(1),
    "apply": lambda r: r.at[...].apply(jnp.sin),
    "np.asarray": np.asarray,
    "repr": repr,
    "hash": hash,
    "error": lambda r: fails(lambda: r[r.size], IndexError),
}


@pytest.mark.parametrize("use", USES)
def test_used_eagerly(use):
    watched = Watched()
    for _ in range(3):
        USES[use](watched.ref)
    watched.drop()


def passing(step, how):
    return lambda r: how(step, r)


def summed(r):
    def body(k, total):
        r.at[k].add(1.0)
        return total + r[k]

    return jax.lax.fori_loop(0, 3, body, 0.0)


def programs():
    return {
        "reads": refs.jit(lambda r: jnp.sum(r[...])),
        "writes": refs.jit(lambda r: r.at[...].add(1)),
        "idle": refs.jit(lambda r: None),
        "returns": refs.jit(lambda r: (r.at[0].add(1), r)[1]),
        "callback": refs.jit(
            lambda r: r.at[...].set(
                jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(r.shape, r.dtype), r[...] + 1)
            )
        ),
        "keyword": passing(refs.jit(lambda *, r: r.at[0].add(1)), lambda f, r: f(r=r)),
        "twice": passing(refs.jit(lambda r, q: r.at[0].add(q[0])), lambda f, r: f(r, r)),
        "view": passing(refs.jit(lambda v: v.add(1)), lambda f, r: f(r.at[2:5])),
        "tree": passing(refs.jit(lambda t: t["r"][0].at[0].add(1)), lambda f, r: f({"r": [r]})),
        "jax.jit": jax.jit(lambda r: r.__setitem__(0, 1)),
        "vmap": refs.vmap(lambda r: r[...] + 1),
        "grad": refs.grad(lambda r: jnp.sum(r[...])),
        "grad, jax.jit": refs.grad(jax.jit(lambda r: r[0] * 2)),
        "grad, loop": refs.grad(summed),
        "grad, branch": refs.grad(lambda r: jax.lax.cond(r[0] > 0, lambda: r[0] * 2, lambda: r[1])),
        "jvp": lambda r: refs.jvp(summed, (r,), (np.ones(r.shape, r.dtype),)),
    }


@pytest.mark.parametrize("name", programs())
def test_passed_to_a_step(name):
    watched, step = Watched(), programs()[name]
    for _ in range(4):
        step(watched.ref)
    watched.drop()
    # The function lives, and takes another ref of that type.
    again = Watched(watched.size)
    step(again.ref)
    again.drop()


def test_passed_with_refs_that_live_on():
    watched, others = Watched(), [refs.new_ref(jnp.zeros(3)) for _ in range(3)]
    step = refs.jit(lambda held, r: add_one(*held, r))
    for _ in range(3):
        step(others, watched.ref)
    watched.drop()
    next_one = Watched()
    step(others, next_one.ref)
    next_one.drop()


def test_each_of_several_refs_goes_on_its_own():
    step = refs.jit(lambda held: add_one(*held))
    all_ = [Watched() for _ in range(4)]
    for _ in range(3):
        step([w.ref for w in all_])
    for k, watched in enumerate(all_):
        watched.drop()
        assert all(w.alive() for w in all_[k + 1 :])


def test_what_a_step_replaces():
    """A step that can't be in place still frees what the ref held before."""
    watched = Watched()
    step = refs.jit(lambda x: watched.ref.at[...].set(x[::-1]))
    x = jnp.zeros(watched.size)
    for _ in range(3):
        step(x)
    assert watched.alive() == 2  # x, and what the ref holds
    del x
    assert watched.alive() == 1


def test_a_step_compiled_ahead():
    watched = Watched()
    step = refs.jit(lambda r: r.at[0].add(1))
    lowered = step.lower(watched.ref)
    compiled = lowered.compile()
    compiled(watched.ref)
    watched.ref = None
    del lowered, compiled  # they may keep what they were made for, until they go
    gc.collect()
    watched.is_gone()


# --- Failures -------------------------------------------------------------------------------------


def test_after_a_trace_that_raises():
    watched = Watched()

    @refs.jit
    def step(r):
        r[0] = 1
        raise ZeroDivisionError

    for _ in range(3):
        fails(lambda: step(watched.ref), ZeroDivisionError)
    gc.collect()  # JAX's traces are full of cycles
    watched.drop()


@pytest.fixture
def _no_logging():
    """JAX logs a callback's error, and pytest keeps what is logged: frames, and what is in them."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("_no_logging")
def test_after_callbacks_that_raise():
    watched, fail = Watched(), [False]

    def host(x):
        if fail[0]:
            raise ZeroDivisionError
        return np.asarray(x)

    @refs.jit
    def step(r):
        r[...] = jax.pure_callback(host, jax.ShapeDtypeStruct(r.shape, r.dtype), r[...])

    step(watched.ref)
    fail[0] = True
    for _ in range(times(20, 1000)):
        fails(lambda: step(watched.ref), Exception)
    assert watched.alive() == 1
    watched.drop()


@pytest.mark.usefixtures("_no_logging")
def test_after_callbacks_on_a_ref_that_raise():
    watched = Watched()

    def host(x):
        raise ZeroDivisionError

    @refs.jit
    def step(r):
        r[0] = 1
        refs.io_callback(host, None, r)

    for _ in range(3):
        fails(lambda: step(watched.ref), refs.errors.CallbackError)
    watched.drop()


# --- Closed over, and made inside -----------------------------------------------------------------


@pytest.mark.parametrize("jit", [jax.jit, refs.jit], ids=["jax.jit", "refs.jit"])
def test_closed_over_by_a_function_that_is_dropped(jit):
    """JAX's own, which holds an array, is the control: both may need a collection."""
    size = next(SIZES)

    def make(held):
        def fun(x):
            return x + held[0]

        step = jit(fun)
        for _ in range(3):
            step(1.0)
        return weakref.ref(fun), weakref.ref(held)

    x = jnp.zeros(size)
    function, handle = make(x if jit is jax.jit else refs.new_ref(x))
    del x
    gc.collect()
    assert function() is None
    assert handle() is None
    assert alive(size) == 0


def test_a_function_that_is_dropped_with_refs_that_live():
    r = refs.new_ref(jnp.zeros(3))

    def fun(x):
        r[...] += x

    step, function = refs.jit(fun), weakref.ref(fun)
    for x in 1.0, 1, jnp.ones(3):
        step(x)
    del fun, step
    gc.collect()
    assert function() is None
    assert held(r) == 3


def test_written_and_closed_over_by_a_function_that_is_dropped():
    watched = Watched()

    def make(r):
        step = refs.jit(lambda: r.at[...].add(1))
        for _ in range(3):
            step()

    make(watched.ref)
    watched.ref = None
    gc.collect()
    watched.is_gone()


def test_made_and_returned_by_a_step():
    make = refs.jit(lambda x: (refs.new_ref(x, name="made"), refs.new_ref(x + 1)))
    for _ in range(3):
        size = next(SIZES)
        first, second = make(np.zeros(size))
        refs.jit(lambda r: r.at[0].add(1))(first)
        handles = weakref.ref(first), weakref.ref(second)
        assert alive(size) == 2
        del first
        assert handles[0]() is None
        assert alive(size) == 1
        del second
        assert handles[1]() is None
        assert alive(size) == 0


def test_made_within_a_step():
    size = next(SIZES)

    @refs.jit
    def step(x):
        r = refs.new_ref(x)
        r[0] = 1
        return jnp.sum(r[...])

    for _ in range(3):
        step(np.zeros(size))
    assert alive(size) == 0


# --- The ends -------------------------------------------------------------------------------------


def test_frozen_and_freed():
    watched = Watched()
    value = refs.freeze(watched.ref)
    assert watched.alive() == 1
    del value
    assert watched.alive() == 0  # though there still is the handle
    freed = Watched()
    refs.jit(lambda r: r.at[0].add(1))(freed.ref)
    refs.free_ref(freed.ref)
    assert freed.alive() == 0


# --- Many calls -----------------------------------------------------------------------------------


def resident():
    """The memory of this process in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def callback(r, q):
    x = jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(r.shape, r.dtype), r[...])
    q.at[...].add(x + 1)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    "step", [refs.jit(add_one), refs.jit(callback), add_one], ids=["step", "callback", "eager"]
)
def test_many_calls_with_new_refs(step):
    """Ten thousand floats each: a leak of every tenth would be seen."""
    kept = refs.new_ref(jnp.zeros(10_000))

    def calls(n):
        for _ in range(n):
            step(refs.new_ref(jnp.zeros(10_000)), kept)

    n = times(700, 33_000)
    calls(300)
    arrays, memory = len(jax.live_arrays()), resident()
    calls(n)
    assert len(jax.live_arrays()) == arrays
    assert resident() - memory < max(n * 4_000, 8_000_000)
    assert held(kept) == n + 300
