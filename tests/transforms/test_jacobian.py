"""`jacfwd`, `jacrev` and `hessian` give what JAX's do: values, dtypes, weak types, structures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs


def of_type(x):
    return np.shape(x), x.dtype, x.weak_type


def same(actual, expected):
    assert jax.tree.map(of_type, actual) == jax.tree.map(of_type, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), actual, expected)


@jax.custom_vjp
def with_rule(x):
    return x * x


with_rule.defvjp(lambda x: (x * x, x), lambda x, g: (2 * x * g,))


CASES = {
    "weak": (lambda x: x**3, (2.0,), {}),
    "several dtypes": (lambda x: (x * jnp.ones(3, jnp.bfloat16), x**2), (2.0,), {}),
    "complex": (lambda x: x * x, (2.0 + 1j,), {"holomorphic": True}),
    "structures": (lambda d: {"a": d["b"].sum(), "c": (d["b"], None)}, ({"b": jnp.ones(3)},), {}),
    "no elements": (lambda x: 2 * x, (jnp.ones((0, 2)),), {}),
    "auxiliary": (lambda x: (x * x, {"k": x}), (jnp.ones(2),), {"has_aux": True}),
    "several arguments": (lambda x, y, z: x * z, (1.0, 2.0, jnp.ones(2)), {"argnums": (0, 2)}),
}
BACKWARD = {
    "integers": (lambda x, y: x * y, (2, 3.0), {"argnums": (0, 1), "allow_int": True}),
    "a rule": (with_rule, (2.0,), {}),
    "a rule, of arrays": (with_rule, (jnp.arange(6.0).reshape(2, 3),), {}),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    "name, case",
    [(n, c) for c in CASES for n in ("jacfwd", "jacrev", "hessian")]
    + [("jacrev", c) for c in BACKWARD],
)
def test_as_jax_does(name, case, jit):
    fun, args, options = (CASES | BACKWARD)[case]
    expected = getattr(jax, name)(fun, **options)(*args)
    derived = getattr(refs, name)(fun, **options)
    same((refs.jit(derived) if jit else derived)(*args), expected)


@pytest.mark.parametrize("out", [1, 1j, jax.random.key(0)], ids=["int", "complex", "key"])
def test_outputs_without_a_derivative_change_nothing(out):
    r = refs.new_ref(1.0)

    def fun(x):
        r[...] *= x
        return jnp.asarray(out)

    with pytest.raises(TypeError):
        refs.jacrev(fun)(2.0)
    assert r[...] == 1


@pytest.mark.parametrize("name", ["jacfwd", "jacrev", "hessian"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_of_the_shards_on_each_device(name, kind):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(getattr(jax.sharding.AxisType, kind),))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("x"))
    x = jax.device_put(jnp.arange(6.0).reshape(3, 2), sharding)

    def of_shards(t):
        body = getattr(t, name)(lambda x: (x**3).sum(-1))
        return t.shard_map(body, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))

    with jax.set_mesh(mesh):
        same(refs.jit(of_shards(refs))(x), jax.jit(of_shards(jax))(x))
