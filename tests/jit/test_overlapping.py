"""Functions that write overlapping sets of refs."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import refs
from refs._buffers.waiting import current_buffer

N = 5
SHAPES = [(), (3,), (2, 2), (3,), (4,)]


def made():
    return [refs.new_ref(jnp.full(s, k, jnp.int32), name=f"r{k}") for k, s in enumerate(SHAPES)]


def add_one(*held):
    for r in held:
        r[...] += 1


# --- Generated programs ---------------------------------------------------------------------------

GROUPS = st.lists(st.integers(0, N - 1), min_size=1, max_size=N, unique=True)


@st.composite
def calls(draw):
    """Groups of refs that are written, of which some functions also read one more."""
    groups = draw(st.lists(st.tuples(GROUPS, st.integers(0, N - 1)), min_size=2, max_size=4))
    return groups, draw(st.lists(st.integers(0, len(groups)), min_size=10, max_size=40))


@given(calls())
def test_in_any_order(drawn):
    groups, order = drawn
    held, expected = made(), [np.full(s, k) for k, s in enumerate(SHAPES)]

    def over(written, other, x):
        total = held[other][...].sum()
        for r in written:
            r[...] += x + total
        return total

    def over_numpy(written, other, x):
        total = expected[other].sum()
        for k in written:
            expected[k] += x + total
        return total

    step = refs.jit(over, static_argnums=1)
    for number, choice in enumerate(order):
        if choice == len(groups):
            held[number % N].at[...].multiply(-1)
            expected[number % N] *= -1
            continue
        group, other = groups[choice]
        x = number % 3
        with np.errstate(over="ignore"):
            right = np.int32(over_numpy(group, other, x))
            expected = [e.astype(np.int32) for e in expected]
        assert int(step([held[k] for k in group], other, x)) == right
    for r, right in zip(held, expected, strict=True):
        np.testing.assert_array_equal(r[...], right)


# --- What else may happen -------------------------------------------------------------------------


def apart():
    """Refs, and a function that writes all of them, where another has written some."""
    held = made()
    step, part = refs.jit(add_one), refs.jit(add_one)
    for _ in range(2):
        part(held[3], held[1])
        step(*held)
    return held, step


def test_a_failing_call_leaves_the_old_values():
    held, _ = apart()

    def fail(x):
        raise ValueError("on purpose")

    @refs.jit
    def step(*held):
        add_one(*held)
        jax.debug.callback(fail, held[0][...])

    before = [np.array(r[...]) for r in held]
    for _ in range(2):
        with pytest.raises(Exception, match="on purpose"):
            step(*held)
    for r, old in zip(held, before, strict=True):
        np.testing.assert_array_equal(r[...], old)


def test_an_ended_ref_is_refused_and_the_others_keep_their_values():
    held, step = apart()
    refs.free_ref(held[2])
    before = [np.array(r[...]) for r in held if r is not held[2]]
    with pytest.raises(refs.errors.RefStateError, match=r"`r2`.*freed"):
        step(*held)
    after = [np.array(r[...]) for r in held if r is not held[2]]
    assert all(map(np.array_equal, before, after))


def test_one_ref_in_two_places():
    held, step = apart()
    before = int(held[0][...])
    step(held[0], *held[1:4], held[0])
    assert int(held[0][...]) == before + 2


def test_new_refs_in_place_of_the_others():
    held, step = apart()
    new, mixed = made(), made()
    step(*new)
    step(*mixed[:2], *held[2:])
    step(*held)
    for k in range(N):
        np.testing.assert_array_equal(new[k][...], k + 1)
    assert int(mixed[0][...]) == 1
    assert int(held[0][...]) == 3


def test_memory_is_freed_with_the_ref():
    held, step = apart()
    buffers = [weakref.ref(current_buffer(r)) for r in held]
    ref = weakref.ref(held[3])
    del held[3]
    gc.collect()
    assert ref() is None
    assert [b() is None for b in buffers] == [False, False, False, True, False]
    others = refs.jit(add_one)
    others(*held)
    del held, step
    assert not any(b() for b in buffers)
