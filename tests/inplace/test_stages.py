"""The stages of the in-place pass, each on jaxprs made for it. See `test_in_place.py`."""

import sys

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.experimental import io_callback

import refs
from refs._inplace import normal, rewrite, rows
from refs._inplace.body import Body
from refs._inplace.order import order
from tests.inplace.helpers import primitives, rewritten

pytestmark = pytest.mark.as_released

X = jnp.arange(512.0).reshape(8, 64)


def test_programs_without_updates_are_left_alone():
    jaxpr = jax.make_jaxpr(lambda x: jax.nn.softmax(x @ x.T).sum())(X).jaxpr
    assert rewrite(jaxpr) is jaxpr


# --- Gathers ---

INDICES = jnp.array([1, 3, 5])
GATHERS = [
    lambda x: x[INDICES],
    lambda x: x[:, INDICES],
    lambda x: x[jnp.array([[1, 2], [3, 4]]), jnp.array([[0], [7]])],
    lambda x: x.at[jnp.array([100, -3])].get(mode="clip"),
    lambda x: jax.vmap(lambda row, i: row[i])(x, jnp.arange(8)),
    lambda x: jax.vmap(lambda row, i: lax.dynamic_slice(row, (i,), (3,)))(x, jnp.arange(8) + 60),
    lambda x: jax.vmap(lambda i: lax.dynamic_slice(x, (i, i), (2, 3)))(jnp.arange(4)),
    lambda x: x.reshape(8, 8, 8)[:, INDICES],
    lambda x: jax.vmap(lambda a: a[INDICES, :, INDICES])(x.reshape(4, 8, 4, 4)),
]


@pytest.mark.parametrize("fun", GATHERS)
def test_a_few_rows_are_read_one_by_one(fun, monkeypatch):
    # Small ones too; and where the indices are in bounds, those that would fill.
    monkeypatch.setattr(normal, "_is_worth_it", lambda eqn, access: True)
    monkeypatch.setattr(rows, "are_few", lambda eqn: True)
    # An update, for the pass to have something to do.
    new = rewritten(lambda x: (fun(x), x.at[0].set(1.0)), X)
    assert "gather" not in primitives(new)


def test_gathers_that_fill_are_left_alone():
    large = jnp.arange(200_000.0)
    fill = rewritten(lambda x: (x.at[INDICES].get(mode="fill"), x.at[0].set(1.0)), large)
    clip = rewritten(lambda x: (x.at[INDICES].get(mode="clip"), x.at[0].set(1.0)), large)
    assert "gather" in primitives(fill)
    assert "gather" not in primitives(clip)


# --- Order ---


def test_effects_keep_their_order():
    seen = []

    def say(k, x):
        io_callback(lambda x: seen.append((k, float(x))), None, x, ordered=True)

    @jax.jit
    @refs.in_place
    def program(x):
        say(0, x[0])
        y = x.at[0].set(x[1])
        say(1, y[0])
        z = y.at[1].set(x[0])
        say(2, x[5])
        return z

    program(jnp.arange(100.0))
    jax.effects_barrier()
    assert seen == [(0, 0.0), (1, 1.0), (2, 5.0)]


@pytest.mark.slow
def test_many_refs_that_wait_for_one_another():
    n = 60

    def program(*values):
        values, total = list(values), 0.0
        for i in range(n):
            values[i] = values[i].at[2].set(values[(i + 1) % n][3] + 1)
        for i in range(n):
            total = total + values[i][3]
            values[i * 7 % n] = values[i * 7 % n].at[3].set(total)
        return *values, total

    rewritten(program, *(jnp.arange(100.0) + i for i in range(n)))


@pytest.mark.parametrize("room", [12, 13])
def test_equations_that_lie_close_get_new_places(monkeypatch, room):
    def program(*values):
        values = list(values)
        for i in range(8):
            values[i] = values[i].at[2].set(values[(i + 1) % 8][3] + 1)
        return values

    args = [jnp.arange(100.0) + i for i in range(8)]
    want = str(rewritten(program, *args))
    monkeypatch.setattr("refs._inplace.order.ROOM", room)
    assert str(rewritten(program, *args)) == want


def test_a_true_second_use_keeps_its_value():
    def program(x):
        y = x.at[0].set(5.0)
        return y.at[1].set(x.sum()), x * 2

    rewritten(program, jnp.arange(100.0))


def test_what_uses_a_value_that_was_read_comes_after_the_update():
    def program(x):
        used = jnp.sin(x[0])
        return x.at[1].set(3.0), used

    names = primitives(rewritten(program, jnp.arange(100.0)))
    assert names.index("cond") < names.index("sin")


