"""`refs.vmap`: mapped refs, shared refs, and what lanes may do to them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from refs.errors import RefValueError

X = np.array([0, 2, 2], np.int32)

same = np.testing.assert_array_equal


@pytest.fixture
def counts():
    return refs.new_ref(jnp.zeros(4, jnp.int32), name="counts")


@pytest.fixture
def table():
    return refs.new_ref(jnp.arange(6.0).reshape(2, 3), name="table")


# --- Mapped refs ---


@pytest.mark.parametrize("axis", [1, -1])
def test_a_mapped_ref_gives_each_lane_its_slice(jit, axis, table):
    def lane(r, x):
        r[0] = r[1] * x
        return r[...]

    out = jit(refs.vmap(lane, in_axes=(axis, 0), out_axes=1))(table, X)
    same(out, [[0, 8, 10], [3, 4, 5]])
    same(table[...], out)


def test_refs_in_trees_and_by_keyword(table, counts):
    def lane(state, *, row):
        state["a"][...] += row[0]
        state["b"][...] = 7

    refs.vmap(lane, in_axes=({"a": 0, "b": None},))(
        {"a": counts, "b": table}, row=jnp.ones((4, 1), jnp.int32)
    )
    same(counts[...], np.ones(4))
    same(table[...], 7 * np.ones((2, 3)))


def test_the_same_mapped_ref_twice(table):
    def lane(a, b):
        a[0] = 10
        return b[0]

    same(refs.vmap(lane)(table, table), [10, 10])


# --- Shared refs ---


def test_every_lane_counts(jit, n):
    def lane(x):
        n[...] += 1
        return x

    jit(refs.vmap(lane))(X)
    assert n[...] == 3
    jit(refs.vmap(lambda: lane(0), axis_size=5))()
    assert n[...] == 8


@pytest.mark.parametrize(
    "add",
    [
        lambda r, x: r.__setitem__(x, r[x] + 1),
        lambda r, x: refs.addupdate(r, x, 1),
        lambda r, x: r.at[x].add(1),
        lambda r, x: r.at[jnp.array([x])].add(jnp.array([1])),
        lambda r, x: r.at[jax.ds(x, 1)].add(1),
        lambda r, x: r.at[jax.ds(x, 2)].at[0].add(1),
        lambda r, x: r.at[::-1].add(jnp.zeros(4, jnp.int32).at[3 - x].set(1)),
        lambda r, x: r.__setitem__(np.s_[None, ::-1], r[None, ::-1] + (3 - jnp.arange(4) == x)),
    ],
    ids=["+=", "addupdate", "at", "array", "slice", "view", "reversed", "reversed +="],
)
def test_contributions_arrive_wherever_they_go(jit, add, counts):
    jit(refs.vmap(lambda x: add(counts, x)))(X)
    same(counts[...], [1, 0, 2, 0])


def test_slices_that_start_elsewhere_in_each_lane(jit):
    grid = refs.new_ref(jnp.zeros((4, 3, 4)))

    def lane(x, y):
        grid.at[jax.ds(x, 2), 1:, y].add(jnp.arange(4.0).reshape(2, 2))

    xs, ys = np.array([0, 1, 2, 1]), np.array([3, 0, 0, 0])
    jit(refs.vmap(lane))(xs, ys)
    want = np.zeros((4, 3, 4))
    for x, y in zip(xs, ys, strict=True):
        want[x : x + 2, 1:, y] += np.arange(4.0).reshape(2, 2)
    same(grid[...], want)


def test_shared_refs_may_be_read_and_set_alike(counts, n):
    def lane(x):
        n[...] = 5
        n[...] += 1
        return counts[x] + n[...]

    same(refs.vmap(lane)(X), [6, 6, 6])
    assert n[...] == 6


@pytest.mark.parametrize(
    "body",
    [
        lambda n, x: n.set(x),
        lambda n, x: (n.at[...].add(1), n[...])[1],
        lambda n, x: (n[...], n.set(1))[0],
        lambda n, x: n.set(n[...] * 2 + 1),
        lambda n, x: lax.cond(x > 1, lambda: n.set(1), lambda: None),
        lambda n, x: lax.scan(lambda c, _: (c + x, n.set(c)), 0, None, length=2)[0],
        lambda n, x: lax.while_loop(lambda c: c < x, lambda c: (n.set(1), c + 1)[1], 0),
        lambda n, x: (n.at[...].multiply(2), n.at[...].max(x), None)[2],
        lambda n, x: (n.at[...].multiply(2), n.at[...].add(x), None)[2],
    ],
)
def test_what_depends_on_the_order_of_lanes_is_refused(body, n):
    with pytest.raises(RefValueError, match=r"ref `n` .* all lanes share it"):
        refs.vmap(lambda x: body(n, x))(X)
    assert n[...] == 0


def test_what_only_one_branch_sets_may_not_be_read(n):
    """Even if all lanes take the same one."""
    flag = refs.new_ref(True)

    def lane(x):
        lax.cond(flag[...], lambda: n.set(1), lambda: None)
        return n[...] * x

    with pytest.raises(RefValueError, match=r"use of what other lanes write to ref `n` "):
        refs.vmap(lane)(X)


# --- Lanes that part ---


def test_branches(jit, table, counts, n):
    def lane(r, x):
        def some():
            counts[x] += 10
            r[0] = 100.0
            return 1.0

        def other():
            n[...] += 1
            return r[1]

        return lax.cond(x > 0, some, other)

    same(jit(refs.vmap(lane, (1, 0)))(table, X), [3, 1, 1])
    same(counts[...], [0, 0, 20, 0])
    same(table[0], [0, 100, 100])
    assert n[...] == 1


def test_branches_in_branches(counts):
    def lane(x):
        def inner():
            counts[x] += 10

        lax.cond(x > 0, lambda: lax.cond(x < 2, inner, lambda: None), lambda: None)

    refs.vmap(lane)(jnp.arange(3))
    same(counts[...], [0, 10, 0, 0])


def test_a_branch_taken_by_all(jit, counts):
    def lane(flag, x):
        return lax.switch(flag, [lambda: 1, lambda: (counts.at[x].add(1), 2)[1]])

    mapped = jit(refs.vmap(lane, in_axes=(None, 0)))
    same(mapped(1, X), [2, 2, 2])
    same(mapped(0, X), [1, 1, 1])
    same(counts[...], [1, 0, 2, 0])


def test_loops_of_different_lengths(jit, table, n):
    def lane(r, x):
        def body(i):
            n[...] += 1
            r[0] += 1.0
            return i + 1

        return lax.while_loop(lambda i: r[0] < x, body, 0)

    xs = np.array([3, 0, 4])
    same(jit(refs.vmap(lane, (1, 0)))(table, xs), [3, 0, 2])
    same(table[0], [3, 1, 4])
    assert n[...] == 5


def test_a_loop_inside_a_branch_runs_for_its_lanes_only(jit, n):
    def lane(x):
        def loop():
            return lax.while_loop(lambda i: i != x, lambda i: (n.at[...].add(1), i + 1)[1], 1)

        return lax.cond(x > 1, loop, lambda: 0)  # with x = 0 the loop would not end

    same(jit(refs.vmap(lane))(X), [0, 2, 2])
    assert n[...] == 2


def test_a_ref_made_in_a_loop(n):
    def lane(x):
        def step(total, _):
            own = refs.new_ref(jnp.int32(0))
            own[...] = x
            return lax.cond(own[...] > 1, lambda: total + own[...], lambda: total), None

        return lax.scan(step, jnp.int32(0), None, length=2)[0]

    same(refs.vmap(lane)(X), [0, 4, 4])


# --- Results, names, nesting ---


def test_refs_that_lanes_make_become_one(counts):
    made, again, shared = refs.vmap(
        lambda x: ((r := refs.new_ref(x * jnp.ones(2), name="made")), r, counts), out_axes=1
    )(jnp.arange(3.0))
    same(made[...], [[0, 1, 2], [0, 1, 2]])
    assert again is made
    assert made.name == "made"
    assert shared is counts


def test_collectives(jit, n):
    def lane(x):
        n[...] += lax.axis_index("lanes")
        return x - lax.pmean(x, "lanes")

    same(jit(refs.vmap(lane, axis_name="lanes"))(jnp.array([1.0, 2.0, 6.0])), [-2, -1, 3])
    assert n[...] == 3


def test_maps_in_maps(jit, counts, table):
    def inner(r, x):
        counts[x] += 1
        r[...] += x
        return r[...]

    def outer(row, xs):
        return refs.vmap(inner)(row, xs)

    out = jit(refs.vmap(outer))(table, jnp.array([[0, 1, 3], [3, 3, 0]]))
    same(out, [[0, 2, 5], [6, 7, 5]])
    same(table[...], out)
    same(counts[...], [2, 1, 0, 3])


def test_gradients_in_maps_and_maps_in_gradients(jit, table, n):
    def loss(r, x):
        n[...] += 1
        r[0] *= x
        return (r[...] ** 2).sum()

    def hand(row, x):
        return ((row * jnp.array([x, 1.0, 1.0])) ** 2).sum()

    rows, xs = table[...], jnp.array([2.0, 3.0])
    got = jit(refs.vmap(refs.grad(loss, (0, 1))))(table, xs)
    jax.tree.map(same, got, jax.vmap(jax.grad(hand, (0, 1)))(rows, xs))
    table[...] = rows
    got = jit(refs.grad(lambda t, x: refs.vmap(loss)(t, x).sum(), (0, 1)))(table, xs)
    jax.tree.map(same, got, jax.grad(lambda t, x: jax.vmap(hand)(t, x).sum(), (0, 1))(rows, xs))
    assert n[...] == 4


@pytest.mark.as_released
def test_many_lanes_cost_their_updates():
    histogram = refs.new_ref(jnp.zeros(10**6))
    mapped = refs.jit(refs.vmap(lambda i: histogram.at[i].add(1.0)))
    compiled = mapped.lower(jnp.arange(4096)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 10**6

    def scatters(picks):
        lax.scan(lambda c, i: (c, histogram.at[i].add(1.0)), None, picks)

    mapped = refs.jit(refs.vmap(scatters))
    compiled = mapped.lower(jnp.zeros((128, 20), jnp.int32)).compile()
    # One copy of the ref may be there, not one for each lane.
    assert compiled.memory_analysis().temp_size_in_bytes < 10**7


def test_an_error_leaves_everything_as_it_was(table, n):
    def lane(r):
        r[...] = 0.0
        n[...] += 1
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        refs.vmap(lane)(table)
    assert n[...] == 0
    same(table[...], np.arange(6.0).reshape(2, 3))


def test_after_an_error_nothing_is_in_a_lane():
    """In a lane, what goes to a ref that is shared is first added up, from zero."""

    def lane(x):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        refs.vmap(lane)(X)
    total = refs.new_ref(jnp.float32(2**24))  # adding 1 to it changes nothing

    def program(x):
        total[...] += x
        total[...] += x
        return x

    refs.jit(refs.grad(program))(1.0)
    assert total[...] == 2**24
