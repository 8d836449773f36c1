"""`addupdate` under JAX's own derivatives: of what has no tangent, it is what `+=` is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs.errors import RefValueError

DERIVATIVES = {
    "grad": lambda f: jax.grad(f)(3.0),
    "jvp": lambda f: jax.jvp(f, (3.0,), (1.0,))[1],
    "linearize": lambda f: jax.linearize(f, 3.0)[1](1.0),
    "jit of grad": lambda f: jax.jit(jax.grad(f))(3.0),
    "grad of jit": lambda f: jax.grad(jax.jit(f))(3.0),
    "grad of refs.jit": lambda f: jax.grad(refs.jit(f))(3.0),
    "refs.jit of grad": lambda f: refs.jit(jax.grad(f))(3.0),
    "refs.jit of grad of jit": lambda f: refs.jit(jax.grad(jax.jit(f)))(3.0),
    "refs.grad": lambda f: refs.grad(f)(3.0),
}
each_derivative = pytest.mark.parametrize("derive", DERIVATIVES.values(), ids=DERIVATIVES)
UPDATES = {
    "method": lambda n: n.addupdate(1),
    "function": lambda n: refs.addupdate(n, ..., 1),
    "at": lambda n: n.at[1].add(jnp.int32(1)),
    "subtract": lambda n: n.at[1:].subtract(-1),
}
each_update = pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)


@each_derivative
@each_update
def test_a_counter_from_outside(derive, update):
    n = refs.new_ref(jnp.zeros(3, jnp.int32))

    def f(x):
        update(n)
        return x**2

    assert derive(f) == 6
    assert n[1] == 1


# JAX 0.12 can't make a ref of integers in a function that `jax.jvp` differentiates.
@pytest.mark.parametrize("derive", [DERIVATIVES[k] for k in DERIVATIVES if k != "jvp"])
@each_update
def test_a_counter_of_its_own(derive, update):
    def f(x):
        n = refs.new_ref(jnp.ones(3, jnp.int32))
        update(n)
        return x**2 * n[1]

    assert derive(f) == 12


def test_a_flag():
    seen = refs.new_ref(jnp.zeros(2, bool))

    def f(x):
        seen.at[0].add(True)
        return x**2

    assert jax.grad(f)(3.0) == 6
    np.testing.assert_array_equal(seen[...], [True, False])


@pytest.mark.parametrize("derive", [DERIVATIVES[k] for k in ("grad", "jvp", "jit of grad")])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
def test_an_element_named_twice(derive, dtype):
    n = refs.new_ref(jnp.zeros(3, dtype))

    def f(x):
        refs.addupdate(n, jnp.array([0, 0, 2]), 1)
        return x**2

    assert derive(f) == 6
    np.testing.assert_array_equal(n[...], [2, 0, 1])


@pytest.mark.parametrize("derive", [DERIVATIVES[k] for k in ("grad", "jvp", "linearize")])
def test_a_differentiated_value_is_refused(derive):
    total = refs.new_ref(jnp.float32(0), name="total")

    def f(x):
        total.addupdate(x)
        return x**2

    with pytest.raises(RefValueError, match="write of a differentiated value to ref `total`"):
        derive(f)


def test_what_has_a_tangent_is_followed():
    def f(x):
        r = refs.new_ref(jnp.zeros(2))
        r.at[0].add(x**2)
        refs.addupdate(r, jnp.array([0, 0, 1]), x)
        return r[0]

    assert jax.grad(f)(3.0) == 8
    assert jax.grad(jax.jit(f))(3.0) == 8
