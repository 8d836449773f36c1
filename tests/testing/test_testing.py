"""`refs.testing`: what holds, what doesn't, and what a check leaves behind."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from refs.testing import _derivatives, check_transforms
from refs.testing import transforms as laws

ALL = list(laws._LAWS)
X = np.float32([0.3, -0.8, 1.2])


def ref(x=X, name="r"):
    return refs.new_ref(x, name=name)


@pytest.mark.slow
def test_every_law_holds_of_a_function_of_refs_arrays_and_a_counter():
    weights, state, n = ref(), ref(X + 1), ref(np.int32(0), "n")

    def f(x, tree):
        n[...] += 1
        state[0] += jnp.sum(x)
        tree["w"][1] = tree["w"][0] * x[0]
        refs.fori_loop(0, 2, lambda k, _: tree["w"].at[k].multiply(1.5), None)
        return {"out": jnp.sin(x) * tree["w"][...], "made": refs.new_ref(x), "k": tree["k"] + 1}

    said = check_transforms(f, X, {"w": weights, "k": 3})
    assert said == dict.fromkeys(ALL, "holds")
    for r, held in ((weights, X), (state, X + 1), (n, 0)):
        np.testing.assert_array_equal(r[...], held)


def test_a_ref_that_stands_in_several_places():
    r = ref()

    def f(a, b, x):
        a[0] += x
        b[0] *= 2
        return r[0]

    said = check_transforms(f, r, r, 2.0)
    assert "closed over" in said.pop("vmap")
    assert set(said.values()) == {"holds"}


@pytest.mark.parametrize(
    ("f", "args", "law", "why"),
    [
        (lambda r, x: r.__setitem__(0, x), (2.0,), "vmap", "depend on the order of the 2 lanes"),
        (lambda r: r.__setitem__(0, 1), (), "vmap", "no arguments to map over"),
    ],
)
def test_laws_that_say_nothing(f, args, law, why):
    r = ref()
    said = check_transforms(lambda *args: f(r, *args), *args)
    assert why in said.pop(law)
    assert set(said.values()) == {"holds"}


def test_without_derivatives():
    n = ref(np.int32(0), "n")
    said = check_transforms(lambda k: refs.addupdate(n, ..., k), 2)
    smooth = [law for law, words in said.items() if "inexact" in words]
    assert smooth == ALL[ALL.index("jvp") :]


def test_lanes_with_other_arguments():
    r = ref()

    def f(x, k):
        return refs.cond(k > 0, lambda: r[0] * x, lambda: x)

    said = check_transforms(f, X, 1, other_args=(X + 1, -1), laws=["vmap"])
    assert said == {"vmap": "holds"}


def fails(law, f, *args, match):
    r"""The law, and only what `match` says of it."""
    with pytest.raises(AssertionError, match=match) as caught:
        check_transforms(f, *args, laws=[law])
    return caught


def test_a_function_that_knows_how_often_it_was_called():
    count = itertools.count(1)
    fails("jit", lambda x: x * next(count), X, match="jit: result after call")


def test_a_function_that_is_another_in_a_trace():
    r = ref()

    def f(x):
        r[0] = 1.0 if isinstance(x, jax.core.Tracer) else 2.0

    for law in ("jit", "checkpoint", "functionalize"):
        match = rf"^{law}: ref `r` \(created at .*\).* is .*, and should be .*: they differ by 1"
        fails(law, f, X, match=match)
        np.testing.assert_array_equal(r[...], X)


def test_a_wrong_rule_of_a_map():
    @jax.custom_batching.custom_vmap
    def double(x):
        return 2 * x

    @double.def_vmap
    def wrong(size, batched, x):
        return 3 * x, True

    fails("vmap", double, X, match="^vmap: result is")


def test_a_wrong_derivative_rule():
    @jax.custom_jvp
    def square(x):
        return x**2

    square.defjvp(lambda primals, tangents: (square(*primals), tangents[0]))
    said = check_transforms(square, X, laws=[law for law in ALL if law != "quotients"])
    assert set(said.values()) == {"holds"}
    with pytest.raises(AssertionError, match=r"^quotients: .* by argument\[0\] is wrong") as caught:
        check_transforms(square, X)
    assert caught.value.__notes__ == ["While check_transforms checked 'quotients'."]


def test_a_wrong_derivative_by_a_ref():
    @jax.custom_jvp
    def square(x):
        return x**2

    square.defjvp(lambda primals, tangents: (square(*primals), tangents[0]))
    r = ref()
    with pytest.raises(AssertionError, match=r"^quotients: the derivative by ref `r` \(created at"):
        check_transforms(lambda x: x * square(r[...]), X)


@pytest.mark.parametrize("law", ["jvp", "linearize", "vjp", "vjp of jit", "jit of vjp"])
def test_a_wrong_derivative(law, monkeypatch):
    """If a transformation of ours were wrong, its law would say so."""
    r = ref()

    def f(x):
        r[...] *= x
        return x

    def jvp(fun, primals, tangents, has_aux):
        return refs.jvp(fun, primals, jax.tree.map(lambda t: 2 * t, tangents), has_aux)

    def linearize(fun, *primals, has_aux):
        out, pushforward, aux = refs.linearize(fun, *primals, has_aux=has_aux)
        return out, lambda *ts: pushforward(*jax.tree.map(lambda t: 2 * t, ts)), aux

    def vjp(fun, *primals, has_aux):
        out, pullback, aux = refs.vjp(fun, *primals, has_aux=has_aux)
        return out, lambda ct: pullback(jax.tree.map(lambda t: 2 * t, ct)), aux

    for wrong in (jvp, linearize, vjp):
        monkeypatch.setattr(_derivatives, wrong.__name__, wrong)
    fails(law, f, X, match=rf"^{law}: the (tangent of result 0|gradient of ref `r` .*) is")
    np.testing.assert_array_equal(r[...], X)


def test_a_law_looks_at_the_state(monkeypatch):
    r = ref()

    def vjp(fun, *primals, has_aux):
        result = refs.vjp(fun, *primals, has_aux=has_aux)
        r[0] += 1
        return result

    monkeypatch.setattr(_derivatives, "vjp", vjp)
    fails("vjp", lambda x: r[...] * x, X, match="vjp: ref `r` .* they differ by (1|0.99)")


def test_tolerances():
    count = itertools.count()
    almost = {"laws": ["jit"], "rtol": 0.1}
    assert check_transforms(lambda x: x + 0.001 * next(count), X, **almost) == {"jit": "holds"}
    fails("jit", lambda x: x + 0.01 * next(count), X, match="they differ by 0.0")
    # Integers must be equal, and types too.
    fails("jit", lambda x: next(count), X, match="they must be equal")
    traced = jax.core.Tracer

    def f(x):
        return jnp.float16(0) if isinstance(x, traced) else jnp.float32(0)

    fails("jit", f, X, match=r"float16\[\] instead of float32\[\]")


def test_what_a_function_raises_comes_through():
    r = ref()

    def f(x):
        r[...] = 0
        return lax.cond(x, lambda: 1, lambda: 2.0)

    with pytest.raises(TypeError):
        check_transforms(f, True)
    np.testing.assert_array_equal(r[...], X)


def test_keys_and_small_numbers():
    key = refs.new_ref(jax.random.key(0))

    def noisy(x):
        key[...], sub = jax.random.split(key[...])
        return x + jax.random.uniform(sub)

    said = check_transforms(noisy, X, laws=["jit", "functionalize", "vjp"])
    assert set(said.values()) == {"holds"}
    said = check_transforms(lambda x: x.astype(jnp.bfloat16) * 3, X, laws="quotients")
    assert "16 bits" in said["quotients"]


def test_a_view_as_argument():
    said = check_transforms(lambda v: v.multiply(2.0), ref().at[1:])
    assert "can't be mapped" in said.pop("vmap")
    assert set(said.values()) == {"holds"}


def test_quotients_of_large_values_may_be_less_exact():
    log = refs.new_ref(jnp.array([300.0, 0.0]))

    def step(x):
        log.at[0].add(x[0])
        return x * 2

    refs.testing.check_transforms(step, jnp.array([1.0, 2.0, 3.0]))
