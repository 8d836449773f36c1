"""What derivative rules say of a ref argument, also of one that their function doesn't touch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from refs import errors
from refs._discharge.interpreter import Context

same = np.testing.assert_allclose
XS = jnp.array([1.0, 2.0, 3.0])


def ref(value=0.0):
    return refs.new_ref(jnp.float32(value))


def with_vjp(effect, cotangent, forward_effect=None):
    """x -> 2x, with an effect on a ref whose cotangent the rule says."""

    @jax.custom_vjp
    def f(x, r):
        effect(x, r)
        return 2 * x

    def forward(x, r):
        (forward_effect or effect)(x, r)
        return 2 * x, None

    f.defvjp(forward, lambda _, g: (2 * g, cotangent(g)))
    return f


def nothing(x, r):
    pass


def add(x, r):
    r[...] += x


# --- custom_vjp ---


@pytest.mark.parametrize("effect", [add, nothing])
@pytest.mark.parametrize("cotangent", [lambda g: 5 * g, lambda g: jnp.float32(5)])
def test_a_cotangent_of_a_ref(jit, effect, cotangent):
    f = with_vjp(effect, cotangent)
    assert jit(refs.grad(f, (0, 1)))(1.0, ref()) == (2, 5)
    for g in (refs.jit(f), jax.jit(f), refs.checkpoint(f)):
        assert jit(refs.grad(g, (0, 1)))(1.0, ref()) == (2, 5)

    def lanes(xs, r):
        return refs.vmap(f, in_axes=(0, None))(xs, r).sum()

    of_x, of_r = jit(refs.grad(lanes, (0, 1)))(XS, ref())
    same(of_x, [2, 2, 2])
    same(of_r, 15)

    def steps(x, r):
        return lax.scan(lambda c, _: (f(c, r) / 2, None), x, None, length=3)[0]

    of_x, of_r = jit(refs.grad(steps, (0, 1)))(1.0, ref())
    assert of_x == 1
    assert of_r in (7.5, 15)


def test_each_lane_has_its_cotangent(jit):
    f = with_vjp(nothing, lambda g: 5 * g)
    rows = refs.new_ref(jnp.zeros(3))
    _, of_rows = jit(refs.grad(lambda xs, r: (XS * refs.vmap(f)(xs, r)).sum(), (0, 1)))(XS, rows)
    same(of_rows, 5 * XS)
    _, of_r = jit(refs.vmap(refs.grad(f, (0, 1)), in_axes=(0, None)))(XS, ref())
    same(of_r, [5, 5, 5])


def test_only_lanes_that_take_part_have_a_cotangent(jit):
    f = with_vjp(add, lambda g: jnp.float32(5))

    def lanes(r):
        return refs.vmap(lambda x: lax.cond(x > 1.5, lambda x: f(x, r), lambda x: x, x))(XS).sum()

    assert jit(refs.grad(lanes))(ref()) == 10


def test_a_cotangent_of_a_row(jit):
    f = with_vjp(add, lambda g: 5 * g)

    def steps(rows):
        return lax.scan(lambda c, row: (c, f(row[...], row)), 0.0, rows)[1] @ XS

    same(jit(refs.grad(steps))(refs.new_ref(jnp.ones(3))), 7 * XS)


def test_a_forward_rule_that_touches_what_its_function_only_takes(jit):
    f = with_vjp(nothing, lambda g: 5 * g, add)
    r = ref(1)
    assert jit(refs.grad(f, (0, 1)))(3.0, r) == (2, 5)
    assert r[...] == 4
    assert jit(refs.grad(lambda x, r: f(x, r) + 10 * r[...], (0, 1)))(3.0, r) == (2, 15)
    assert r[...] == 7


def test_pure_functions_have_such_cotangents_too():
    pure = refs.functionalize(lambda r, x: with_vjp(nothing, lambda g: 5 * g)(x, r))
    assert jax.grad(lambda s, x: pure(s, x)[0], (0, 1))(jnp.float32(0), 1.0) == (5, 2)


# --- custom_jvp ---


def test_a_dictionary_of_refs_of_which_one_is_not_touched(jit):
    @jax.custom_jvp
    def layer(x, stats):
        stats["n"][...] += 1
        return jnp.sin(x)

    @layer.defjvp
    def rule(primals, tangents):
        layer(*primals)
        return jnp.sin(primals[0]), jnp.cos(primals[0]) * tangents[0]

    stats = {"n": ref(), "cache": refs.new_ref(jnp.ones(2))}
    same(jit(refs.grad(layer))(1.0, stats), np.cos(1), rtol=1e-6)
    assert stats["n"][...] == 1
    same(jit(refs.vmap(refs.grad(layer), in_axes=(0, None)))(XS, stats), np.cos(XS), rtol=1e-6)
    assert stats["n"][...] == 4
    lanes = refs.vmap(layer, in_axes=(0, None))
    same(jit(refs.grad(lambda xs: lanes(xs, stats).sum()))(XS), np.cos(XS), rtol=1e-6)
    assert stats["n"][...] == 7


@jax.custom_jvp
def add_square(x, r):
    r[...] += x * x
    return x


@add_square.defjvp
def add_square_rule(primals, tangents):
    (x, r), (dx, dr) = primals, tangents
    r[...] += x * x
    dr[...] += 2 * x * dx
    return x, dx


def test_what_a_rule_adds_to_a_tangent_arrives(jit):
    def after(of):
        return lambda x, r: of(x, r).sum() + 10 * r[...]

    assert jit(refs.grad(after(add_square), (0, 1)))(2.0, ref()) == (41, 10)
    lanes = refs.vmap(add_square, in_axes=(0, None))
    of_x, of_r = jit(refs.grad(after(lanes), (0, 1)))(XS, ref())
    same(of_x, 1 + 20 * XS)
    assert of_r == 10
    both_of = refs.jvp(after(lanes), (XS, ref(1)), (jnp.ones(3), jnp.float32(1)))
    same(both_of[1], 3 + 20 * 6 + 10)


def test_the_tangent_of_a_ref_that_the_function_only_takes(jit):
    f = jax.custom_jvp(lambda x, r: x)

    @f.defjvp
    def rule(primals, tangents):
        tangents[1].at[...].add(2 * tangents[0])
        return primals[0], tangents[0]

    assert jit(refs.grad(lambda x, r: f(x, r) + 10 * r[...], (0, 1)))(2.0, ref()) == (21, 10)


def test_the_tangent_of_a_ref_that_the_function_only_reads():
    f = jax.custom_jvp(lambda x, r: x * r[...])

    @f.defjvp
    def rule(primals, tangents):
        tangents[1][...] = 0.0
        return f(*primals), tangents[0]

    with pytest.raises(errors.RefStateError, match="custom rule may not write it either"):
        refs.grad(f)(1.0, ref())


def test_a_tangent_that_the_rule_leaves_alone_goes_with_the_contents(jit):
    @jax.custom_jvp
    def halve(x, r):
        r[...] *= 0.5
        return x

    halve.defjvp(lambda p, t: (halve(*p), t[0]))

    def after(r):
        halve(1.0, r)
        return 10 * r[...]

    assert jit(refs.grad(after))(ref(1)) == 5
    assert jit(refs.grad(lambda r: lax.cond(True, after, after, r)))(ref(1)) == 5
    rows = refs.new_ref(jnp.ones(3))
    same(jit(refs.grad(lambda r: refs.vmap(after)(r).sum()))(rows), [5, 5, 5])

    @halve.defjvp
    def rule(p, t):
        t[1][...] = 7 * t[1][...]
        return halve(*p), t[0]

    assert jit(refs.grad(after))(ref(1)) == 70


def test_a_tangent_can_be_indexed_as_the_ref_can(jit):
    def step(x, r):
        r[::-1] = x * r[...]
        r.at[jnp.array([0, 0])].add(x)
        r[np.zeros(3, bool)] = 0
        r[1:] += x
        return r[-1]

    @jax.custom_jvp
    def f(x, r):
        return step(x, r)

    @f.defjvp
    def rule(primals, tangents):
        (x, r), (dx, dr) = primals, tangents
        dr[::-1] = x * dr[...] + dx * r[...]
        dr.at[jnp.array([0, 0])].add(dx)
        dr[np.zeros(3, bool)] = 0
        dr[1:] += dx
        out = step(x, r)
        return out, dr[-1]

    r, dr = refs.new_ref(XS), refs.new_ref(jnp.ones(3))
    want, d_want = refs.new_ref(XS), refs.new_ref(jnp.ones(3))
    out = jit(lambda: refs.jvp(f, (2.0, r), (1.0, dr)))()
    same(out, refs.jvp(step, (2.0, want), (1.0, d_want)))
    same(r[...], want[...])
    same(dr[...], d_want[...])


@pytest.mark.parametrize("lanes", [False, True])
def test_a_loop_in_which_the_ref_is_differentiated_from_the_second_step_on(lanes, jit):
    """JAX traces the forward rule for each set of flags, the first of them once more at the end."""

    def program(r, x):
        @jax.custom_vjp
        def f(r, x):
            r[0] += x
            return x * r[1]

        f.defvjp(lambda r, x: (f(r, x), r[1]), lambda saved, g: (None, 2 * g * saved))
        return jax.lax.fori_loop(0, 3, lambda i, x: f(r, x), x)

    def run(x):
        if lanes:
            rows = refs.new_ref(jnp.ones((2, 3)))
            return refs.vmap(program)(rows, jnp.stack([x, x + 1])).sum()
        return program(refs.new_ref(jnp.ones(3)), x)

    assert jit(refs.grad(run))(1.0) == (16 if lanes else 8)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["alone", "in a checkpoint"])
def test_a_tangent_that_the_rule_reads_and_does_not_write(wrap, jit):
    @jax.custom_jvp
    def f(r, x):
        r[0] = 1.0
        return x * r[1]

    @f.defjvp
    def rule(primals, tangents):
        (r, x), (r_dot, x_dot) = primals, tangents
        return f(r, x), x_dot * r[1] + x * r_dot[1]

    def cubed(r):
        return wrap(lambda x: f(r, x) ** 3)(1.0)

    same(jit(refs.grad(cubed))(refs.new_ref(jnp.array([0.0, 2.0]))), [0, 12])


def test_a_rule_touches_the_row_that_its_function_does_not_touch(jit):
    rows = refs.new_ref(jnp.zeros(3), name="rows")

    def lane(row, x):
        f = jax.custom_vjp(lambda x: x * 2)

        def forward(x):
            row[...] += 1
            return x * 2, None

        f.defvjp(forward, lambda _, g: (3 * g,))
        return f(x)

    with pytest.raises(errors.RefStateError, match=r"`rows`.*touch the ref there too"):
        jit(refs.grad(lambda xs: refs.vmap(lane)(rows, xs).sum()))(XS)
    same(rows[...], np.zeros(3))


def test_a_rule_touches_a_ref_that_nothing_around_it_knows():
    with pytest.raises(errors.RefStateError, match=r"rule touches ref `far`.*touch the ref there"):
        Context().resolve(refs.new_ref(0.0, name="far"))
