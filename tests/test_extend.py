"""Rules of primitives that aren't JAX's, in lanes: see docs/extending.md for the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

import refs
from refs import extend
from refs.errors import RefValueError

# Multiplies a ref by a number, in place.
scale_p = Primitive("scale")
scale_p.multiple_results = True
scale_p.def_abstract_eval(lambda ref, factor: [])


@extend.register(scale_p)
def discharge_scale(ctx, eqn, args):
    cell, factor = args
    cell.write(cell.read() * factor)
    return []


def scale(ref, factor):
    scale_p.bind(ref, factor)


# Runs a jaxpr as many times as the first array among its operands says.
repeat_p = Primitive("repeat")
repeat_p.multiple_results = True
repeat_p.def_abstract_eval(lambda *args, jaxpr: [])


@extend.register(repeat_p)
def discharge_repeat(ctx, eqn, args):
    jaxpr = eqn.params["jaxpr"]
    scope = ctx.scope((jaxpr, args))
    arrays, constants = extend.split(args), scope.constants

    def body(_, state):
        return scope.run(jaxpr, extend.merge(args, arrays), state, constants)[1]

    scope.update(lax.fori_loop(0, next(a for a in arrays if a is not None), body, scope.state))
    return []


def repeat(times, f, held, x):
    def once(held, times, x):
        f(*held, x)

    repeat_p.bind(*held, times, x, jaxpr=refs.make_jaxpr(once)(held, times, x))


X = np.arange(1, 4)


def test_on_a_lanes_own_ref(jit):
    r = refs.new_ref(jnp.ones((3, 2), int))
    jit(refs.vmap(scale))(r, X)
    assert r[...].tolist() == [[1, 1], [2, 2], [3, 3]]


def test_where_lanes_part(jit):
    r = refs.new_ref(jnp.ones((3, 2), int))

    def lane(row, x):
        lax.cond(x > 1, lambda: scale(row, x), lambda: None)

    jit(refs.vmap(lane))(r, X)
    assert r[...].tolist() == [[1, 1], [2, 2], [3, 3]]


@pytest.mark.parametrize("factor", [lambda x: 2, lambda x: x], ids=["same", "own"])
def test_a_shared_ref_that_it_reads_and_writes(factor):
    r = refs.new_ref(jnp.ones(2, int), name="r")
    with pytest.raises(RefValueError, match="use of what other lanes write to ref `r`"):
        refs.vmap(lambda x: scale(r, factor(x)))(X)

    def after_overwriting(x):
        r[...] = jnp.ones(2, int)
        scale(r, factor(x))

    if factor(5) == 2:
        refs.vmap(after_overwriting)(X)
        assert r[...].tolist() == [2, 2]
    else:
        with pytest.raises(RefValueError, match="lane-dependent write to ref `r`"):
            refs.vmap(after_overwriting)(X)


def test_a_jaxpr_that_lanes_run_more_or_less_often(jit):
    r, total = refs.new_ref(jnp.zeros(3, int)), refs.new_ref(0, name="total")

    def add(r, x):
        r[...] += x

    jit(refs.vmap(lambda row, x: repeat(x, add, [row], x)))(r, X)
    assert r[...].tolist() == [1, 4, 9]
    jit(refs.vmap(lambda x: repeat(2, add, [total], x)))(X)
    assert total[...] == 12


def test_a_shared_ref_written_in_a_jaxpr_that_lanes_run_more_or_less_often():
    total = refs.new_ref(0, name="total")

    def overwrite(r, x):
        r[...] = 7

    with pytest.raises(RefValueError, match="lane-dependent write to ref `total`"):
        refs.vmap(lambda x: repeat(x, overwrite, [total], 1))(X)


def test_what_a_later_run_of_a_jaxpr_makes_of_an_earlier_one():
    """A lane's own ref differs from lane to lane only after the first run."""
    total = refs.new_ref(0, name="total")

    def lane(x):
        n, m = refs.new_ref(0), refs.new_ref(0)

        def body(n, m, x):
            lax.cond(n[...] > 1, lambda: total.set(9), lambda: None)
            n[...] = m[...]
            m[...] = x

        repeat(3, body, [n, m], x)

    with pytest.raises(RefValueError, match="lane-dependent write to ref `total`"):
        refs.vmap(lane)(X)


# --- Effects ------------------------------------------------------------------------------------

# Sums up the first ref, into the second, if there is one.
total_p = Primitive("total")
total_p.multiple_results = True


@total_p.def_effectful_abstract_eval
def total_types(source, *target):
    effects = {extend.ReadEffect(0)}
    if target:
        effects |= {extend.WriteEffect(1)}
    return [jax.core.ShapedArray((), source.dtype)], effects


@extend.register(total_p)
def discharge_total(ctx, eqn, args):
    source, *targets = args
    total = jnp.sum(source.read())
    for target in targets:
        target.write(target.read() + total)
    return [total]


def total(*given):
    return total_p.bind(*given)[0]


def is_donated(f, *args):
    return "aliasing_output" in refs.jit(f).lower(*args).as_text()


def test_a_ref_that_effects_say_is_read_is_not_written():
    r, s = refs.new_ref(jnp.arange(3)), refs.new_ref(0)
    assert not is_donated(total, r)
    assert refs.jit(total)(r) == 3
    assert is_donated(total, r, s)
    refs.fori_loop(0, 2, lambda i, _: total(r, s), 0)
    assert s[...] == 6
    assert refs.checkpoint(total)(r) == 3


def test_a_shared_ref_that_effects_say_is_read(jit):
    r, rows = refs.new_ref(jnp.arange(3), name="r"), refs.new_ref(jnp.zeros(3, int))

    def lane(row, x):
        return x + total(r, row)

    assert jit(refs.vmap(lane))(rows, X).tolist() == [4, 5, 6]
    assert rows[...].tolist() == [3, 3, 3]
    jit(refs.vmap(lambda row, x: lax.cond(x > 1, lambda: lane(row, x), lambda: 0)))(rows, X)
    assert rows[...].tolist() == [3, 6, 6]
    with pytest.raises(RefValueError, match="use of what other lanes write to ref `r`"):
        refs.vmap(lambda row: total(row, r))(rows)


def test_the_same_ref_read_and_written():
    r = refs.new_ref(2)
    assert refs.jit(lambda: total(r, r))() == 2
    assert r[...] == 4
