"""What JAX's transformations take, ours take, and what `jax.vjp` gives has, ours has."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs import _jax
from refs.errors import RefValueError

same = np.testing.assert_allclose

# `refs.jit` has a table of its own. These mean nothing any more in JAX:
GONE = {("checkpoint", "concrete"), ("remat", "concrete")}
TRANSFORMATIONS = [
    "checkpoint",
    "grad",
    "hessian",
    "jacfwd",
    "jacrev",
    "jvp",
    "linearize",
    "remat",
    "shard_map",
    "value_and_grad",
    "vjp",
    "vmap",
]


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_every_parameter_of_jax_is_one_of_ours(name):
    theirs = inspect.signature(getattr(jax, name)).parameters
    ours = inspect.signature(getattr(refs, name)).parameters
    missing = [p for p in theirs if p not in ours and (name, p) not in GONE]
    assert not missing
    for p in theirs:
        if p in ours and ours[p].kind == ours[p].POSITIONAL_OR_KEYWORD:
            assert [*ours].index(p) == [*theirs].index(p), f"{p} has another place"


def test_the_pullback_has_what_that_of_jax_has():
    _, theirs = jax.vjp(jnp.sin, 1.0)
    _, ours = refs.vjp(jnp.sin, 1.0)
    # `fun` is how it is made, and `replace` and `want_logs` how `with_logs` is.
    public = {n for n in dir(theirs) if not n.startswith("_")} - {"fun", "replace", "want_logs"}
    assert public <= {n for n in dir(ours) if not n.startswith("_")}
    assert type(ours.jaxpr) is type(theirs.jaxpr)
    assert isinstance(ours.args_res[0], _jax.NotNeeded)
    assert ours.opaque_residuals


def product(x, w):
    return (x * w["w"]).sum()


X, W = jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])


@pytest.mark.parametrize("saveable", [False, (True, False), (True, (False,)), [True, {"w": False}]])
@pytest.mark.parametrize("given", ["a ref", "an array", "the call's own"])
def test_what_is_not_saved_is_put_back(saveable, given):
    w = {"w": refs.new_ref(W)}
    _, pullback = refs.vjp(lambda x, w: (x * w["w"][...]).sum(), X, w, saveable_args=saveable)
    assert isinstance(pullback.args_res[1]["w"], _jax.NotSaveable)
    with pytest.raises(RefValueError, match="put it into `args_res` first"):
        pullback(1.0)
    w["w"][...] *= 10
    if saveable is False:
        pullback.args_res[0] = X
    pullback.args_res[1] = {"a ref": [w["w"]], "an array": (10 * W,), "the call's own": w}[given]
    got_x, got_w = pullback(1.0)
    same(got_x, 10 * W)
    same(got_w["w"], X)


def test_saved_values_are_seen_and_replaced():
    r = refs.new_ref(W)
    _, pullback = refs.vjp(lambda x, r: (x * r[...]).sum(), X, r)
    same(pullback.args_res[0], X)
    same(pullback.args_res[1], W)
    pullback.args_res = [None, None]
    pullback.args_res = [X, 2 * W]
    same(pullback(1.0)[0], 2 * W)


@pytest.mark.parametrize("saveable", [True, False])
def test_none_among_the_primals(saveable):
    tree = {"w": W, "bias": None}
    _, pullback = refs.vjp(lambda x, m, w: product(x, w), X, None, tree, saveable_args=saveable)
    pullback.args_res[:] = [X, None, tree]
    x, m, w = pullback(1.0)
    same(x, W)
    same(w["w"], X)
    assert m is w["bias"] is None


def test_a_pullback_without_its_values_goes_through_jit():
    @jax.jit
    def forward():
        out, pullback = refs.vjp(product, X, {"w": W}, saveable_args=(True, False))
        return out, pullback

    @jax.jit
    def backward(pullback, w):
        pullback.args_res[1] = w
        return pullback(1.0)

    out, pullback = forward()
    assert isinstance(pullback.args_res[1]["w"], _jax.NotSaveable)
    assert out == 11
    same(backward(pullback, {"w": W})[0], W)


def test_primals_without_tangents(jit):
    def f(r, x):
        r[...] *= x
        return r[0] * x, r[1]

    def pull(r):
        (a, b), pullback = refs.vjp(f, r, 3.0, in_nzs=(True, False))
        return a, b, pullback((1.0, 1.0))

    a, b, (of_r, of_x) = jit(pull)(refs.new_ref(W))
    same((a, b, *of_r, of_x), (27, 12, 9, 3, 0))
    _, f_jvp = refs.linearize(f, refs.new_ref(W), 3.0, in_nzs=(False, True))
    same(f_jvp(jnp.ones(2), 1.0), (18, 4))


def test_which_outputs_depend_on_primals():
    def f(x, r):
        return {"x": x * 2, "r": r[0]}

    _, pullback = refs.vjp(f, 1.0, refs.new_ref(W), in_nzs=(True, False))
    _, f_jvp = refs.linearize(f, 1.0, refs.new_ref(W), in_nzs=(True, False))
    if not hasattr(jax.vjp(jnp.sin, 1.0)[1], "out_nzs"):  # the oldest JAX
        assert not hasattr(pullback, "out_nzs")
        return
    assert pullback.out_nzs == {"r": False, "x": True}
    assert f_jvp.out_nzs == {"r": False, "x": True}


def test_a_linear_function_goes_through_jit():
    r = refs.new_ref(W)
    _, f_jvp = refs.linearize(lambda r, x: r[...] * x, r, 2.0)
    same(jax.jit(lambda f, t: f(t, 1.0))(f_jvp, jnp.ones(2)), 2 + W)


def test_logs_of_backward_rules():
    if not hasattr(jax.vjp(jnp.sin, 1.0)[1], "with_logs"):  # the oldest JAX
        assert not hasattr(refs.vjp(jnp.sin, 1.0)[1], "with_logs")
        return

    @jax.custom_gradient(with_logs=True)
    def f(x):
        return x**2, lambda ct: ((2 * x * ct,), {"seen": ct})

    r = refs.new_ref(3.0)
    (got,), logs = refs.vjp(lambda r: f(r[...]), r)[1].with_logs(5.0)
    assert (got, logs["seen"]) == (30, 5)


@pytest.mark.skipif(not hasattr(jax.custom_vjp, "defvjp_with_logs"), reason="the newest JAX's")
@pytest.mark.parametrize("touches", [False, True])
@pytest.mark.parametrize("wrapper", ["plain", "jit", "vmap", "scan", "checkpoint"])
def test_logs_of_rules_in(wrapper, touches):
    seen, results = refs.new_ref(0), []

    @jax.custom_vjp
    def f(x):
        return x**2

    def backward(x, ct):
        if touches:
            seen[...] += 1
        return (2 * x * ct,), {"f": {"ct": ct}}

    f.defvjp_with_logs(lambda x: (x**2, x), backward)
    run = {
        "plain": lambda x: jnp.stack([f(x[0]), x[1] ** 2]),
        "jit": lambda x: jnp.stack([refs.jit(f)(x[0]), x[1] ** 2]),
        "vmap": refs.vmap(f),
        "scan": lambda x: refs.scan(lambda _, x: (None, f(x)), None, x)[1],
        "checkpoint": lambda x: jnp.stack([refs.checkpoint(f)(x[0]), x[1] ** 2]),
    }[wrapper]
    ct = jnp.array([5.0, 7.0])
    for derived in (refs.vjp, lambda f, x: refs.vjp(refs.jit(f), x)):
        (got,), logs = derived(run, X)[1].with_logs(ct)
        same(got, 2 * X * ct)
        same(logs["f"]["ct"], ct if wrapper in ("vmap", "scan") else ct[0])
        (got,) = derived(run, X)[1](ct)  # which ignores them
        same(got, 2 * X * ct)
        results.append(int(seen[...]))
    calls = 2 if wrapper in ("vmap", "scan") else 1
    assert results == [2 * calls * touches, 4 * calls * touches]


def test_the_sum_of_what_differs_from_lane_to_lane():
    r = refs.new_ref(2.0)
    mapped = refs.vmap(lambda x: (r[...] * x, r[...]), out_axes=None, sum_match=True)
    same(mapped(X), (6, 2))


def test_any_object_may_ask_for_a_value():
    _, pullback = refs.vjp(lambda x, i: x[i] ** 2, X, 1)
    into = refs.new_ref(jnp.zeros(2))
    word, of_index = pullback.with_refs(into, object())(1.0)
    same(into[...], [0, 4])
    assert isinstance(word, jax.ad.GradRef)
    assert of_index.dtype == jax.dtypes.float0
