"""In place too: derivatives of loops over refs, and functions of arrays. See `test_in_place.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from refs._explain.hlo import Module
from tests.inplace.helpers import assert_in_place

pytestmark = pytest.mark.as_released

N = 10_000


# --- Derivatives: the cotangents are as large as what was read ---


def gradient(body, steps=20):
    """The gradient of a loop over a ref, as a function over the ref that it is put into."""

    def loss(x):
        q = refs.new_ref(x)

        def step(_, k):
            body(q, k)
            return None, None

        lax.scan(step, None, jnp.arange(steps))
        return q[0] + q[5]

    def into(g):
        g[...] = refs.grad(loss)(g[...])

    return into


def reads_and_writes(q, k):
    q[k] = jnp.sin(q[k + 1])


def one_branch(q, k):
    lax.cond(q[k] > 0.0, lambda: reads_and_writes(q, k), lambda: None)


def two_branches(q, k):
    lax.cond(q[k] > 0.0, lambda: reads_and_writes(q, k), lambda: reads_and_writes(q, k + 1))


def inner_loop(q, k):
    def step(total, j):
        return jnp.sin(total + q[k + j]), None

    q[k] = lax.scan(step, 0.0, jnp.arange(4))[0]


def checkpointed(q, k):
    refs.checkpoint(reads_and_writes)(q, k)


def checkpointed_by_jax(q, k):
    jax.checkpoint(lambda k: reads_and_writes(q, k), prevent_cse=False)(k)


BODIES = [reads_and_writes, one_branch, two_branches, inner_loop, checkpointed, checkpointed_by_jax]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_gradients_are_accumulated_in_place(body):
    assert_in_place(gradient(body), refs.new_ref(jnp.ones(N)), loops_only=True)


def test_gradient_of_a_table_that_is_only_read():
    def loss(x, where):
        table, total = refs.new_ref(x), refs.new_ref(0.0)

        def step(_, i):
            total[...] += table[i] ** 2
            return None, None

        lax.scan(step, None, where)
        return total[...]

    def into(g, x, where):
        g[...] = refs.grad(loss)(x, where)

    g = refs.new_ref(jnp.zeros(N))
    assert_in_place(into, g, jnp.ones(N), jnp.arange(20), loops_only=True)


@pytest.mark.parametrize(
    "body", [checkpointed, checkpointed_by_jax], ids=lambda body: body.__name__
)
def test_a_checkpointed_step_stores_what_it_reads(body):
    """Not the ref: that would be 100 times 40 KB."""
    lowered = refs.jit(gradient(body, steps=100)).lower(refs.new_ref(jnp.ones(N)))
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 10 * 4 * N


# --- Functions of arrays ---


def swapped(x, where):
    return lax.fori_loop(
        0, len(where), lambda k, x: x.at[where[k]].set(x[k]).at[k].set(x[where[k]]), x
    )


def test_in_place_is_for_functions_of_arrays_too():
    x, where = jnp.arange(float(N)), jnp.arange(20) * 3 + 1
    compiled = jax.jit(refs.in_place(swapped), donate_argnums=0)
    assert_in_place(compiled, x, where)
    with pytest.raises(AssertionError, match="each step of a loop"):
        assert_in_place(jax.jit(swapped, donate_argnums=0), x, where)
    np.testing.assert_array_equal(compiled(x.copy(), where), swapped(x, where))


def test_in_place_can_be_transformed():
    x, where = jnp.linspace(0.0, 1.0, 200), jnp.arange(20) * 3 + 1
    within = refs.in_place(swapped)
    batch = jnp.stack([x, x[::-1]])
    np.testing.assert_array_equal(
        jax.jit(jax.vmap(within, (0, None)))(batch, where),
        jax.vmap(swapped, (0, None))(batch, where),
    )
    f, g = (lambda x, f=f: (f(x, where) ** 2)[:50].sum() for f in (within, swapped))
    np.testing.assert_allclose(jax.jit(jax.jacfwd(f))(x), jax.jacfwd(g)(x))
    with jax.disable_jit():
        np.testing.assert_array_equal(within(x, where), swapped(x, where))


def test_in_place_keeps_custom_derivatives():
    @jax.custom_jvp
    def f(x):
        return x.at[0].set(1.0)

    f.defjvp(lambda primals, tangents: (f(*primals), 10 * tangents[0]))
    within = refs.in_place(lambda x: f(x).sum())
    np.testing.assert_array_equal(jax.grad(within)(jnp.ones(3)), [10, 10, 10])
    np.testing.assert_array_equal(jax.jit(jax.grad(within))(jnp.ones(3)), [10, 10, 10])


def test_in_place_takes_and_returns_trees():
    @jax.jit
    @refs.in_place
    def f(state, *, scale):
        return {"x": state["x"].at[0].set(scale), "n": state["n"] + 1}

    out = f({"x": jnp.ones(3), "n": 1}, scale=5.0)
    assert out["n"] == 2
    np.testing.assert_array_equal(out["x"], [5, 1, 1])


# --- Where nothing is to be gained, nothing is done ---


def test_whole_buffers_are_compiled_as_ever():
    def step(w, m, x):
        m[...] = 0.9 * m[...] + jnp.tanh(x @ w[...])
        w[...] = w[...] - 0.1 * m[...]

    def by_hand(w, m, x):
        m = 0.9 * m + jnp.tanh(x @ w)
        return w - 0.1 * m, m

    w, m, x = (jnp.ones((100, 100)) for _ in range(3))
    ours = refs.jit(step).lower(refs.new_ref(w), refs.new_ref(m), x).compile()
    theirs = jax.jit(by_hand, donate_argnums=(0, 1)).lower(w, m, x).compile()
    assert ours.cost_analysis()["flops"] == theirs.cost_analysis()["flops"]
    assert ours.memory_analysis().temp_size_in_bytes <= theirs.memory_analysis().temp_size_in_bytes


def test_policies_may_say_where_to_store():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["kept"],
        names_which_can_be_offloaded=[],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def body(q, k):
        jax.checkpoint(lambda k: reads_and_writes(q, k), policy=policy)(k)

    g, expected = refs.new_ref(jnp.ones(N)), refs.new_ref(jnp.ones(N))
    refs.jit(gradient(body))(g)
    refs.jit(gradient(reads_and_writes))(expected)
    np.testing.assert_allclose(g[...], expected[...], rtol=1e-6)


def test_the_gradient_of_a_write_stores_a_flag_a_step():
    """And not one for each element of the row, to tell whether its place was in bounds."""
    steps, width = 100, 10_000

    def over_a_ref(u):
        def step(_, k):
            u[(k + 1) % 2] = u[k % 2] * 0.5
            return None, None

        lax.scan(step, None, jnp.arange(steps))
        return u[0].sum()

    u = refs.new_ref(jnp.ones((2, width)))
    compiled = refs.jit(refs.grad(over_a_ref)).lower(u).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < steps * width / 2


def own(x):
    r = refs.new_ref(x)

    def swap(k, _):
        r[k], r[k + 1] = r[k + 1] * 2, r[k]

    lax.fori_loop(0, 9, swap, None)
    return (r[...] ** 2).sum()


@pytest.mark.parametrize(
    "fun",
    [
        refs.grad(own),
        jax.jit(refs.grad(own)),
        lambda x: refs.jvp(own, (x,), (x,)),
        lambda x: refs.vmap(own)(jnp.stack([x, x])).sum(),
        refs.checkpoint(own),
    ],
    ids=["grad", "jit of grad", "jvp", "vmap", "checkpoint"],
)
def test_a_transformed_function_that_makes_its_refs_itself(fun):
    moves = Module.parse(refs.jit(fun).lower(jnp.ones(N)).compile().as_text()).moves()
    assert not [m for m in moves if m.size >= N and m.in_loop]
