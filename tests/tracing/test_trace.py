"""refs.make_jaxpr: what is an input, what is a constant, what comes back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from refs import _jax
from refs._discharge.discharge import Program

X = np.arange(3, dtype=np.float32)


def ref_inputs(jaxpr):
    return [v for v in jaxpr.jaxpr.invars if _jax.is_ref_type(v.aval)]


def ref_constants(jaxpr):
    """The refs that a jaxpr closes over, those that inner jaxprs hold included."""
    return Program.of(jaxpr).refs


def test_refs_come_first_then_the_other_leaves():
    r, s = refs.new_ref(X), refs.new_ref(jnp.int32(1))
    jaxpr = refs.make_jaxpr(lambda a, tree, *, k: tree["r"][0] + a + k[1][...])(
        2.0, {"r": r, "y": np.int8(3)}, k=(4, s)
    )
    avals = [v.aval for v in jaxpr.jaxpr.invars]
    assert [_jax.is_ref_type(a) for a in avals] == [True, True, False, False, False]
    assert [a.dtype for a in avals] == ["float32", "int32", "float32", "int8", "int32"]
    assert [a.shape for a in avals] == [(3,), (), (), (), ()]
    assert not ref_constants(jaxpr)


def test_the_same_ref_several_times_is_one_input():
    r, s = refs.new_ref(X), refs.new_ref(X)

    def program(a, b, c, d):
        a[0] += 1
        b[0] *= 2
        assert a is b is d
        assert c is not a

    jaxpr = refs.make_jaxpr(lambda a, b, c, d: program(a, b[0], c, d["k"]))(r, [r], s, {"k": r})
    assert len(ref_inputs(jaxpr)) == 2
    out = jax.core.eval_jaxpr(refs.discharge(jaxpr).jaxpr, [], X, X)
    np.testing.assert_array_equal(out[0], [2, 1, 2])
    np.testing.assert_array_equal(out[1], X)


def test_native_refs():
    r = jax.new_ref(X)
    jaxpr = refs.make_jaxpr(lambda a, b: a.at[::-1].set(b[...] + 1))(r, r)
    assert len(ref_inputs(jaxpr)) == 1
    [out] = jax.core.eval_jaxpr(refs.discharge(jaxpr).jaxpr, [], X)
    np.testing.assert_array_equal(out, [3, 2, 1])


def bump(r):
    r[0] += 1
    return 0.0


def checkpointed(r):
    jax.checkpoint(r.at[0].add)(1.0)


def in_custom_jvp(r):
    f = jax.custom_jvp(lambda x: x * r[0])
    f.defjvp(lambda p, t: (f(*p), t[0]))
    return f(1.0)


def in_composite(r):
    return lax.composite(lambda x: x * r[0], "name")(1.0)


def in_metadata(r):
    """The newest JAX leaves the ref a constant of the inner jaxpr; the oldest has no such call."""
    from jax.experimental import xla_metadata

    if not hasattr(xla_metadata, "xla_metadata_call"):
        pytest.skip("no such primitive here")
    return xla_metadata.xla_metadata_call(lambda x: x * r[0], k="v")(1.0)


DEPTHS = {
    "at the top": bump,
    "jit": lambda r: jax.jit(lambda: bump(r))(),
    "jit in jit": lambda r: jax.jit(jax.jit(lambda: bump(r)))(),
    "refs.jit": lambda r: refs.jit(lambda: bump(r))(),
    "cond": lambda r: lax.cond(True, lambda: bump(r), lambda: 0.0),
    "switch": lambda r: lax.switch(1, [lambda: 0.0, lambda: bump(r)]),
    "scan": lambda r: lax.scan(lambda c, _: (c + bump(r), None), 0.0, length=2),
    "while": lambda r: lax.while_loop(lambda c: r[0] < 3, lambda c: bump(r), 0.0),
    "predicate": lambda r: lax.while_loop(lambda c: r[0] < c, lambda c: c - 1, 0.0),
    "fori": lambda r: lax.fori_loop(0, jnp.int32(3), lambda i, c: bump(r), 0.0),
    "map": lambda r: lax.map(lambda x: x + bump(r), X),
    "checkpoint": checkpointed,
    "custom_jvp": in_custom_jvp,
    "composite": in_composite,
    "metadata": in_metadata,
}


@pytest.mark.parametrize("program", DEPTHS.values(), ids=DEPTHS.keys())
def test_refs_closed_over_at_any_depth_are_constants(program):
    r, unused = refs.new_ref(X, name="r"), refs.new_ref(X)
    jaxpr = refs.make_jaxpr(lambda: (program(r), unused)[0])()
    assert [c is r for c in ref_constants(jaxpr)] == [True]
    np.testing.assert_array_equal(r[...], X)
    pure = refs.discharge(jaxpr)
    assert len(pure.jaxpr.invars) == 1


def test_refs_closed_over_in_several_places_are_one_constant():
    r, s = refs.new_ref(X), refs.new_ref(X)

    def program():
        bump(r)
        lax.cond(s[0] > 0, lambda: bump(r), lambda: bump(s))
        jax.jit(lambda: bump(s))()

    assert {id(c) for c in ref_constants(refs.make_jaxpr(program)())} == {id(r), id(s)}
    assert len(ref_constants(refs.make_jaxpr(program)())) == 2


def fail(r, x):
    r[0] = x
    jax.jit(lambda: bump(r))()
    raise ZeroDivisionError("on purpose")


@pytest.mark.as_released
@pytest.mark.parametrize(
    "trace", [refs.make_jaxpr, refs.jit, lambda f: refs.jit(f).lower, lambda f: refs.jit(f).trace]
)
@pytest.mark.parametrize("closed_over", [False, True])
def test_a_trace_that_raises_leaves_refs_untouched(trace, closed_over):
    r = refs.new_ref(X, name="r")
    pointer = r.unsafe_buffer_pointer()
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        if closed_over:
            trace(functools.partial(fail, r))(5.0)
        else:
            trace(fail)(r, 5.0)
    np.testing.assert_array_equal(r[...], X)
    assert r.unsafe_buffer_pointer() == pointer
    r[1] = 7  # and it goes on working
    refs.jit(lambda: bump(r))()
    np.testing.assert_array_equal(r[...], [1, 7, 2])


def test_nothing_runs():
    seen = []
    r = refs.new_ref(X)

    def program():
        r[0] = 100
        jax.debug.callback(seen.append, r[0])
        return r[0]

    refs.make_jaxpr(program)()
    refs.jit(program).lower()
    refs.jit(program).eval_shape()
    jax.effects_barrier()
    assert not seen
    np.testing.assert_array_equal(r[...], X)


def test_returned_refs():
    r, outer = refs.new_ref(X, name="r"), refs.new_ref(X, name="outer")

    def program(a):
        new = refs.new_ref(a[0] * 2)
        new[...] += 1
        return a, a[1], {"outer": outer, "new": new, "again": new}, outer[0]

    jaxpr = refs.make_jaxpr(program)(r)
    # The two arrays, then the final value of the one new ref.
    assert [v.aval.str_short() for v in jaxpr.jaxpr.outvars] == ["float32[]"] * 3
    values = np.float32([4, 5, 6]), X
    by_input = [values[1], values[0]] if ref_constants(jaxpr) else [values[0]]
    out = jax.core.eval_jaxpr(refs.discharge(jaxpr).jaxpr, [], *by_input)
    assert [float(v) for v in out[:3]] == [5, 0, 9]


def test_closed_over_arrays_and_refs_stay_apart():
    r, big = refs.new_ref(X), jnp.arange(3.0) + 1

    def program():
        r[...] += big

    jaxpr = refs.make_jaxpr(program)()
    pure = refs.discharge(jaxpr)
    assert len(pure.jaxpr.invars) == 1
    [out] = jax.core.eval_jaxpr(pure.jaxpr, pure.consts, X)
    np.testing.assert_array_equal(out, X + big)


def test_within_another_trace_outer_refs_are_constants():
    r = refs.new_ref(X)
    seen = []

    def outer(x):
        inner = refs.make_jaxpr(r.at[0].set)(x)
        seen.append(inner)
        return x

    jax.make_jaxpr(outer)(1.0)
    assert len(ref_constants(seen[0])) == 1


def test_weak_types_and_shapes_of_arguments_survive():
    jaxpr = refs.make_jaxpr(lambda x, y: (x, y))(2.0, np.float32(2))
    assert [v.aval.weak_type for v in jaxpr.jaxpr.invars] == [True, False]
    pure = refs.discharge(jaxpr)
    assert [v.aval.weak_type for v in pure.jaxpr.invars] == [True, False]


def test_abstract_arguments():
    r = refs.new_ref(X)
    jaxpr = refs.make_jaxpr(lambda r, x: r.at[...].set(x))(
        r, jax.ShapeDtypeStruct((3,), jnp.float32)
    )
    assert len(jaxpr.jaxpr.invars) == 2


@pytest.mark.as_released
def test_names_and_functions_survive():
    def my_function(r):
        bump(r)

    lowered = refs.jit(my_function).lower(refs.new_ref(X))
    assert "my_function" in lowered.as_text()


def test_make_jaxpr_has_the_keywords_of_jax():
    r = refs.new_ref(jnp.zeros(3))

    def f(r, n, x):
        r[...] += x * n
        return r[...], refs.new_ref(x), r

    jaxpr, shapes = refs.make_jaxpr(f, static_argnums=1, return_shape=True)(r, 3, jnp.float32(2))
    assert [(a.shape, a.dtype) for a in jaxpr.in_avals] == [((3,), r.dtype), ((), r.dtype)]
    of_value, of_new, same = shapes
    assert of_value == jax.ShapeDtypeStruct((3,), jnp.float32)
    assert of_new == jax.ShapeDtypeStruct((), jnp.float32, is_ref=True)
    assert same is r
    [out] = refs.make_jaxpr(lambda x: jax.lax.psum(x, "i"), axis_env=[("i", 2)])(1.0).out_avals
    assert out.shape == ()