def test_what_the_update_needs_stays_before_it_and_no_fence_is_worth_it():
    names = primitives(rewritten(lambda x: x.at[1].set(jnp.sin(x[0])), jnp.arange(100.0)))
    assert "sin" in names
    assert "cond" not in names


def test_what_takes_a_large_value_made_of_a_buffer_comes_before_its_update():
    def program(x):
        y = x.at[1].set(3.0)
        return y, (x * 2).sum()

    names = primitives(rewritten(program, jnp.arange(100.0)))
    assert names.index("mul") < names.index("reduce_sum") < names.index("cond")


STEPS = st.lists(
    st.tuples(st.sampled_from(["read", "write", "use"]), st.integers(0, 99), st.integers(0, 99)),
    max_size=25,
)


@pytest.mark.parametrize("room", [2048, 14])
def test_readers_come_first_where_there_is_little_room(room, monkeypatch):
    """It is used up, and given anew."""
    monkeypatch.setattr(sys.modules["refs._inplace.order"], "ROOM", room)

    def program(x):
        versions = [x]
        for k in range(8):
            versions.append(versions[-1].at[k].set(1.0))
        return versions[-1], [v[50 + k] for k in range(8) for v in versions[::-1]]

    body = Body(jax.make_jaxpr(program)(jnp.arange(100.0)).jaxpr)
    order(body)
    seen = set()
    for eqn in body.eqns:
        assert seen.isdisjoint(map(id, eqn.invars))
        if eqn.primitive is lax.scatter_p:
            seen.add(id(eqn.invars[0]))


@given(STEPS)
def test_readers_come_first_wherever_they_can(steps):
    """In a chain of updates each reader that doesn't need the update can stand before it."""

    def program(x):
        versions, values = [x], [jnp.float32(1.0)]
        for kind, i, j in steps:
            if kind == "read":  # of any version, old ones too
                values.append(lax.slice(versions[i % len(versions)], (j,), (j + 1,))[0])
            elif kind == "write":
                update = jnp.reshape(values[i % len(values)], (1,))
                versions.append(lax.dynamic_update_slice(versions[-1], update, (j,)))
            else:
                values.append(values[i % len(values)] + values[j % len(values)])
        return versions[-1], values

    jaxpr = jax.make_jaxpr(program)(jnp.arange(100.0)).jaxpr
    body = Body(jaxpr)
    order(body)
    assert {*map(id, body.eqns)} == {*map(id, jaxpr.eqns)}
    needed_by, place = {}, {}
    for k, eqn in enumerate(body.eqns):
        needs = [place[v] for v in eqn.invars if isinstance(v, jax.extend.core.Var) and v in place]
        needed_by[k] = {*needs}.union(*(needed_by[j] for j in needs))
        place.update(dict.fromkeys(eqn.outvars, k))
    for k, eqn in enumerate(body.eqns):
        if eqn.primitive is lax.dynamic_update_slice_p:
            late = [j for j in range(k + 1, len(body.eqns)) if eqn.invars[0] in body.eqns[j].invars]
            assert all(k in needed_by[j] for j in late)
    rewritten(program, jnp.arange(100.0))


# --- Branches ---


@pytest.mark.parametrize("index", range(4))
def test_each_branch_has_a_conditional_of_its_own(index):
    def program(x, q, k):
        def first(x, q):
            return x.at[k].set(q[k]).at[k + 1].set(1.0), q, x[k]

        def second(x, q):
            return x, q.at[k].set(x[k]).at[2].set(x[3]), q[k] * 2

        def third(x, q):
            return x, q, 7.0

        return lax.switch(k, [first, second, third, first], x, q)

    rewritten(program, jnp.arange(100.0), jnp.arange(100.0) * 3, jnp.int32(index))


def test_two_branches_that_update_have_a_conditional_each():
    def program(x, k):
        def first(x):
            return x.at[k].set(x[k + 1]).at[k + 1].set(1.0)

        def second(x):
            return x.at[k].add(2.0).at[3].set(x[5])

        return lax.cond(k > 0, first, second, x)

    new = rewritten(program, jnp.arange(100.0), jnp.int32(1))
    assert primitives(new).count("cond") == 2


# --- What a careful reader has found ---


def zeros():
    return jnp.zeros(100)


def two_outputs_of_one_branch(x, i):
    a, b = lax.cond(
        i > 0,
        lambda: (zeros().at[i].add(2.0), zeros().at[i + 1].add(3.0)),
        lambda: (zeros(), zeros()),
    )
    return x + (a + b)


def two_carries_of_one_loop(x, i):
    def step(carry, j):
        return (carry[0].at[j].add(2.0), carry[1].at[j + i].add(1.0)), None

    (a, b), _ = lax.scan(step, (zeros(), zeros()), jnp.arange(5))
    return x + (a + b)


