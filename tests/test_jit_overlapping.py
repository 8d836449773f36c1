"""Functions that write overlapping sets of refs: after some calls nothing is moved any more."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import refs
from refs import _store

N = 5
SHAPES = [(), (3,), (2, 2), (3,), (4,)]
ENOUGH = 6  # calls, after which each ref stays where it is


def made():
    return [refs.new_ref(jnp.full(s, k, jnp.int32), name=f"r{k}") for k, s in enumerate(SHAPES)]


def add_one(*held):
    for r in held:
        r[...] += 1


@pytest.fixture
def moves(monkeypatch):
    """Counts how often refs are brought together."""
    counted = []
    move = _store._move

    def counting(refs, moves):
        counted.append(len(refs))
        move(refs, moves)

    monkeypatch.setattr(_store, "_move", counting)
    return counted


# --- What is moved --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "groups",
    [
        ([0, 1, 2], [2, 3, 4]),
        ([0, 1], [1, 0]),
        ([0, 1, 2, 3], [2]),
        ([0, 1, 2, 3], [1, 3], [0, 2]),
        ([4, 0, 3, 1], [1, 2], [0, 1, 2, 3, 4], [3, 2]),
    ],
)
def test_after_some_calls_nothing_moves_any_more(groups, moves):
    held = made()
    step = refs.jit(add_one)
    programs = [lambda g=g: step(*[held[k] for k in g]) for g in groups]
    for _ in range(ENOUGH):
        for program in programs:
            program()
    counted = len(moves)
    pointers = [r.unsafe_buffer_pointer() for r in held]
    for _ in range(3):
        for program in programs:
            program()
    assert len(moves) == counted
    assert [r.unsafe_buffer_pointer() for r in held] == pointers
    for k, r in enumerate(held):
        np.testing.assert_array_equal(r[...], k + (ENOUGH + 3) * sum(k in g for g in groups))


def test_one_function_over_many_groups_with_one_ref_in_common(moves):
    """As layers that share a counter: each call is over other refs than the last."""
    layers = [[refs.new_ref(jnp.zeros(3)) for _ in range(3)] for _ in range(4)]
    count = refs.new_ref(0)
    step = refs.jit(lambda layer, count: add_one(*layer, count))
    for _ in range(ENOUGH):
        for layer in layers:
            step(layer, count)
    counted = len(moves)
    for layer in layers:
        step(layer, count)
    assert len(moves) == counted
    assert int(count[...]) == (ENOUGH + 1) * 4


def test_refs_of_one_function_only_stay_together(moves):
    step = refs.jit(add_one)
    for _ in range(3):
        held = made()
        for _ in range(ENOUGH):
            step(*held)
    assert moves == [N] * 3


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
    """Refs in several stores, and a function that writes all of them, in another order."""
    held = made()
    step, part = refs.jit(add_one), refs.jit(add_one)
    for _ in range(ENOUGH):
        part(held[3], held[1])
        step(*held)
    assert len({r._store for r in held}) > 1
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
    """The function knows how the old ones lie; the new ones lie in other ways."""
    held, step = apart()
    new, mixed = made(), made()
    step(*new)
    step(*mixed[:2], *held[2:])
    step(*held)
    for k in range(N):
        np.testing.assert_array_equal(new[k][...], k + 1)
    assert int(mixed[0][...]) == 1
    assert int(held[0][...]) == ENOUGH + 1


def test_memory_is_freed_with_the_ref():
    held, step = apart()
    buffers = [weakref.ref(_store.peek(r)) for r in held]
    ref = weakref.ref(held[3])
    del held[3]
    gc.collect()
    assert ref() is None
    assert [b() is None for b in buffers] == [False, False, False, True, False]
    others = refs.jit(add_one)
    others(*held)
    del held, step
    assert not any(b() for b in buffers)
