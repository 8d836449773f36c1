"""get, swap, addupdate, new_ref, empty_ref, freeze, free_ref: what they do to a cell."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs import _jax
from tests.discharge.helpers import agree, mirrored, no_refs_left, primitives

VECTOR = np.arange(6, dtype=np.float32)
VECTOR8 = np.arange(8, dtype=np.float32)
MATRIX = np.arange(12, dtype=np.float32).reshape(3, 4)
INDICES = {
    "whole": ...,
    "integer": 1,
    "negative integer": -1,
    "slice": slice(0, 2),
    "strided": slice(None, None, 2),
    "reversed": slice(None, None, -1),
    "column": (slice(None), 2),
    "element": (1, 3),
    "new axis": None,
    "new axes": (None, slice(1, None), None),
    "integer array": np.array([2, 0]),
    "pairs": (np.array([0, 2]), np.array([3, 1])),
    "arrays apart": (np.array([0, 2]), None, np.array([3, 1])),
    "mask": np.array([True, False, True]),
    "mask of elements": MATRIX % 3 == 0,
    "empty": slice(2, 2),
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES.keys())
def test_read(index):
    agree(lambda r: r[index], lambda a: a[index].copy(), [MATRIX], ways=["passed"])


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES.keys())
def test_overwrite_and_accumulate(index):
    def program(r):
        r[index] = 7
        r[index] += 2

    agree(program, program, [MATRIX], ways=["passed"])


def test_traced_starts():
    def program(r, i):
        r[i] = r[i - 1] + 10
        r[0, i] += 1
        return r[-i]

    agree(program, program, [MATRIX], np.int32(2))


def test_dynamic_slice():
    def program(r, i):
        r[jax.ds(i, 2)] *= 3
        return r[jax.ds(i, 3)]

    def plain(a, i):
        a[i : i + 2] *= 3
        return a[i : i + 3].copy()

    agree(program, plain, [VECTOR], np.int32(2))


def test_accumulation_adds_duplicates_and_python_addition_does_not():
    where = np.array([1, 1, 4])

    def program(r, x):
        refs.addupdate(r, where, x)
        r[where] += x

    def plain(a, x):
        np.add.at(a, where, x)
        a[where] += x

    agree(program, plain, [VECTOR], np.float32([1, 1, 2]))


def test_swap_whose_old_value_is_used_and_not():
    def program(r, x):
        old = refs.swap(r, 1, x)
        refs.swap(r, 2, x)
        return old

    def plain(a, x):
        old = a[1].copy()
        a[1:3] = x
        return old

    agree(program, plain, [VECTOR], np.float32(9))


def test_methods_of_views_and_views_of_views():
    def program(r):
        r.at[0].multiply(2)
        r.at[1].min(4)
        r.at[2].max(9.5)
        r.at[:, 1].apply(jnp.square)
        r.at[1:].at[:, ::2].at[0].set(-1)
        r.at[1:].at[0, 1].add(100)
        return r.at[2].swap(3)

    def plain(a):
        a[0] *= 2
        a[1] = np.minimum(a[1], 4)
        a[2] = np.maximum(a[2], 9.5)
        a[:, 1] **= 2
        a[1, ::2] = -1
        a[1, 1] += 100
        old = a[2].copy()
        a[2] = 3
        return old

    agree(program, plain, [MATRIX])


def test_what_was_read_stays():
    def program(r):
        before = r[...]
        r[...] = 0
        return before

    def plain(a):
        before = a.copy()
        a[...] = 0
        return before

    agree(program, plain, [VECTOR])


def test_out_of_bounds_follows_jax_numpy():
    def program(r, i):
        r[i] = 100  # dropped
        r[jnp.stack([i, i - 8])] += 1  # the first is dropped
        return r[i]  # clamped

    def plain(a, i):
        a[int(i) - 8] += 1
        return a[5].copy()

    agree(program, plain, [VECTOR], np.int32(8))


@pytest.mark.parametrize("dtype", ["int8", "uint32", "bool", "bfloat16", "complex64"])
def test_dtypes(dtype):
    start = jnp.zeros(3, dtype)

    def program(r):
        r[1] = True
        return r[::-1]

    def plain(a):
        a[1] = True
        return a[::-1].copy()

    agree(program, plain, [start])


@pytest.mark.parametrize("shape", [(), (0,), (1, 1), (2, 0, 3)])
def test_shapes(shape):
    def program(r):
        r[...] += 1
        return r[..., None]

    agree(program, lambda a: np.add(a, 1, out=a)[..., None].copy(), [np.ones(shape, np.int32)])


def test_refs_made_inside():
    def program(r):
        mine = refs.new_ref(r[...] * 2, name="mine")
        zeros = refs.empty_ref(jax.ShapeDtypeStruct((3,), jnp.int32))
        mine[0] = -5
        zeros[1] += 4
        r[...] = mine[...]
        return refs.freeze(mine), zeros[...]

    def plain(a):
        a *= 2
        a[0] = -5
        return a.copy(), np.int32([0, 4, 0])

    agree(program, plain, [VECTOR])


def test_a_ref_made_inside_from_a_value_does_not_change_the_value():
    def program(r):
        x = r[...]
        mine = refs.new_ref(x)
        mine[...] += 1
        refs.free_ref(mine)
        return x

    agree(program, lambda a: a.copy(), [VECTOR])


@pytest.mark.parametrize("end", [refs.freeze, refs.free_ref])
def test_use_of_a_ref_that_ended_inside(end):
    def program():
        mine = refs.new_ref(jnp.zeros(2), name="mine")
        end(mine)
        return mine[...]

    with pytest.raises(refs.errors.RefStateError, match=r"use of ref `mine` .*, which was fr"):
        refs.discharge(refs.make_jaxpr(program)())


def test_unused_refs_pass_through():
    pure = agree(lambda r, s: None, lambda a, b: None, [VECTOR, MATRIX])
    assert not pure.eqns


def test_a_read_or_write_of_everything_costs_no_equation():
    def program(r, x):
        r[...] = x
        return r[...]

    pure = refs.discharge(refs.make_jaxpr(program)(refs.new_ref(VECTOR), VECTOR))
    assert not pure.eqns
    assert pure.jaxpr.outvars == [pure.jaxpr.invars[1]] * 2


def test_static_indices_become_slices_and_not_gathers():
    def program(r):
        r[1:3, 2] = 0
        r[0] += 1
        return r[2]

    pure = refs.discharge(refs.make_jaxpr(program)(refs.new_ref(MATRIX)))
    assert not {"gather", "scatter", "scatter-add"} & primitives(pure).keys()


def chained(r):
    part = r.at[1:].at[:, ::2]
    value = jax.ref.get(part.at[0])
    jax.ref.set(part, (Ellipsis, 1), value + 10)
    jax.ref.addupdate(part.at[1], 0, 100.0)
    return value


def reshaped(r):
    flat = r.reshape(12).at[4:]
    value = jax.ref.get(flat)
    jax.ref.addupdate(flat, 0, 100.0)
    jax.ref.set(r.reshape(2, 6).at[1], slice(4, 6), -value[:2])
    return value


def transposed(r):
    columns = r.transpose((1, 0))
    old = jax.ref.swap(columns.at[1], slice(0, 2), jnp.float32([7, 8]))
    jax.ref.addupdate(columns, (3, 2), 0.5)
    return old


def plain_chained(a):
    value = a[1, ::2].copy()
    a[1:, 2] = value + 10
    a[2, 0] += 100
    return value


def plain_reshaped(a):
    flat = a.reshape(12)
    value = flat[4:].copy()
    flat[4] += 100
    flat[10:] = -value[:2]
    return value


def plain_transposed(a):
    old = a[:2, 1].copy()
    a[:2, 1] = 7, 8
    a[2, 3] += 0.5
    return old


@pytest.mark.parametrize(
    "program, plain",
    [(chained, plain_chained), (reshaped, plain_reshaped), (transposed, plain_transposed)],
)
def test_jaxs_own_chains_of_transforms(program, plain):
    native = jax.make_jaxpr(program)(jax.new_ref(MATRIX))  # the ref type is JAX's
    pure = refs.discharge(native)
    no_refs_left(pure)
    expected = MATRIX.copy()
    value, state = jax.core.eval_jaxpr(pure.jaxpr, pure.consts, MATRIX)
    np.testing.assert_array_equal(value, plain(expected))
    np.testing.assert_array_equal(state, expected)


def test_a_transform_that_no_rule_knows():
    native = jax.make_jaxpr(lambda r: jax.ref.get(mirrored(r)))(jax.new_ref(MATRIX))
    with pytest.raises(refs.errors.MissingRuleError, match="MirrorTransform"):
        refs.discharge(native)


def test_gradients_accumulated_into_a_ref():
    def program(r, x):
        _, vjp = jax.vjp(lambda y: jnp.sin(y) * y, x)
        vjp.with_refs(r)(2.0)

    def plain(a, x):
        a += 2 * (np.cos(x) * x + np.sin(x))

    agree(program, plain, [np.float32(1)], np.float32(0.5))


def test_an_empty_ref_of_jax():
    def step(x):
        made = jax.empty_ref(jax.ShapeDtypeStruct((3,), jnp.float32))
        made[...] = x
        made[0] += 1
        return made[...]

    closed = jax.make_jaxpr(step)(VECTOR[:3])
    assert primitives(closed)["empty_ref"] == 1
    pure = refs.discharge(closed)
    no_refs_left(pure)
    [got] = jax.core.eval_jaxpr(pure.jaxpr, pure.consts, VECTOR[:3])
    np.testing.assert_array_equal(got, [1, 1, 2])


@pytest.mark.parametrize("view", ["reshape", "transpose", "bitcast"])
def test_a_part_of_jaxs_own_ref_seen_in_another_form(view):
    """JAX indexes and reshapes a ref in a chain of transforms. Its own discharge refuses some."""

    def program(x):
        ref = jax.new_ref(MATRIX)
        part = ref.at[0:2]
        if view == "reshape":
            part = part.reshape(8)
        elif view == "transpose":
            part = part.transpose((1, 0))
        else:
            part = part.bitcast(jnp.int32)
        x = x.reshape(part.shape).astype(part.dtype)
        part[...] = x
        jax.ref.addupdate(part, ..., x)
        return part[...], ref[...]

    pure = refs.discharge(jax.make_jaxpr(program)(VECTOR8))
    no_refs_left(pure)
    part, whole = jax.core.eval_jaxpr(pure.jaxpr, pure.consts, VECTOR8)
    expected, twice = MATRIX.copy(), 2 * VECTOR8
    if view == "transpose":
        expected[:2] = twice.reshape(4, 2).T
    else:
        twice = twice.astype(np.int32) if view == "bitcast" else twice
        expected[:2] = twice.view(np.float32).reshape(2, 4)
    np.testing.assert_array_equal(whole, expected)
    np.testing.assert_array_equal(part, twice.reshape(part.shape))


def test_the_mark_of_a_ref_that_gradients_are_accumulated_in():
    def program(r):
        _jax.accum_grad_in_ref_p.bind(r)
        r[...] += 1
        return r[0]

    def plain(a):
        a += 1
        return a[0]

    agree(program, plain, [VECTOR])
