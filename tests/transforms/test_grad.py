"""`refs.grad` and `refs.value_and_grad`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify

import refs

W = np.array([1.0, 2.0, 3.0], np.float32)


@pytest.fixture
def w():
    return refs.new_ref(W, name="w")


def in_place(w, x):
    """Scales a ref row by row, and sums the squares of what is in it."""

    def step(total, i):
        w[i] *= x
        return total + w[i] ** 2, None

    return lax.scan(step, 0.0, jnp.arange(3))[0]


def by_hand(w, x):
    return ((w * x) ** 2).sum()


def test_arrays_and_refs_are_variables(jit, w):
    got = jit(refs.value_and_grad(in_place, (0, 1)))(w, 2.0)
    want = jax.value_and_grad(by_hand, (0, 1))(W, 2.0)
    jax.tree.map(np.testing.assert_allclose, got, want)
    np.testing.assert_array_equal(w[...], 2 * W)


def test_the_result_has_the_structure_of_the_argument(w):
    def loss(state, x):
        return (state["w"][...] * state["b"] * x).sum()

    gradient = refs.grad(loss)({"w": w, "b": 2.0}, 3.0)
    assert gradient["b"] == 18
    np.testing.assert_array_equal(gradient["w"], [6, 6, 6])


def test_a_view_is_a_variable_for_its_part(w):
    gradient = refs.grad(lambda view: (view.get() ** 2).sum())(w.at[1:])
    np.testing.assert_array_equal(gradient, [4, 6])
    first, last = refs.grad(lambda a, b: a.get() * b.get(), (0, 1))(w.at[0], w.at[2])
    assert (first, last) == (3, 1)


def test_a_variable_that_is_never_touched_has_gradient_zero(w):
    np.testing.assert_array_equal(refs.grad(lambda w, x: x, 0)(w, 1.0), [0, 0, 0])


def test_a_ref_that_is_overwritten_first_has_gradient_zero(w):
    def loss(w):
        w[...] = jnp.ones(3)
        return w[...].sum()

    np.testing.assert_array_equal(refs.grad(loss)(w), [0, 0, 0])


def test_an_aliased_ref_has_the_total_derivative(w):
    gradient = refs.grad(lambda a, b: a[0] * b[0])(w, w)
    np.testing.assert_array_equal(gradient, [2, 0, 0])
    gradient = refs.grad(lambda a: a[1] * w[1])(w)
    np.testing.assert_array_equal(gradient, [0, 4, 0])


def test_effects_happen_once(jit, w, n):
    def loss(x):
        n[...] += 1
        return jnp.sin(x) * w[0]

    for order, f in enumerate(
        [refs.grad(loss), refs.grad(refs.grad(loss)), refs.hessian(loss)], start=1
    ):
        jit(f)(0.5)
        assert n[...] == order


def test_state_written_is_cut_for_this_derivative_only(w):
    def inner(x):
        w[0] = x**2
        return x

    def outer(x):
        gradient = refs.grad(inner)(x)
        return w[0] * gradient

    assert refs.grad(outer)(3.0) == 6
    assert w[0] == 9


def test_auxiliary_data_may_hold_refs(w):
    def loss(x):
        made = refs.new_ref(x * jnp.ones(2), name="made")
        return x**2, {"w": w, "made": made, "again": made, "x": x}

    (value, aux), gradient = refs.value_and_grad(loss, has_aux=True)(3.0)
    assert (value, gradient, aux["x"]) == (9, 6, 3)
    assert aux["w"] is w
    assert aux["made"] is aux["again"]
    aux["made"][0] += 1
    np.testing.assert_array_equal(aux["made"][...], [4, 3])
    gradient, aux = refs.grad(loss, has_aux=True)(3.0)
    assert gradient == 6


def test_what_is_not_differentiated_stays_as_it_is(w):
    def loss(x, mode, steps):
        assert mode == "square"
        for _ in range(steps if steps > 1 else 0):
            x = x * w[0]
        return x**2

    assert refs.grad(loss)(3.0, "square", steps=2) == 6


def test_integers_and_complex_numbers(jit, n):
    gradient = jit(refs.grad(lambda n, x: n[...] * x, allow_int=True))(n, 2.0)
    assert gradient.dtype == jax.dtypes.float0
    z = refs.new_ref(jnp.array([1 + 1j, 2.0]))
    got = jit(refs.grad(lambda z: z[0] ** 2, holomorphic=True))(z)
    np.testing.assert_array_equal(got, [2 + 2j, 0])
    got = jit(refs.grad(lambda z: jnp.abs(z[0]) ** 2))(z)
    np.testing.assert_allclose(got, jax.grad(lambda z: jnp.abs(z[0]) ** 2)(z[...]))


def test_an_error_leaves_everything_as_it_was(w):
    def loss(w):
        w[...] = jnp.zeros(3)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        refs.grad(loss)(w)
    np.testing.assert_array_equal(w[...], W)


def test_a_plain_jax_ref_is_a_variable_too():
    plain = jax.new_ref(jnp.array([1.0, 2.0]))
    np.testing.assert_array_equal(refs.grad(lambda r: (r[...] ** 2).sum())(plain), [2, 4])


def test_inside_loops_and_branches(jit, w, n):
    def gradient(x):
        n[...] += 1
        return refs.grad(lambda x: in_place(w, x))(x)

    def program(x):
        def body(total):
            w[...] = W
            return lax.cond(n[...] % 2 == 0, gradient, lambda x: 10 * gradient(x), x) + total

        return refs.while_loop(lambda _: n[...] < 3, body, 0.0)

    assert jit(program)(0.5) == 12 * jax.grad(by_hand, 1)(W, 0.5)
    assert n[...] == 3


def test_a_traced_function_keeps_jaxs_own_rules():
    """Functions of JAX's that have derivative rules keep them: relu has gradient 0 at 0."""
    r = refs.new_ref(jnp.zeros(()))
    assert refs.grad(lambda r: jax.nn.relu(r[...]))(r) == 0
    x = refs.new_ref(jnp.array([0.0, 1000.0]))
    assert np.isfinite(refs.grad(lambda x: jax.nn.logsumexp(x[...]))(x)).all()


