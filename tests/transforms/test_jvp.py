"""`refs.jvp`, `refs.linearize`, and the whole derivatives `jacfwd`, `jacrev` and `hessian`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs

W = np.array([1.0, 2.0, 3.0], np.float32)


@pytest.fixture
def w():
    return refs.new_ref(W, name="w")


def swap_ends(w, x):
    """Not symmetric in anything: each derivative has a place of its own."""
    w[0] = w[2] * x
    return jnp.sin(w[...]) * x


def by_hand(w, x):
    return jnp.sin(jnp.asarray(w).at[0].set(w[2] * x)) * x


same = np.testing.assert_allclose


def test_jvp(jit, w):
    tangents = (jnp.array([1.0, 10.0, 100.0]), 0.5)
    got = jit(lambda w, x: refs.jvp(swap_ends, (w, x), tangents))(w, 2.0)
    jax.tree.map(same, got, jax.jvp(by_hand, (W, 2.0), tangents))
    same(w[...], [6, 2, 3])


def test_jvp_of_a_view_and_with_auxiliary_data(w):
    out, tangent, aux = refs.jvp(
        lambda view: (view.get() ** 2, w), [w.at[1:]], [jnp.array([1.0, 0.0])], has_aux=True
    )
    same(out, [4, 9])
    same(tangent, [4, 0])
    assert aux is w


def test_a_ref_for_a_tangent_follows_the_contents(w):
    tangent = refs.new_ref(jnp.array([0.0, 0.0, 1.0]))
    _, out_tangent = refs.jvp(swap_ends, (w, 2.0), (tangent, 0.0))
    same(tangent[...], [2, 0, 1])
    same(out_tangent, jax.jvp(by_hand, (W, 2.0), (jnp.array([0.0, 0.0, 1.0]), 0.0))[1])


def reads(r):
    return r[0] * r[1]


def leaves_alone(r):
    return jnp.float32(4)


def reads_in_a_loop(r):
    return refs.fori_loop(0, 3, lambda k, total: total + r[k] ** 2, 0.0)


def writes_a_part(r):
    r[0] = r[1] * r[2]
    return r[0]


def writes_in_a_loop(r):
    refs.fori_loop(1, 3, lambda k, _: r.at[k].multiply(r[k - 1]), None)
    return r[2]


def reads_closed_over(r):
    return refs.scan(lambda total, x: (total + x * r[0], None), 0.0, r[...])[0]


ways = pytest.mark.parametrize("way", ["op by op", "jit", "loop", "vmap", "linearize"])


@ways
@pytest.mark.parametrize(
    "f",
    [
        reads,
        leaves_alone,
        reads_in_a_loop,
        writes_a_part,
        writes_in_a_loop,
        reads_closed_over,
    ],
)
def test_a_ref_for_a_tangent_keeps_what_nothing_is_written_to(f, way):
    x, dx = jnp.array([2.0, 3.0, 4.0]), jnp.array([1.0, 10.0, 100.0])
    # functionalize: (output, contents at the end).
    (out, end), (d_out, d_end) = jax.jvp(refs.functionalize(f), (x,), (dx,))
    r, t = refs.new_ref(x), refs.new_ref(dx)

    def push(r, t):
        return refs.jvp(f, (r,), (t,))

    if way == "op by op":
        got = push(r, t)
    elif way == "jit":
        got = refs.jit(push)(r, t)
    elif way == "linearize":
        out_, f_jvp = refs.linearize(f, r)
        got = out_, f_jvp(t)
    elif way == "loop":
        got = refs.scan(lambda _, k: (None, push(r, t)), None, jnp.arange(1))[1]
        got = jax.tree.map(lambda x: x[0], got)
    else:
        r, t = refs.new_ref(x[:, None]), refs.new_ref(dx[:, None])
        got = refs.vmap(push, in_axes=1)(r, t)
        got = jax.tree.map(lambda x: x[0], got)
    jax.tree.map(same, got, (out, d_out))
    same(r[...].ravel(), end)
    same(t[...].ravel(), d_end)


def test_lanes_share_a_ref_for_a_tangent_that_nothing_is_written_to(w):
    t = refs.new_ref(jnp.ones(3))
    _, got = refs.vmap(lambda x: refs.jvp(lambda w, x: (w[...] * x).sum(), (w, x), (t, x)))(W)
    same(got, 9 * W)
    same(t[...], 1)


def test_the_tangent_of_a_view_of_what_is_only_read(w):
    t = refs.new_ref(jnp.array([5.0, 7.0]))
    same(refs.jvp(lambda v: v[0] * 2, (w.at[1:],), (t,))[1], 10)
    same(t[...], [5, 7])


def test_linearize(w, n):
    def f(w, x):
        n[...] += 1
        return swap_ends(w, x)

    out, f_jvp = refs.linearize(f, w, 2.0)
    same(out, by_hand(W, 2.0))
    for tangents in [(jnp.ones(3), 0.0), (jnp.zeros(3), 1.0)]:
        same(f_jvp(*tangents), jax.jvp(by_hand, (W, 2.0), tangents)[1])
    assert n[...] == 1
    *_, aux = refs.linearize(lambda x: (x, w), 1.0, has_aux=True)
    assert aux is w


def test_linearize_inside_a_scan(w, n):
    def program(xs):
        def step(total, x):
            n[...] += 1
            w[...] = W
            _, f_jvp = refs.linearize(lambda x: swap_ends(w, x).sum(), x)
            return total + f_jvp(1.0), None

        return refs.scan(step, 0.0, xs)[0]

    xs = jnp.array([0.5, 2.0])
    want = sum(jax.grad(lambda x: by_hand(W, x).sum())(x) for x in xs)
    same(program(xs), want, rtol=1e-6)
    same(refs.jit(program)(xs), want, rtol=1e-6)
    assert n[...] == 4


@pytest.mark.parametrize("name", ["jacfwd", "jacrev"])
@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_jacobians(name, argnums, w):
    got = getattr(refs, name)(swap_ends, argnums)(w, 2.0)
    jax.tree.map(same, got, getattr(jax, name)(by_hand, argnums)(W, 2.0))
    same(w[...], [6, 2, 3])


def test_second_derivatives(jit, w, n):
    def f(w, x):
        n[...] += 1
        return {"sum": swap_ends(w, x).sum()}

    def hand(w, x):
        return {"sum": by_hand(w, x).sum()}

    for count, (ours, theirs) in enumerate(
        [
            (refs.hessian(f, (0, 1)), jax.hessian(hand, (0, 1))),
            (refs.jacrev(refs.jacfwd(f)), jax.jacrev(jax.jacfwd(hand))),
        ],
        start=1,
    ):
        w[...] = W
        jax.tree.map(lambda a, b: same(a, b, rtol=1e-6), jit(ours)(w, 2.0), theirs(W, 2.0))
        assert n[...] == count


def test_the_jacobian_of_a_view_and_auxiliary_data(w):
    jacobian, aux = refs.jacrev(lambda v: (jnp.outer(v.get(), v.get()), w), has_aux=True)(w.at[:2])
    same(jacobian, jax.jacrev(lambda v: jnp.outer(v, v))(W[:2]))
    assert aux is w
    hessian = refs.hessian(lambda v: (v.get() ** 3).sum())(w.at[1:])
    same(hessian, [[12, 0], [0, 18]])


def weighted(a, b):
    return (a[...] * jnp.array([1.0, 2.0])).sum() + (b[...] * jnp.array([10.0, 20.0])).sum()


@pytest.mark.parametrize(
    "views",
    [
        (np.s_[0:2], np.s_[1:3]),
        (np.s_[::2], np.s_[:-1]),
        (np.array([0, 0]), np.array([2, 0])),
    ],
    ids=["overlapping", "strided", "twice"],
)
def test_tangents_of_views_are_the_adjoint_of_their_cotangents(views):
    w = refs.new_ref(jnp.arange(1.0, 4))
    a, b = (w.at[v] for v in views)
    tangents = jnp.array([1.0, 10.0]), jnp.array([100.0, 1000.0])
    cotangents = refs.vjp(weighted, a, b)[1](1.0)
    expected = sum((ct * t).sum() for ct, t in zip(cotangents, tangents, strict=True))
    assert refs.jvp(weighted, (a, b), tangents)[1] == expected
    assert refs.linearize(weighted, a, b)[1](*tangents) == expected


def test_the_tangent_of_a_view_in_a_ref():
    w, t = refs.new_ref(jnp.array([1.0, 2.0])), refs.new_ref(jnp.array([10.0, 20.0]))

    def double_and_read(v):
        v.multiply(2.0)
        return v[0]

    assert refs.jvp(double_and_read, (w.at[::-1],), (t,)) == (4, 20)
    np.testing.assert_array_equal(t[...], [20, 40])


def test_tangents_of_views_of_other_types():
    ints = refs.new_ref(jnp.ones(3, int))
    none = np.zeros(2, jax.dtypes.float0)
    assert refs.jvp(lambda v: v[...].sum() * 1.0, (ints.at[:2],), (none,)) == (2, 0)
    small = refs.new_ref(jnp.ones(3, jnp.bfloat16))
    assert refs.jvp(lambda v: v[...], (small.at[1],), (3.0,)) == (1, 3)
