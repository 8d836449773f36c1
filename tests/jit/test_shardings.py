"""refs.jit: `in_shardings` and `out_shardings` of arguments and results that mix arrays and refs.

Run on as many devices as there are; `tests/test_several_devices.py` runs this file on four.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

import refs

N = len(jax.devices())
MESH = jax.make_mesh((N,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
SPLIT, WHOLE = (jax.sharding.NamedSharding(MESH, p) for p in (P("d"), P()))
X = np.arange(4.0 * N, dtype=np.float32)


def sharding_of(r):
    return r[...].sharding if isinstance(r, refs.Ref) else r.sharding


def is_like(x, sharding):
    return sharding_of(x).is_equivalent_to(sharding, x.ndim)


# --- Results --------------------------------------------------------------------------------------


def test_a_ref_made_inside():
    r = refs.jit(lambda: refs.new_ref(jnp.zeros((4 * N, 2))), out_shardings=SPLIT)()
    assert is_like(r, SPLIT)
    r[1] = 2.0
    refs.jit(lambda: r.at[...].add(1))()
    assert is_like(r, SPLIT)
    np.testing.assert_array_equal(r[:3, 0], [1, 3, 1])


@pytest.mark.parametrize("touches_another", [False, True])
def test_a_tree_of_arrays_and_refs(touches_another):
    count = refs.new_ref(jax.device_put(np.int32(0), WHOLE))

    def make(x):
        if touches_another:
            count[...] += 1
        w = refs.new_ref(x * 2, name="w")
        return {"w": w, "b": [refs.new_ref(x + 1), x, None]}, x, w

    shardings = {"w": SPLIT, "b": [WHOLE, SPLIT, None]}, WHOLE, SPLIT
    tree, x, w = refs.jit(make, out_shardings=shardings)(X)
    assert tree["w"] is w
    assert is_like(w, SPLIT)
    assert is_like(tree["b"][0], WHOLE)
    assert is_like(tree["b"][1], SPLIT)
    assert is_like(x, WHOLE)
    np.testing.assert_array_equal(w[...], X * 2)
    np.testing.assert_array_equal(tree["b"][0][...], X + 1)


def test_a_sharding_for_nothing_in_particular():
    r, x = refs.jit(
        lambda: (refs.new_ref(jnp.zeros(4)), jnp.ones(4)), out_shardings=(None, SPLIT)
    )()
    assert is_like(x, SPLIT)
    np.testing.assert_array_equal(r[...], np.zeros(4))


def test_an_argument_keeps_its_own():
    r = refs.new_ref(jax.device_put(X, SPLIT))
    same, x = refs.jit(lambda r, x: (r, x + r[...]), out_shardings=WHOLE)(r, X)
    assert same is r
    assert is_like(r, SPLIT)
    assert is_like(x, WHOLE)


def test_one_new_ref_in_two_places():
    def make():
        r = refs.new_ref(jnp.zeros(4 * N))
        return r, r

    a, b = refs.jit(make, out_shardings=SPLIT)()
    assert a is b
    with pytest.raises(refs.errors.RefValueError, match="returned twice, once for"):
        refs.jit(make, out_shardings=(SPLIT, WHOLE))()


# --- Arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_shardings", [(None, SPLIT, WHOLE), [None, SPLIT, WHOLE]], ids=type)
def test_each_argument_has_its_own(in_shardings):
    r = refs.new_ref(jax.device_put(np.float32(0), WHOLE))
    x, y = np.ones(4 * N, np.float32), np.ones((4 * N, 2), np.float32)

    @jax.tree_util.Partial(refs.jit, in_shardings=in_shardings)
    def step(r, x, y):
        r[...] += x.sum() + y["y"].sum()

    step(r, x, {"y": y})
    assert r[...] == 12 * N
    _, [split, whole] = step.lower(r, x, {"y": y}).compile().input_shardings[0]
    assert split.is_equivalent_to(SPLIT, 1)
    assert whole.is_equivalent_to(WHOLE, 2)


def test_static_arguments_have_none():
    step = refs.jit(
        lambda n, r, x: r.at[...].add(n * x), in_shardings=(None, SPLIT), static_argnums=0
    )
    r = refs.new_ref(jax.device_put(X, SPLIT))
    step(2, r, X)
    np.testing.assert_array_equal(r[...], X * 3)
    _, [split] = step.lower(2, r, X).compile().input_shardings[0]
    assert split.is_equivalent_to(SPLIT, 1)


def test_a_ref_that_is_not_there_yet():
    step = refs.jit(lambda r, x: r.at[...].add(x))
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=SPLIT, is_ref=True)
    compiled = step.lower(shape, jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=SPLIT)).compile()
    r = refs.new_ref(jax.device_put(X, SPLIT))
    compiled(r, jax.device_put(X, SPLIT))
    assert is_like(r, SPLIT)
    np.testing.assert_array_equal(r[...], X * 2)


# --- Inside another function ----------------------------------------------------------------------


@pytest.mark.parametrize("outer", [refs.jit, jax.jit])
def test_inside_another(outer):
    r = refs.new_ref(jax.device_put(X, WHOLE))
    seen = []

    @jax.tree_util.Partial(refs.jit, in_shardings=(None, SPLIT), out_shardings=(None, SPLIT))
    def step(r, x):
        r[...] += x
        return r, x + 1

    def program(x):
        _, y = step(r, x)
        jax.debug.inspect_array_sharding(y, callback=seen.append)
        return y

    if outer is refs.jit:
        np.testing.assert_array_equal(outer(program)(X), X + 1)
        np.testing.assert_array_equal(r[...], 2 * X)
    else:
        outer(program).lower(X).compile()
    assert seen[0].is_equivalent_to(SPLIT, 1)


def test_of_an_argument_that_is_a_ref_alone():
    """Then nothing else is given to the program, and there is nothing to place."""
    r = refs.new_ref(jax.device_put(X, SPLIT))
    refs.jit(lambda r: r.at[...].add(1), in_shardings=(SPLIT,))(r)
    assert is_like(r, SPLIT)
    np.testing.assert_array_equal(r[...], X + 1)


def test_other_refs_that_lie_elsewhere():
    """Of two quick calls, the second one's refs are spread in another way: another program."""
    step = refs.jit(lambda a, b: (a.at[...].add(1), b.at[...].add(2))[0])
    for sharding in (SPLIT, WHOLE, SPLIT):
        a, b = (refs.new_ref(jax.device_put(X, sharding)) for _ in range(2))
        for k in range(1, 4):
            step(a, b)
            assert is_like(a, sharding)
            np.testing.assert_array_equal(a[...], X + k)
            np.testing.assert_array_equal(b[...], X + 2 * k)
