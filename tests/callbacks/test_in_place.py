"""Callbacks copy no ref: they are given its memory, and XLA makes no copy before or after."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from refs._jit import running
from tests.inplace.helpers import assert_in_place
from tests.platforms import in_host_memory

pytestmark = [in_host_memory, pytest.mark.as_released]

S = jax.ShapeDtypeStruct


def add_one(x, *_):
    x += 1


def test_the_memory_is_the_refs_own():
    r, seen = refs.new_ref(jnp.zeros(1000, jnp.int32)), []

    def host(x, row=0):
        seen.append(x.ctypes.data - 4 * int(row))
        x += 1

    @refs.jit
    def loop():
        r[0] = 5
        refs.fori_loop(0, 3, lambda i, _: refs.io_callback(host, None, r), None)
        refs.fori_loop(0, 3, lambda i, _: refs.io_callback(host, None, r.at[i], i), None)
        lax.cond(r[0] > 0, lambda: refs.io_callback(host, None, r), lambda: None)

    pointer = r.unsafe_buffer_pointer()
    for _ in range(3):
        refs.io_callback(host, None, r)
        loop()
    refs.io_callback(host, None, r.at[7], 7)
    assert {*seen, r.unsafe_buffer_pointer()} == {pointer}
    assert len(seen) == 25


N = 10_000


def float_refs(n):
    return [refs.new_ref(jnp.ones(N)) for _ in range(n)]


def written_by_the_device_before(r):
    r[...] = r[...] * 2
    refs.io_callback(add_one, None, r)


def written_at_one_place_before(r):
    r[3] = 2.0
    refs.io_callback(add_one, None, r)
    r[4] = 2.0


def read_before_and_used_later(r):
    x = r[3]
    refs.io_callback(add_one, None, r)
    r[4] = x
    return x


def summed_before_and_used_later(r):
    x = r[...].sum()
    refs.io_callback(add_one, None, r)
    return x


def in_a_branch(r):
    lax.cond(r[0] > 0, lambda: refs.io_callback(add_one, None, r), lambda: None)


def in_a_branch_after_reading(r):
    x = r[3]
    lax.cond(x > 0, lambda: refs.io_callback(add_one, None, r), lambda: None)
    r[4] = x + r[5]


def in_a_loop(r):
    def step(k, _):
        r[k] = r[k + 1] * 2
        refs.io_callback(add_one, None, r)

    refs.fori_loop(0, 20, step, None)


def in_a_branch_in_a_loop(r):
    def step(k, _):
        x = r[k]
        lax.cond(x > 0, lambda: refs.io_callback(add_one, None, r.at[k]), lambda: None)
        r[k + 1] = x

    refs.fori_loop(0, 20, step, None)


def in_a_while_loop(r):
    def step(k):
        refs.io_callback(add_one, None, r.at[k])
        return k + 1

    refs.while_loop(lambda k: r[k] < 5, step, 0)


def of_rows_in_a_scan(r):
    refs.scan(lambda _, row: (None, refs.io_callback(add_one, None, row)), None, r)


def of_two_refs(r, q):
    def step(k, _):
        refs.io_callback(add_one, None, r, q)
        q[k] = r[k]
        refs.io_callback(add_one, None, q, r)

    refs.fori_loop(0, 20, step, None)


def in_order(r, q):
    refs.io_callback(add_one, None, r, ordered=True)
    refs.io_callback(add_one, None, q, ordered=True)
    r[0] = q[0]


def with_results(r):
    def step(k, _):
        x = refs.pure_callback(lambda r: r[0], S((), jnp.float32), r)
        r[k] = x

    refs.fori_loop(0, 20, step, None)


PROGRAMS = [
    (written_by_the_device_before, 1),
    (written_at_one_place_before, 1),
    (read_before_and_used_later, 1),
    (summed_before_and_used_later, 1),
    (in_a_branch, 1),
    (in_a_branch_after_reading, 1),
    (in_a_loop, 1),
    (in_a_branch_in_a_loop, 1),
    (in_a_while_loop, 1),
    (of_rows_in_a_scan, 1),
    (of_two_refs, 2),
    (in_order, 2),
    (with_results, 1),
]


@pytest.mark.parametrize(("program", "n"), PROGRAMS, ids=lambda x: getattr(x, "__name__", None))
def test_compiled_programs_copy_nothing(program, n):
    assert_in_place(program, *float_refs(n))


def test_lanes_copy_nothing():
    each = refs.vmap(lambda r: refs.io_callback(add_one, None, r))
    assert_in_place(each, refs.new_ref(jnp.ones((8, N))))
    once = refs.vmap(lambda r: refs.pure_callback(add_one, None, r, vmap_method="expand_dims"))
    assert_in_place(once, refs.new_ref(jnp.ones((8, N))))


def given_its_own_value(r):
    refs.io_callback(lambda r, old: r.fill(old[1]), None, r, r[...])


def whose_old_value_is_returned(r):
    old = r[...]
    refs.io_callback(add_one, None, r)
    return old


@pytest.mark.parametrize("program", [given_its_own_value, whose_old_value_is_returned])
def test_what_has_to_be_copied_is_said(program):
    line = program.__code__.co_firstlineno
    where = f"test_in_place.py:({line + 1}|{line + 2})"  # the reading or the callback
    with pytest.raises(
        AssertionError, match=rf"copies .* as many as ref `r` .* for {where}"
    ) as caught:
        assert_in_place(program, *float_refs(1))
    assert "used again after it has been overwritten" in str(caught.value)


def test_its_memory_has_no_owner_of_jaxlibs():
    """That stands on a stack: whoever keeps it would have later buffers be taken for it."""
    owners = []

    def look(*arrays):
        for x in arrays:
            while isinstance(x, np.ndarray):
                x = x.base
            owners.append(type(x).__module__)

    refs.jit(lambda r, x: refs.io_callback(look, None, r, r.at[1:], x))(
        refs.new_ref(jnp.arange(3.0)), jnp.ones(2)
    )
    assert len(owners) == 3
    assert not any(name.startswith("jaxlib") for name in owners)


def test_a_large_ref_is_copied_where_python_code_of_jax_runs_the_program(monkeypatch):
    """In a first call, and in a first one of another context: else nothing is copied."""
    copied, real = [], running._copies
    monkeypatch.setattr(running, "_copies", lambda arrays: copied.append(1) or real(arrays))

    def host(x):
        x[0] += 1

    r = refs.new_ref(jnp.zeros(100_000))
    step = refs.jit(lambda r: refs.io_callback(host, None, r))
    step(r)
    assert copied
    for _ in range(2):
        for _ in range(3):
            copied.clear()
            step(r)
            assert not copied
        with jax.default_matmul_precision("float32"):
            step(r)
    assert r[0] == 9