@pytest.mark.parametrize("transform", [refs.grad, refs.jacrev, refs.jacfwd])
def test_variables_in_another_order_than_the_arguments(transform, w):
    """The function gets them in its own order, and the gradients come in that of `argnums`."""

    def f(a, w, b, *, k):
        w[0] += a - b
        return (a**2 + 3 * b * w[2]) * k

    got = transform(f, argnums=(2, 0, 1))(5.0, w, 7.0, k=1.0)
    assert [got[0], got[1]] == [3 * W[2], 10]
    np.testing.assert_array_equal(got[2], [0, 0, 21])
    np.testing.assert_array_equal(w[...], W - [2, 0, 0])


def test_argnums_of_other_types():
    assert refs.grad(lambda a: a**2, argnums=np.int64(0))(3.0) == 6
    assert refs.grad(lambda a, b: a * b, argnums=np.array([-1]))(3.0, 4.0) == (3,)


def test_what_the_user_raises_is_not_explained():
    """JAX's words in an error of the user's are the user's."""

    def f(x):
        raise KeyError("mutable array cannot be returned")

    for transform in (refs.grad, refs.jit, refs.checkpoint):
        with pytest.raises(KeyError, match="mutable array"):
            transform(f)(1.0)


def test_a_checkpointed_function_that_reads_a_part_of_a_complex_ref():
    def loss(r, x):
        def step(x):
            r[0] = r[0] * x
            return jnp.abs(r[0])

        return lax.fori_loop(0, 3, lambda i, total: total + jax.checkpoint(step)(x), 0.0)

    start = np.array([3 + 4j, 1j, 2], np.complex64)
    assert refs.grad(loss, 1)(refs.new_ref(start), 2.0) == 5 * (1 + 2 * 2 + 3 * 4)
    of_r = refs.grad(loss)(refs.new_ref(start), 2.0)
    np.testing.assert_allclose(of_r, [14 * (0.6 - 0.8j), 0, 0], rtol=1e-6)


@pytest.mark.parametrize("n", [3, np.uint8(4), np.arange(2), np.int32(1), jnp.arange(2)], ids=repr)
def test_what_has_no_tangent_stays_what_it_is(n):
    kinds = {}

    def kind(module):
        def f(x):
            kinds.setdefault(module, []).append(type(x))
            return jnp.sum(x + 0.0)

        module.grad(f, allow_int=True)(n)
        module.vjp(f, n)
        module.linearize(f, n)
        module.jacrev(f, allow_int=True)(n)
        return f

    kind(jax)
    kind(refs)
    assert kinds[refs] == kinds[jax]


def test_an_argument_that_is_returned_as_it_is_inside_checkify():
    def f(x):
        checkify.check(x > 0, "not positive")
        return x

    error, gradient = checkify.checkify(refs.grad(f))(1.0)
    assert (error.get(), gradient) == (None, 1)
    error, _ = checkify.checkify(refs.grad(f))(0.0)
    assert "not positive" in error.get()


@pytest.mark.parametrize("wrap", [lambda f: f, refs.jit], ids=["op by op", "jit"])
def test_zeros_of_a_ref_on_an_explicit_mesh_are_spread_as_it_is(wrap):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        r = refs.new_ref(jax.device_put(jnp.arange(4.0), jax.P("d")))
        zeros, dy = wrap(refs.grad(lambda r, y: 2.0 * y, argnums=(0, 1)))(r, 1.0)
    assert dy == 2
    assert not zeros.any()
    assert zeros.sharding.is_equivalent_to(r.sharding, 1)


def test_no_element_is_multiplied():
    r, nowhere = refs.new_ref(jnp.ones(3)), jnp.zeros(0, jnp.int32)

    def f(y):
        r.at[nowhere].multiply(y)
        return r[...].sum() * y

    assert refs.grad(f)(2.0) == 3
    assert refs.jit(refs.grad(f))(2.0) == 3
