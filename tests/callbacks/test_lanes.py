"""Callbacks in lanes of `refs.vmap`: a call in each, or one for all; against a loop over lanes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from refs.errors import MissingRuleError, RefTypeError, RefValueError
from tests import oracle

S = jax.ShapeDtypeStruct
same = np.testing.assert_array_equal
both = pytest.mark.parametrize(
    "jit", [pytest.param(oracle.as_is, id="top level"), pytest.param(refs.jit, id="jit")]
)
AT_ONCE = ("expand_dims", "broadcast_all")
methods = pytest.mark.parametrize("method", ["sequential", *AT_ONCE])


def numbers(*shape):
    return np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)


def ref(*shape, name="r"):
    return refs.new_ref(jnp.asarray(numbers(*shape)), name=name)


def add_and_sum(x, y):
    """Elementwise, but for the last axis: the same with axes in front."""
    x += y
    x[..., 0] *= 2
    return x.sum(-1)


def by_hand(x, y):
    """What `add_and_sum` does to a lane, lane by lane: the new ones and the sums."""
    news, sums = [], []
    for one, other in zip(x, y, strict=True):
        new = one.copy()
        sums.append(add_and_sum(new, other))
        news.append(new)
    return np.stack(news), np.stack(sums)


# --- A map ----------------------------------------------------------------------------------------


@both
@methods
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_a_mapped_ref(axis, method, jit):
    r, x = ref(3, 3), numbers(3) + 1

    def lane(r, x):
        return refs.pure_callback(add_and_sum, S((), jnp.int32), r, x[None], vmap_method=method)

    out = jit(refs.vmap(lane, in_axes=(axis, 0)))(r, x)
    new, sums = by_hand(np.moveaxis(numbers(3, 3), axis, 0), x)
    same(out, sums)
    same(r[...], np.moveaxis(new, 0, axis))


@both
@methods
def test_what_lanes_share(method, jit):
    r, shared, shapes = ref(2, 3), numbers(3), []

    def host(x, y):
        shapes.append((x.shape, y.shape))
        return add_and_sum(x, y)

    def lane(r):
        return refs.pure_callback(host, S((), jnp.int32), r, shared, vmap_method=method)

    out = jit(refs.vmap(lane))(r)
    new, sums = by_hand(numbers(2, 3), [shared] * 2)
    same(out, sums)
    same(r[...], new)
    want = {
        "sequential": [((3,), (3,))] * 2,
        "expand_dims": [((2, 3), (1, 3))],
        "broadcast_all": [((2, 3), (2, 3))],
    }
    assert shapes == want[method]


@both
@pytest.mark.parametrize(
    "take",
    [lambda r: r.at[0], lambda r: r.at[:, 1], lambda r: r.at[1:], lambda r: r.at[..., ::2]],
    ids=["row", "column", "slice", "steps"],
)
def test_a_part_of_a_mapped_ref_is_the_lanes_part(take, jit):
    # With an axis of the lanes' size among the ref's own, the wrong one would go unnoticed.
    for shape in (3, 3, 3), (2, 4, 5):
        r, want = ref(*shape), numbers(*shape)

        def host(x):
            x += 100

        jit(refs.vmap(lambda r: refs.io_callback(host, None, take(r))))(r)
        for k, lane in enumerate(want):
            held = oracle.Ref(lane)
            take(held).add(100)
            want[k] = held.value
        same(r[...], want)


@both
@pytest.mark.parametrize("method", AT_ONCE)
@pytest.mark.parametrize("index", [0, np.int32(1), np.s_[1:], np.array([0, 1])], ids=str)
def test_parts_are_refused_at_once(index, method, jit):
    r = ref(3, 3, 3)

    def lane(r):
        refs.pure_callback(add_and_sum, None, r.at[index], 1, vmap_method=method)

    with pytest.raises(RefTypeError, match=r"part of a ref in each.*use 'sequential'"):
        jit(refs.vmap(lane))(r)
    same(r[...], numbers(3, 3, 3))


@both
def test_parts_that_differ_one_after_the_other(jit):
    r, order = ref(3, 4), []

    def host(x, i):
        order.append(int(i))
        x -= 50

    jit(refs.vmap(lambda r, i: refs.io_callback(host, None, r.at[i], i)))(r, np.array([2, 0, 3]))
    want = numbers(3, 4)
    want[[0, 1, 2], [2, 0, 3]] -= 50
    same(r[...], want)
    assert order == [2, 0, 3]


@both
def test_without_a_method(jit):
    r = ref(2, 3)
    with pytest.raises(MissingRuleError, match=r"vmap of pure_callback.*vmap_method='sequential'"):
        jit(refs.vmap(lambda r: refs.pure_callback(add_and_sum, None, r, 1)))(r)
    with pytest.raises(RefValueError, match="'expand_dims', 'broadcast_all'"):
        refs.pure_callback(add_and_sum, None, r, 1, vmap_method="at once")


@both
def test_a_shared_ref_is_refused(jit):
    n = ref(name="n")
    with pytest.raises(RefValueError, match=r"ref `n` .* all lanes share it"):
        jit(refs.vmap(lambda x: refs.io_callback(lambda n, x: None, None, n, x)))(numbers(3))
    assert n[...] == 0


@both
def test_refs_that_lanes_make(jit):
    def host(a, b, x):
        b[...] = a + x
        a *= -1

    def lane(x):
        mine = refs.new_ref(x * jnp.ones(2, jnp.int32))
        alike = refs.new_ref(jnp.zeros(2, jnp.int32))
        refs.io_callback(host, None, mine, alike, x)
        return mine[...], alike[...]

    mine, alike = jit(refs.vmap(lane))(numbers(3))
    same(mine, [[0, 0], [-1, -1], [-2, -2]])
    same(alike, [[0, 0], [2, 2], [4, 4]])


@both
def test_lanes_without_refs(jit):
    out = jit(
        refs.vmap(lambda x: refs.io_callback(lambda x: x * 2, S((), jnp.int32), x), in_axes=0)
    )(numbers(3))
    same(out, [0, 2, 4])


# --- Lanes that part ------------------------------------------------------------------------------


@both
@methods
@pytest.mark.parametrize("flags", [(1, 0, 1), (0, 0, 0), (1, 1, 1)], ids=str)
def test_a_branch_that_some_lanes_take(flags, method, jit):
    r, x, called = ref(3, 2), numbers(3) + 1, []

    def host(r, x):
        called.append(r.shape)
        return add_and_sum(r, x)

    def lane(r, flag, x):
        def call():
            out = refs.pure_callback(host, S((), jnp.int32), r, x[None], vmap_method=method)
            r[1] += 1000
            return out

        return lax.cond(flag > 0, call, lambda: -1)

    out = jit(refs.vmap(lane))(r, np.array(flags), x)
    new, sums = by_hand(numbers(3, 2), x)
    new[:, 1] += 1000
    taken = np.array(flags) > 0
    same(out, np.where(taken, sums, -1))
    same(r[...], np.where(taken[:, None], new, numbers(3, 2)))
    if method == "sequential" or not taken.all():
        assert len(called) == taken.sum()
    else:
        assert len(called) == 1


@both
@pytest.mark.parametrize("call", [refs.io_callback, refs.pure_callback])
def test_loops_of_different_lengths(call, jit):
    r, log = refs.new_ref(jnp.zeros((3, 2), jnp.int32)), []
    options = {} if call is refs.io_callback else {"vmap_method": "sequential"}

    def host(x, i, lane):
        log.append((int(lane), int(i)))
        x[1] += i

    def lane(r, n, k):
        def step(i):
            r[0] += 1
            call(host, None, r, i, k, **options)
            return i + 1

        lax.while_loop(lambda i: i < n, step, 0)

    lengths = np.array([2, 0, 3])
    jit(refs.vmap(lane))(r, lengths, numbers(3))
    same(r[...], [[2, 1], [0, 0], [3, 3]])
    assert sorted(log) == [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2)]


@both
@methods
def test_rows_of_a_scan_in_lanes(method, jit):
    """In each lane, a scan over the ref of it: its rows are parts of the whole."""
    r = ref(2, 3, 2)

    def lane(r, x):
        def step(carry, row):
            out = refs.pure_callback(
                add_and_sum, S((), jnp.int32), row, x[None], vmap_method=method
            )
            return carry + out, out

        return lax.scan(step, jnp.int32(0), r)

    total, outs = jit(refs.vmap(lane))(r, numbers(2) + 1)
    new = numbers(2, 3, 2)
    want = np.array([[add_and_sum(new[i, k], i + 1) for k in range(3)] for i in range(2)])
    same(outs, want)
    same(total, want.sum(1))
    same(r[...], new)


@both
@pytest.mark.parametrize("flag", [False, True])
def test_a_branch_that_all_lanes_take(flag, jit):
    r = ref(3, 2)

    def lane(r, flag):
        lax.cond(flag, lambda: refs.io_callback(lambda x: x.sort(), None, r.at[::-1]), lambda: None)

    jit(refs.vmap(lane, in_axes=(0, None)))(r, flag)
    same(r[...], numbers(3, 2)[:, ::-1] if flag else numbers(3, 2))


# --- Maps in maps ---------------------------------------------------------------------------------


@both
@methods
@pytest.mark.parametrize("axes", [(0, 0), (1, 0), (0, 1), (1, 1), (2, 1)], ids=str)
def test_nested_maps(axes, method, jit):
    outer, inner = axes
    shape = (2, 3, 4)
    r = ref(*shape)
    lanes = np.moveaxis(np.moveaxis(numbers(*shape), outer, 0), inner + 1, 1)
    x = numbers(*lanes.shape[:2]) + 1

    def lane(r, x):
        return refs.pure_callback(add_and_sum, S((), jnp.int32), r, x[None], vmap_method=method)

    both_maps = refs.vmap(refs.vmap(lane, in_axes=(inner, 0)), in_axes=(outer, 0))
    out = jit(both_maps)(r, x)
    new = lanes.copy()
    want = [[add_and_sum(new[i, j], x[i, j]) for j in range(x.shape[1])] for i in range(len(x))]
    same(out, want)
    same(r[...], np.moveaxis(np.moveaxis(new, 1, inner + 1), 0, outer))


@both
@methods
def test_an_operand_of_one_of_two_maps(method, jit):
    """One that only the outer map maps, and one that only the inner does."""
    r, x, y = ref(2, 3, 4), numbers(2) + 1, numbers(3) * 10
    shapes = []

    def host(r, x, y):
        shapes.append((r.shape, x.shape, y.shape))
        r += x + y
        return r.sum(-1)

    def lane(r, x, y):
        return refs.pure_callback(host, S((), jnp.int32), r, x[None], y[None], vmap_method=method)

    inner = refs.vmap(lane, in_axes=(0, None, 0))
    out = jit(refs.vmap(inner, in_axes=(0, 0, None)))(r, x, y)
    want = numbers(2, 3, 4) + x[:, None, None] + y[None, :, None]
    same(r[...], want)
    same(out, want.sum(-1))
    if method == "expand_dims":
        assert shapes == [((2, 3, 4), (2, 1, 1), (1, 3, 1))]
    if method == "broadcast_all":
        assert shapes == [((2, 3, 4), (2, 3, 1), (2, 3, 1))]


@both
@methods
def test_a_branch_in_nested_maps(method, jit):
    r, flags = ref(2, 3, 2), np.array([[1, 0, 1], [0, 0, 1]])

    def lane(r, flag):
        def call():
            return refs.pure_callback(
                add_and_sum, S((), jnp.int32), r, flag[None], vmap_method=method
            )

        return lax.cond(flag > 0, call, lambda: -1)

    out = jit(refs.vmap(refs.vmap(lane)))(r, flags)
    new = numbers(2, 3, 2)
    want = [[add_and_sum(new[i, j], 1) if flags[i, j] else -1 for j in range(3)] for i in range(2)]
    same(out, want)
    same(r[...], new)


@both
def test_a_branch_that_whole_rows_of_lanes_take(jit):
    """The mask has one axis of two."""
    r, flags = ref(2, 3, 2), np.array([1, 0])
    for method in ("sequential", *AT_ONCE):
        r[...] = numbers(2, 3, 2)

        def lane(r, flag, method=method):
            def call():
                refs.pure_callback(add_and_sum, S((), "int32"), r, 1, vmap_method=method)

            lax.cond(flag > 0, call, lambda: None)

        jit(refs.vmap(refs.vmap(lane, in_axes=(0, None)), in_axes=(0, 0)))(r, flags)
        new = numbers(2, 3, 2)
        for one in new[0]:
            add_and_sum(one, 1)
        same(r[...], new)


@both
@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("is_outside", [False, True])
def test_a_checkpointed_branch_that_all_lanes_take(flag, is_outside, jit):
    r = ref(3, 2)

    def lane(r, flag):
        def sort():
            refs.io_callback(lambda x: x.sort(), None, r.at[::-1])

        if is_outside:
            refs.checkpoint(lambda flag: lax.cond(flag, sort, lambda: None))(flag)
        else:
            lax.cond(flag, refs.checkpoint(sort), lambda: None)

    jit(refs.vmap(lane, in_axes=(0, None)))(r, flag)
    same(r[...], numbers(3, 2)[:, ::-1] if flag else numbers(3, 2))
