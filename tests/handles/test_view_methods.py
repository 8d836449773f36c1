"""`ref.at[idx]` does what `x.at[idx]` of `jax.numpy` does: every method, keyword and derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs.errors import RefIndexError, RefTypeError, RefValueError

X = np.array([2.0, 3.0, 5.0, 7.0, 11.0], np.float32)
OPERANDS = {
    "set": 4.0,
    "add": 4.0,
    "subtract": 4.0,
    "multiply": 4.0,
    "mul": 4.0,
    "divide": 4.0,
    "power": 2.0,
    "min": 4.0,
    "max": 4.0,
}
MODES = [None, "clip", "fill", "drop", "promise_in_bounds", jax.lax.GatherScatterMode.CLIP]
STATIC = [1, -2, 9, -9, np.array([0, 0, 9, -1, -9])]
TRACED = [np.int32(9), np.int32(-9), np.int32(-1), np.array([0, 0, 9, -1, -9], np.int32)]
CASES = [(i, False) for i in STATIC] + [(i, True) for i in TRACED]


def table(index, keywords):
    """What `jax.numpy` makes of every method at `index`."""
    at = jnp.asarray(X).at[index]
    updated = [getattr(at, method)(y, **keywords) for method, y in OPERANDS.items()]
    return [at.get(**keywords), at.get(fill_value=-1, **keywords), *updated]


def ours(index, keywords, nested=False):
    made = []
    for method, y in OPERANDS.items():
        r = refs.new_ref(X)
        view = r.at[::-1].at[::-1].at[index] if nested else r.at[index]
        assert getattr(view, method)(y, **keywords) is None
        made.append(r[...])
    r = refs.new_ref(X)
    view = r.at[::-1].at[::-1].at[index] if nested else r.at[index]
    return [view.get(**keywords), view.get(fill_value=-1, **keywords), *made]


@pytest.mark.parametrize("way", ["eager", "refs.jit", "nested"])
@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_modes(mode, wrap, way):
    keywords = {"mode": mode, "wrap_negative_indices": wrap}
    hints = {"unique_indices": False, "indices_are_sorted": False}
    for index, is_traced in CASES:
        if mode is None and not is_traced and np.ndim(index) == 0:
            continue  # an error, below
        want = table(jnp.asarray(index), keywords)
        index = jnp.asarray(index) if is_traced else index
        if way == "refs.jit":
            # A Python integer isn't traced.
            run = refs.jit(lambda i=index: ours(i, {**keywords, **hints}))
            got = refs.jit(lambda i: ours(i, keywords))(index) if is_traced else run()
        else:
            got = ours(index, keywords, nested=way == "nested")
        for name, g, w in zip(["get", "filled", *OPERANDS], got, want, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-6, err_msg=f"{name} at {index!r}")


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "bfloat16", "complex64"])
def test_what_a_read_fills_in(dtype):
    x = jnp.ones(3, dtype)
    i = jnp.array([0, 7])
    rows = jnp.ones((3, 2), dtype)
    for got, want in [
        (refs.new_ref(x).at[i].get(mode="fill"), x.at[i].get(mode="fill")),
        (refs.new_ref(rows).at[i, ::-1].get(mode="fill"), rows.at[i, ::-1].get(mode="fill")),
    ]:
        assert got.dtype == want.dtype
        # NumPy doesn't know that a NaN of the small types is one.
        np.testing.assert_array_equal(got.astype(jnp.complex64), want.astype(jnp.complex64))


def test_filling_keeps_what_is_in_bounds_in_its_place():
    x = jnp.arange(24.0).reshape(2, 3, 4)
    i, j = jnp.array([0, 5]), jnp.array([3, 1])
    for index in [(i, slice(None), j), (slice(None), i[:, None], j), (None, i, ..., -1)]:
        got = refs.new_ref(x).at[index].get(mode="fill", fill_value=-1)
        np.testing.assert_array_equal(got, x.at[index].get(mode="fill", fill_value=-1))


def test_lanes_and_keywords():
    total, own = refs.new_ref(jnp.zeros(3)), refs.new_ref(jnp.zeros((2, 3)))

    def lane(own, i):
        total.at[i].add(1.0, mode="clip")
        total.at[i].subtract(0.5, wrap_negative_indices=False)
        own.at[i].set(7.0, mode="clip")
        return own.at[i].get(mode="fill")

    assert str(refs.vmap(lane)(own, jnp.array([-1, 9])).tolist()) == "[7.0, nan]"
    assert total[...].tolist() == [0, 0, 2]
    assert own[...].tolist() == [[0, 0, 7], [0, 0, 7]]


# --- Derivatives ---


@pytest.mark.parametrize("index", [1, np.array([0, 2, 0]), jnp.array([0, 9, 0])], ids=str)
@pytest.mark.parametrize("method", [m for m in OPERANDS if m != "mul"])
def test_derivatives(method, index):
    y = jnp.array([1.5, 2.5, 0.5]) if np.ndim(index) else jnp.float32(2.5)
    weights = jnp.arange(1.0, 6.0)

    def loss(x, y):
        r = refs.new_ref(x)
        getattr(r.at[index], method)(y)
        return (r[...] * weights).sum()

    def pure(x, y):
        # One after the other: JAX has no derivative of the rest, or another one.
        places = [(index, y)] if not np.ndim(index) else list(zip(index, y, strict=True))
        if method in ("multiply", "divide", "power"):
            for i, v in places:
                x = getattr(x.at[i], method)(v)
        else:
            x = getattr(x.at[index], method)(y)
        return (x * weights).sum()

    x = jnp.asarray(X)
    for got, want in zip(refs.grad(loss, (0, 1))(x, y), jax.grad(pure, (0, 1))(x, y), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.slow
def test_derivatives_of_products_with_zeros_and_windows():
    i = jnp.array([1, 0, 1, 1])

    def loss(x, y):
        r = refs.new_ref(x)
        r.at[i].multiply(y)
        return (r[...] ** 2).sum()

    def pure(x, y):
        for k, v in zip(i, y, strict=True):
            x = x.at[k].multiply(v)
        return (x**2).sum()

    x = jnp.array([[2.0, 3.0], [5.0, 7.0], [1.0, 1.0]])
    y = jnp.array([[0.0, 2.0], [3.0, 1.0], [0.0, 4.0], [0.0, 0.0]])
    for order in (lambda t, f: t(f, (0, 1)), lambda t, f: t(t(f, 1), 1)):
        got = order(refs.jacrev, loss)(x, y)
        want = order(jax.jacrev, pure)(x, y)
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5), got, want)


# --- Errors ---


@pytest.mark.parametrize("index", [5, -6])
def test_a_python_integer_out_of_bounds_without_a_mode(index):
    r = refs.new_ref(X, name="r")
    with pytest.raises(RefIndexError, match=f"index {index} is out of bounds for axis 0"):
        r.at[index].add(1.0, unique_indices=True)
    with pytest.raises(RefIndexError, match="index -1 is out of bounds for axis 0"):
        r.at[-1].get(wrap_negative_indices=False)


def test_wrong_keywords_and_types():
    r = refs.new_ref(X, name="r")
    with pytest.raises(RefValueError, match="mode 'wrap' of an index: it is 'clip', 'fill'"):
        r.at[0].set(1.0, mode="wrap")
    with pytest.raises(TypeError, match="unexpected keyword argument 'fill_value'"):
        r.at[0].set(1.0, fill_value=3)
    flags = refs.new_ref(jnp.ones(2, bool), name="flags")
    for method in ("subtract", "divide", "power"):
        with pytest.raises(RefTypeError, match=f"ref `flags` .* booleans have no {method}"):
            getattr(flags.at[0], method)(True)
    count = refs.new_ref(jnp.arange(4), name="count")
    for index in (0, jnp.array([0, 0])):
        with pytest.raises(RefTypeError, match=r"ref `count` .* float32 can't be held by .* int32"):
            count.at[index].divide(2)
    count.at[jnp.array([3, 3])].power(2)
    assert count[...].tolist() == [0, 1, 2, 81]
    keys = refs.new_ref(jax.random.split(jax.random.key(0), 2), name="keys")
    with pytest.raises(RefTypeError, match=r'ref `keys` .* mode="fill" needs a `fill_value`'):
        keys.at[jnp.array([5])].get(mode="fill")