def a_branch_that_needs_another(x, i):
    a, s = lax.cond(i > 0, lambda: (zeros().at[i].add(2.0), 1.0), lambda: (zeros(), 2.0))
    b = lax.cond(i > 0, lambda: zeros().at[i].add(s), zeros)
    return x + (b + a)


@pytest.mark.parametrize(
    "fun", [two_outputs_of_one_branch, two_carries_of_one_loop, a_branch_that_needs_another]
)
def test_deposits_that_depend_on_one_another(fun):
    rewritten(fun, jnp.arange(100.0), jnp.int32(3))


def test_a_loop_with_effects_stays_before_what_comes_after_it():
    seen = []

    @jax.jit
    @refs.in_place
    def program(x):
        def step(total, j):
            io_callback(lambda j: seen.append(int(j)), None, j, ordered=True)
            return total.at[j].add(2.0), None

        a, _ = lax.scan(step, zeros(), jnp.arange(3))
        y = io_callback(lambda x: (seen.append("after"), x)[1], x, x, ordered=True)
        return y + a

    program(jnp.arange(100.0))
    jax.effects_barrier()
    assert seen == [0, 1, 2, "after"]


def test_types_that_are_explicitly_sharded_are_left_alone():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.sharding.PartitionSpec("d"))
        jaxpr = jax.make_jaxpr(lambda x: (x[:, 3], x.at[:, 3].set(1.0)))(x).jaxpr
    assert rewrite(jaxpr) is jaxpr


def test_a_function_may_have_refs_of_its_own():
    @jax.jit
    @refs.in_place
    def program(x):
        r = jax.new_ref(x)
        r[1] = r[2] * 2
        return jax.ref.freeze(r)

    np.testing.assert_array_equal(program(jnp.arange(100.0))[:4], [0, 4, 2, 3])


def test_wide_types_are_lowered_where_they_are_not_the_rule():
    def program(x, i):
        y = x[i]
        return x.at[i].set(2.0), y

    with jax.enable_x64(True):
        traced = jax.jit(refs.in_place(program)).trace(jnp.arange(100.0), jnp.int64(1))
    traced.lower().compile()


def test_calls_of_calls_are_looked_at_once():
    fun = jax.jit(lambda x: x * 2 + 1)
    for _ in range(40):
        fun = jax.jit(lambda x, fun=fun: fun(fun(x)))
    jaxpr = jax.make_jaxpr(fun)(X).jaxpr
    assert rewrite(jaxpr) is jaxpr


@pytest.mark.parametrize("on_cpu", [True, False])
def test_elsewhere_than_on_a_cpu_fences_are_barriers(on_cpu):
    """And values stay what they are."""

    def program(x, k):
        for _ in range(3):
            row = x[k]
            x = x.at[k].set(x[k + 1] * 2)
            x = x.at[k + 1].add(row)
            k = (k + 1) % 3
        return x, lax.fori_loop(0, 2, lambda i, x: x.at[i].set(x[i + 1] + x[i]), x)

    x, k = jnp.arange(40_000.0).reshape(4, 10_000), jnp.int32(1)
    closed = jax.make_jaxpr(program)(x, k)
    rewritten = rewrite(closed.jaxpr, on_cpu)
    names = [e.primitive.name for e in rewritten.eqns]
    assert ("optimization_barrier" in names) != on_cpu
    got = jax.core.eval_jaxpr(rewritten, closed.consts, x, k)
    for one, other in zip(got, program(x, k), strict=True):
        np.testing.assert_array_equal(one, other)


LIMITS = [("refs._inplace.order", "FARTHEST"), ("refs._inplace.fences", "MOST")]


@pytest.mark.parametrize("module, limit", LIMITS, ids=lambda x: x)
def test_beyond_its_limits_the_pass_leaves_things_as_they_are(module, limit, monkeypatch):
    monkeypatch.setattr(sys.modules[module], limit, 2)
    n = 12

    def program(*values):
        values, total = list(values), 0.0
        for i in range(n):
            used = values[i][3] + values[i - 1][4] + values[i - 2][5]
            values[i] = values[i].at[2].set(values[(i + 1) % n][3] + 1)
            total = total + jnp.sin(used) + jnp.cos(used)
        for i in range(n):
            total = total + values[i][3]
            values[i * 7 % n] = values[i * 7 % n].at[3].set(total)
        return *values, total

    rewritten(program, *(jnp.arange(100.0) + i for i in range(n)))


@pytest.mark.parametrize(
    "body", [lambda i, c: -c, lambda i, c: -c.at[i].add(1.0), lambda i, c: c + c[::-1]]
)
def test_loops_that_do_more_than_add_start_from_zeros(body):
    rewritten(lambda x: x + lax.fori_loop(0, 3, body, jnp.zeros_like(x)), jnp.arange(100.0))
