"""Classes of users that are pytrees, and check what they are made of: nothing else is put there."""

import dataclasses

import jax
import jax.experimental.random
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import refs

same = np.testing.assert_allclose


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer:
    """Takes arrays and refs only, of any type and rank."""

    w: object
    b: object

    def __post_init__(self):
        for x in (self.w, self.b):
            assert isinstance(x, jax.Array | np.ndarray | jax.Ref), f"a layer of {x!r}"


@pytest.fixture
def layer():
    return Layer(refs.new_ref(jnp.array([1.0, 2.0])), jnp.array([3.0, 4.0]))


def step(layer):
    """Its output is of the class too."""
    layer.w[...] *= 2
    return Layer(layer.w[...] * layer.b, layer.b)


def mesh():
    return jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


SHARDING = jax.sharding.SingleDeviceSharding(jax.devices()[0])

# What each makes of `step`, as a function of a layer that gives such an output.
WAYS = {
    "jit": refs.jit,
    "jit with shardings": lambda f: refs.jit(f, in_shardings=SHARDING, out_shardings=SHARDING),
    "jit with donated": lambda f: refs.jit(f, donate_argnums=0),
    "vmap": refs.vmap,
    "vmap of one argument": lambda f: refs.vmap(f, in_axes=(0,), out_axes=0),
    "checkpoint": refs.checkpoint,
    "checkpoint with flags": lambda f: refs.checkpoint(f, prevent_cse=(True,)),
    "shard_map": lambda f: refs.shard_map(f, mesh=mesh(), in_specs=P("d"), out_specs=P("d")),
    "shard_map of one argument": lambda f: refs.jit(
        refs.shard_map(f, mesh=mesh(), in_specs=(P("d"),), out_specs=P("d"))
    ),
    "jvp": lambda f: lambda x: refs.jvp(f, (x,), (Layer(x.b, x.b),))[0],
    "vjp": lambda f: lambda x: refs.vjp(f, x)[0],
    "linearize": lambda f: lambda x: refs.linearize(f, x)[0],
    "aux of grad": lambda f: lambda x: refs.grad(lambda y, x: (y, f(x)), has_aux=True)(1.0, x)[1],
    "aux of vjp": lambda f: lambda x: refs.vjp(lambda y: [y, f(x)], 1.0, has_aux=True)[2],
    "aux of jacrev": lambda f: lambda x: refs.jacrev(lambda y: (y, f(x)), has_aux=True)(1.0)[1],
    "scan": lambda f: lambda x: refs.scan(lambda _, __: (f(x), None), x_like(x), None, 1)[0],
    "fori_loop": lambda f: lambda x: refs.fori_loop(0, 1, lambda _, __: f(x), x_like(x)),
    "cond": lambda f: lambda x: refs.cond(True, f, f, x),
    "map": lambda f: (
        lambda x: jax.tree.map(lambda y: y[0], refs.map(lambda _: f(x), jnp.arange(1)))
    ),
}


def x_like(layer):
    return Layer(layer.b, layer.b)


@pytest.mark.parametrize("way", WAYS)
def test_a_class_that_checks_its_fields_goes_in_and_out(way, layer):
    out = WAYS[way](step)(layer)
    assert isinstance(out, Layer)
    same(out.w, [6, 16])
    same(layer.w[...], [2, 4])


@pytest.mark.parametrize("name", ["grad", "value_and_grad", "jacfwd", "jacrev"])
def test_the_derivative_of_one_is_one(name, layer):
    def loss(layer):
        return (step(layer).w ** 2).sum()

    out = getattr(refs, name)(loss)(layer)
    if name == "value_and_grad":
        out = out[1]
    assert isinstance(out, Layer)
    same(out.w, 8 * layer.w[...] / 2 * layer.b**2)


def test_prefixes_that_end_inside_of_one():
    class Any(Layer):
        """An axis is no array."""

        def __post_init__(self):
            pass

    jax.tree_util.register_dataclass(Any, ["w", "b"], [])
    lanes = Any(refs.new_ref(jnp.ones((3, 2))), jnp.arange(2.0))
    out = refs.vmap(
        lambda x: Any(x.w[...] + x.b, x.b), in_axes=(Any(0, None),), out_axes=Any(1, None)
    )(lanes)
    assert (out.w.shape, out.b.shape) == ((2, 3), (2,))


def generator():
    return jax.experimental.random.stateful_rng(7)


def test_the_generator_of_jax(jit):
    def loss(x, rng):
        return (x * rng.normal(size=3)).sum() + rng.uniform()

    expected = generator().normal(size=3)  # JAX's own grad can't
    rng = generator()
    same(jit(refs.grad(loss))(jnp.ones(3), rng), expected)
    assert rng._counter[...] == 2

    xs = jnp.zeros(3)
    expected = jax.vmap(lambda rng, x: x + rng.uniform())(generator().split(3), xs)
    same(jit(refs.vmap(lambda rng, x: x + rng.uniform()))(generator().split(3), xs), expected)
