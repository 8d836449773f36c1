"""Functions with derivative rules of the user's, under our transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs

same = np.testing.assert_allclose
XS = jnp.array([0.5, 0.7, 0.9])


def with_vjp(backward, forward=lambda by: None):
    """sin, with a backward rule that is told the cotangent; it gives 100 times the gradient."""

    @jax.custom_vjp
    def f(x):
        forward(1)
        return jnp.sin(x)

    def fwd(x):
        forward(10)
        return jnp.sin(x), x

    def bwd(x, g):
        backward(g)
        return (100 * jnp.cos(x) * g,)

    f.defvjp(fwd, bwd)
    return f


# --- Effects of backward rules ---


def test_a_backward_rule_acts_when_and_in_the_order_the_backward_pass_runs(jit, n):
    stash = refs.new_ref(jnp.zeros(3), name="stash")

    def backward(g):
        stash[n[...]] = g
        n[...] += 1

    f = with_vjp(backward)

    def loop(x):
        return lax.scan(lambda c, _: (f(c) / 100, None), x, None, length=3)[0]

    def by_hand(x):
        return lax.scan(lambda c, _: (jnp.sin(c) / 100, None), x, None, length=3)[0]

    first = 1 / 100
    for wrap in (
        lambda f: f,
        refs.checkpoint,
        lambda f: lambda x: lax.cond(x > 0, f, lambda x: x, x),
    ):
        n[...] = 0
        same(jit(refs.grad(wrap(loop)))(0.5), 10**6 * jax.grad(by_hand)(0.5), rtol=1e-5)
        assert n[...] == 3
        same(stash[0], first)
        same(stash[1], first * np.cos(by_hand_step(0.5, 2)), rtol=1e-5)


def by_hand_step(x, steps):
    for _ in range(steps):
        x = np.sin(x) / 100
    return x


def test_the_backward_pass_runs_after_the_forward_state_is_written(jit, n):
    f = with_vjp(lambda g: n.at[...].multiply(10))

    def loss(x):
        n[...] += 1
        return f(x)

    jit(refs.grad(loss))(0.5)
    assert n[...] == 10
    jit(refs.grad(refs.grad(loss)))(0.5)
    assert n[...] == 110


def test_a_backward_rule_over_a_ref_argument(jit, n):
    total = refs.new_ref(0.0, name="total")

    def loss(total, x):
        f = with_vjp(total.at[...].add)
        return lax.cond(x > 0, lambda x: f(f(x)), lambda x: x, x)

    jit(refs.grad(loss, 1))(total, 0.5)
    same(total[...], 1 + 100 * np.cos(np.sin(0.5)), rtol=1e-5)


def test_each_lane_has_its_backward_pass(jit, n):
    seen, passed = refs.new_ref(0.0, name="seen"), refs.new_ref(0.0, name="passed")

    def backward(g):
        n[...] += 1
        seen[...] += g

    def forward(by):
        n[...] += by
        passed[...] += 0.5

    f = with_vjp(backward, forward)

    def part(x):
        return lax.cond(x > 0.6, f, lambda x: x, x)

    def once(x):
        return refs.scan(lambda c, _: (part(c), None), x, length=1)[0]

    want = jnp.array([1.0, 100 * jnp.cos(0.7), 100 * jnp.cos(0.9)])
    for program in (
        refs.vmap(refs.grad(part)),
        refs.grad(lambda xs: refs.vmap(part)(xs).sum()),
        refs.grad(lambda xs: refs.vmap(refs.checkpoint(part))(xs).sum()),
        refs.grad(lambda xs: refs.vmap(once)(xs).sum()),
        refs.grad(lambda xs: refs.vmap(jax.jit(refs.vmap(part)))(xs[:, None]).sum()),
    ):
        n[...], seen[...], passed[...] = 0, 0, 0
        same(jit(program)(XS), want, rtol=1e-6)
        assert n[...] == 22
        assert seen[...] == 2
        assert passed[...] == 1


def test_each_row_of_a_jacobian_has_its_backward_pass(jit, n):
    f = with_vjp(lambda g: n.at[...].add(1))
    jacobian = jit(refs.jacrev(lambda x: jnp.stack([f(x), f(2 * x), x])))(0.5)
    same(jacobian, [100 * np.cos(0.5), 200 * np.cos(1.0), 1], rtol=1e-6)
    assert n[...] == 6  # two calls, three rows


def test_a_pullback_has_its_effects_each_time(jit, n):
    f = with_vjp(lambda g: n.at[...].add(1))

    def twice(x):
        _, pullback = refs.vjp(f, x)
        return pullback(1.0), pullback(2.0)

    jit(twice)(0.5)
    assert n[...] == 2


# --- Rules that thread state ---


def stateful_vjp(r, n):
    @jax.custom_vjp
    def f(r, x):
        n[...] += 1
        r[0] += x
        return jnp.sin(x) * r[1]

    def fwd(r, x):
        n[...] += 10
        r[0] += x
        return jnp.sin(x) * r[1], (x, r[1])

    def bwd(saved, g):
        x, r1 = saved
        return jnp.zeros(3).at[1].set(jnp.sin(x) * g), 100 * g * r1

    f.defvjp(fwd, bwd)
    return f


def stateful_jvp(r, n):
    @jax.custom_jvp
    def f(r, x):
        n[...] += 1
        r[0] += x
        return x * r[1]

    @f.defjvp
    def rule(primals, tangents):
        (r, x), (dr, dx) = primals, tangents
        n[...] += 10
        r[0] += x
        dr[0] += dx
        return x * r[1], 100 * dx + dr[1] * x

    return f


@pytest.mark.parametrize("make", [stateful_vjp, stateful_jvp])
def test_the_users_rule_is_used_with_its_state(jit, make, n):
    w = np.array([0, 1, 2], np.float32)
    r = refs.new_ref(w)
    f = make(r, n)
    jit(f)(r, 0.5)
    assert n[...] == 1
    same(r[...], [0.5, 1, 2])
    _, slope = jit(refs.grad(f, (0, 1)))(r, 0.5)
    assert slope == 100
    assert n[...] == 11
    same(r[...], [1, 1, 2])
    rows = refs.new_ref(np.stack([w, w, w]))
    jit(refs.vmap(f))(rows, XS)
    assert n[...] == 14
    _, slopes = jit(refs.vmap(refs.grad(f, (0, 1))))(rows, XS)
    same(slopes, [100, 100, 100])
    assert n[...] == 44
    _, slopes = jit(refs.grad(lambda rows, x: refs.vmap(f)(rows, x).sum(), (0, 1)))(rows, XS)
    same(slopes, [100, 100, 100])
    same(rows[:, 0], 3 * XS, rtol=1e-6)
    assert n[...] == 74


def test_a_jvp_rule_acts_on_the_tangent_of_a_ref():
    r, n = refs.new_ref(jnp.zeros(3)), refs.new_ref(0)
    f = stateful_jvp(r, n)
    assert refs.grad(lambda r, x: (f(r, x), r[0])[1], 1)(r, 0.5) == 1


def test_nondifferentiable_arguments_and_symbolic_zeros(jit, n):
    zeros = []

    @jax.custom_vjp
    def g(x, y):
        n[...] += 1
        return x * y

    def fwd(x, y):
        zeros.append((x.perturbed, y.perturbed))
        n[...] += 1
        return x.value * y.value, (x.value, y.value)

    g.defvjp(fwd, lambda saved, ct: (7 * ct, 9 * ct), symbolic_zeros=True)
    assert jit(refs.grad(g))(2.0, 3.0) == 7
    assert zeros[-1] == (True, False)
    assert n[...] == 1

    def power(k, x):
        n[...] += 1
        return x**k

    h = jax.custom_vjp(power, nondiff_argnums=(0,))
    h.defvjp(lambda k, x: (power(k, x), x), lambda k, x, ct: (k * 1000 * ct,))
    assert jit(refs.grad(lambda x: h(3, x)))(2.0) == 3000
    assert n[...] == 2


def counting(kind, effect):
    """Twice its argument, with an effect on refs, and rules that call it."""
    if kind == "jvp":

        @jax.custom_jvp
        def f(y):
            effect(y)
            return 2 * y

        f.defjvp(lambda primals, tangents: (f(*primals), 2 * tangents[0]))
    else:

        @jax.custom_vjp
        def f(y):
            effect(y)
            return 2 * y

        f.defvjp(lambda y: (f(y), None), lambda _, g: (2 * g,))
    return f


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_what_refs_hold_is_followed_through_the_function(kind, jit):
    buffer = refs.new_ref(jnp.zeros(3))

    def effect(y):
        buffer[0] += 1
        buffer[2] = 5 * buffer[1]

    f = counting(kind, effect)

    def loss(x):
        buffer[1] = 3 * x
        return f(x) + buffer[1] + buffer[2]

    assert jit(refs.grad(loss))(1.0) == 2 + 3 + 15
    same(buffer[...], [1, 3, 15])

    def of_the_buffer(buffer, x):
        return refs.scan(lambda c, _: (c + f(x) + buffer[2], None), 0.0, None, length=2)[0]

    of_buffer, of_x = jit(refs.grad(of_the_buffer, (0, 1)))(buffer, 1.0)
    same(of_buffer, [0, 10, 0])
    assert of_x == 4
    if kind == "jvp":
        assert jit(lambda: refs.jvp(of_the_buffer, (buffer, 1.0), (jnp.ones(3), 1.0))[1])() == 14


def test_what_an_argument_holds_is_followed_too(jit):
    """The backward rule gives how the output depends on the ref, not how its contents do."""

    @jax.custom_vjp
    def f(r, x):
        r[0] = r[1] * x
        return r[1] * x

    def forward(r, x):
        return f(r, x), (r[1], x)

    f.defvjp(forward, lambda res, g: (jnp.array([0.0, 1.0]) * g * res[1], g * res[0]))

    def loss(r, x):
        return refs.scan(lambda c, _: (c + f(r, x), None), 0.0, None, length=2)[0]

    of_r, of_x = jit(refs.grad(loss, (0, 1)))(refs.new_ref(jnp.array([0.0, 3.0])), 5.0)
    same(of_r, [0, 10])
    assert of_x == 6


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_lanes_share_what_a_rule_adds_to(kind, jit):
    total = refs.new_ref(0.0)
    f = counting(kind, total.at[...].add)
    same(jit(refs.vmap(refs.grad(f)))(XS), [2, 2, 2])
    same(total[...], XS.sum(), rtol=1e-6)
    same(jit(refs.grad(lambda xs: refs.vmap(f)(xs).sum()))(XS), [2, 2, 2])
    same(total[...], 2 * XS.sum(), rtol=1e-6)


@pytest.mark.parametrize("wrap", [lambda f: f, refs.jit], ids=["op by op", "jit"])
def test_a_rule_that_touches_the_ref_whose_rows_its_function_runs_over(wrap):
    r = refs.new_ref(jnp.arange(1.0, 7.0).reshape(3, 2))

    @jax.custom_vjp
    def f(x):
        return x

    def backward(_, ct):
        r[0, 0] += ct
        return (ct,)

    f.defvjp(lambda x: (x, None), backward)

    def loss(x):
        inner = jax.jit(lambda c, q: f(c) * q[1])
        return refs.scan(lambda c, q: (inner(c, q), None), x, r)[0]

    assert wrap(refs.grad(loss))(1.0) == 2 * 4 * 6
    # The cotangents of `f` in the last, the second and the first step.
    assert r[0, 0] == 1 + 6 + 4 * 6 + 2 * 4 * 6


def accumulating(kind):
    """`f(q, x)` adds x to q and returns 2 x; its derivative is said to be 3."""
    f = (jax.custom_vjp if kind == "vjp" else jax.custom_jvp)(
        lambda q, x: (q.addupdate(x), 2 * x)[1]
    )
    if kind == "vjp":
        f.defvjp(lambda q, x: (f(q, x), None), lambda _, ct: (jnp.zeros(2), 3 * ct))
    else:
        f.defjvp(lambda primals, tangents: (f(*primals), 3 * tangents[1]))
    return f


@pytest.mark.parametrize("wrap", [lambda f: f, refs.jit], ids=["op by op", "jit"])
@pytest.mark.parametrize("kind", ["vjp", "jvp"])
def test_lanes_that_accumulate_into_the_rows_of_a_ref_they_share(kind, wrap):
    """The row's index belongs to a step of a loop, and the rule is traced after that."""
    r, f = refs.new_ref(jnp.zeros((3, 2))), accumulating(kind)

    def lane(x):
        return refs.scan(lambda c, q: (c + f(q, x), None), 0.0, r)[0]

    got = wrap(refs.grad(lambda x: refs.vmap(lane)(x).sum()))(jnp.array([1.0, 5.0]))
    np.testing.assert_array_equal(got, [9, 9])
    np.testing.assert_array_equal(r[...], np.full((3, 2), 6))
