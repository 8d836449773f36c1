"""refs.functionalize: state in, new state out, and any JAX transformation around it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs

X = np.arange(3, dtype=np.float32)


def step(s, x, *, scale=1):
    s["sum"][...] += scale * x
    s["n"][...] += 1
    return s["sum"][0] / s["n"][...]


def start():
    return {"sum": jnp.asarray(X), "n": jnp.int32(1)}


def test_state_first():
    pure = refs.functionalize(step)
    state = start()
    out, new = pure(state, 3.0, scale=2)
    assert out == 3
    np.testing.assert_array_equal(new["sum"], X + 6)
    assert new["n"] == 2
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, state)
    np.testing.assert_array_equal(state["sum"], X)


def test_closed_over():
    s = jax.tree.map(refs.new_ref, start())
    pure = refs.functionalize(lambda x: step(s, x), closed_over=s)
    out, new = pure({"sum": X * 2, "n": jnp.int32(3)}, 4.0)
    assert out == 1
    np.testing.assert_array_equal(new["sum"], X * 2 + 4)
    np.testing.assert_array_equal(s["sum"][...], X)  # the refs themselves are not touched
    assert s["n"][...] == 1


def test_closed_over_single_ref_and_an_unused_one():
    r, unused = refs.new_ref(X), refs.new_ref(X)
    pure = refs.functionalize(lambda: r.at[0].add(5.0), closed_over=r)
    np.testing.assert_array_equal(pure(X)[1], [5, 1, 2])
    pure = refs.functionalize(lambda: r.at[0].add(5.0), closed_over=(unused, r))
    _, (same, new) = pure((X, X))
    np.testing.assert_array_equal(same, X)
    np.testing.assert_array_equal(new, [5, 1, 2])


def test_closed_over_within_control_flow():
    r = refs.new_ref(X)

    def program(n):
        lax.fori_loop(0, n, lambda i, _: r.at[i].set(9), None)

    pure = jax.jit(refs.functionalize(program, closed_over=[r]))
    np.testing.assert_array_equal(pure([X], 2)[1][0], [9, 9, 2])


def test_without_state_or_results():
    assert refs.functionalize(lambda s: None)(()) == (None, ())
    assert refs.functionalize(lambda s, x: x + 1)({}, 2) == (3, {})


def test_state_of_one_array():
    out, new = refs.functionalize(lambda r: refs.swap(r, 0, 5.0))(X)
    assert out == 0
    np.testing.assert_array_equal(new, [5, 1, 2])


def test_numbers_as_state():
    _, new = refs.functionalize(lambda r: r.at[...].add(2))(1.5)
    assert new == 3.5
    assert new.dtype == jnp.float32


def test_refs_made_inside():
    def program(r):
        mine = refs.new_ref(r[...] * 2)
        mine[0] = 7
        r[...] = mine[...]
        return refs.freeze(mine)

    out, new = refs.functionalize(program)(X)
    np.testing.assert_array_equal(out, [7, 2, 4])
    np.testing.assert_array_equal(new, [7, 2, 4])


def test_grad_by_argument_and_by_state():
    def program(r, x):
        r[1:] *= x
        return jnp.sum(r[...] ** 2)

    pure = refs.functionalize(program)
    (by_state, by_x), new = jax.grad(pure, argnums=(0, 1), has_aux=True)(X, 3.0)
    np.testing.assert_allclose(by_state, [0, 18, 36])
    np.testing.assert_allclose(by_x, 2 * 3 * (1 + 4))
    np.testing.assert_array_equal(new, [0, 3, 6])


def test_hessian_linearize_and_jvp():
    def program(r, x):
        r[0] = x**2
        r[0] *= x
        return r[0]

    pure = refs.functionalize(program)
    np.testing.assert_allclose(jax.hessian(lambda x: pure(X, x)[0])(2.0), 12)
    out, tangent = jax.jvp(lambda x: pure(X, x)[1][0], (2.0,), (1.0,))
    assert (out, tangent) == (8, 12)
    _, linear = jax.linearize(lambda x: pure(X, x)[0], 2.0)
    assert linear(0.5) == 6


def test_vmap_over_state_and_arguments():
    pure = refs.functionalize(step)
    states = {"sum": jnp.stack([X, X + 1]), "n": jnp.int32([1, 3])}
    out, new = jax.vmap(pure)(states, jnp.float32([1, 2]))
    np.testing.assert_allclose(out, [0.5, 0.75])
    np.testing.assert_array_equal(new["sum"], [X + 1, X + 3])
    _, new = jax.vmap(pure, in_axes=(None, 0))(start(), jnp.float32([1, 2]))
    np.testing.assert_array_equal(new["sum"], [X + 1, X + 2])


def test_jit_with_donation():
    pure = jax.jit(refs.functionalize(step), donate_argnums=0)
    state = jax.tree.map(jnp.array, start())
    for k in range(3):
        _, state = pure(state, 1.0)
        assert state["n"] == k + 2


def test_scan_checkpoint_and_eval_shape():
    pure = refs.functionalize(step)

    def body(state, x):
        out, state = jax.checkpoint(pure)(state, x)
        return state, out

    state, outs = lax.scan(body, start(), jnp.ones(3))
    np.testing.assert_array_equal(state["sum"], X + 3)
    np.testing.assert_allclose(outs, [1 / 2, 2 / 3, 3 / 4], rtol=1e-6)
    out, shapes = jax.eval_shape(pure, start(), 1.0)
    assert out.shape == ()
    assert shapes["sum"].shape == (3,)


def test_within_refs_jit():
    r = refs.new_ref(X, name="r")
    pure = refs.functionalize(lambda s, x: refs.swap(s, 0, x))

    @refs.jit
    def program(x):
        old, new = pure(r[...], x)
        r[...] = new * 2
        return old

    assert program(5.0) == 0
    np.testing.assert_array_equal(r[...], [10, 2, 4])


def test_names_and_docstrings_survive():
    def documented(s):
        """What it does."""

    pure = refs.functionalize(documented)
    assert (pure.__name__, pure.__doc__) == ("documented", "What it does.")


def test_a_native_ref_may_be_closed_over():
    r = jax.new_ref(X)
    pure = refs.functionalize(lambda: r.__setitem__(0, 4.0), closed_over=r)
    np.testing.assert_array_equal(pure(X)[1], [4, 1, 2])
    np.testing.assert_array_equal(r[...], X)


def test_errors_change_nothing():
    r = refs.new_ref(X)

    def program():
        r[0] = 1.0
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        refs.functionalize(program, closed_over=r)(X)
    np.testing.assert_array_equal(r[...], X)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_ref_that_is_not_in_the_state(read_only):
    r, other = refs.new_ref(X, name="r"), refs.new_ref(X, name="other")
    program = (lambda: other[0] + r[0]) if read_only else (lambda: other.at[0].set(r[0]))
    with pytest.raises(refs.errors.RefStateError, match=r"touches ref `other` .* not in its state"):
        refs.functionalize(program, closed_over=r)(X)


def test_a_ref_where_a_value_is_meant():
    r = refs.new_ref(X, name="r")
    pure = refs.functionalize(lambda s: s[0])
    with pytest.raises(refs.errors.RefTypeError, match=r"ref `r` .* is passed to a pure function"):
        pure(r)


@pytest.mark.parametrize("program", [lambda s: s, lambda s: refs.new_ref(1.0)])
def test_a_ref_returned(program):
    with pytest.raises(refs.errors.RefEscapeError, match="returns a ref"):
        refs.functionalize(program)(X)


def test_a_closed_over_ref_returned():
    r = refs.new_ref(X)
    with pytest.raises(refs.errors.RefEscapeError, match="returns a ref"):
        refs.functionalize(lambda: r, closed_over=r)(X)


def test_what_is_closed_over_must_be_refs():
    with pytest.raises(refs.errors.RefTypeError, match="closed_over holds a float"):
        refs.functionalize(lambda: None, closed_over=[1.0])


@pytest.mark.parametrize("state", [X.astype(np.int32), X[:2], X[None]])
def test_state_of_another_type_than_the_ref(state):
    r = refs.new_ref(X, name="r")
    with pytest.raises(refs.errors.RefValueError, match="for ref `r`"):
        refs.functionalize(lambda: r[0], closed_over=r)(state)


def test_state_of_another_structure():
    r = refs.new_ref(X)
    with pytest.raises(refs.errors.RefValueError, match="the state has the structure"):
        refs.functionalize(lambda: r[0], closed_over=[r])((X,))
