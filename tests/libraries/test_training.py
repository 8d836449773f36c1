"""A training step with the models of other libraries, their parameters in refs; and generators."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs

X = jnp.linspace(-1.0, 1.0, 32).reshape(16, 2)
Y = X.prod(axis=1)


def equinox() -> tuple[Any, Any]:
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(2, "scalar", 8, 1, key=jax.random.key(0))
    params, rest = eqx.partition(model, eqx.is_array)
    return params, lambda params, x: eqx.combine(params, rest)(x)


def nnx() -> tuple[Any, Any]:
    nnx = pytest.importorskip("flax.nnx")
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(2, 8, rngs=rngs), jnp.tanh, nnx.Linear(8, 1, rngs=rngs))
    graph, state = nnx.split(model)
    return state, lambda params, x: nnx.merge(graph, params)(x)[0]


def linen() -> tuple[Any, Any]:
    nn = pytest.importorskip("flax.linen")
    model = nn.Sequential([nn.Dense(8), jnp.tanh, nn.Dense(1)])
    return model.init(jax.random.key(0), X[0]), lambda params, x: model.apply(params, x)[0]


MODELS = {"equinox": equinox, "nnx": nnx, "linen": linen}


@pytest.mark.parametrize("library", MODELS)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_step(library: str, compiled: bool) -> None:
    """Parameters and Adam's moments in refs, against the same with `jax.jit` and values."""
    optax = pytest.importorskip("optax")
    optimizer = optax.adam(1e-2)
    params, apply = MODELS[library]()

    def loss(params: Any) -> Any:
        return ((jax.vmap(lambda x: apply(params, x))(X) - Y) ** 2).mean()

    def by_hand(params: Any, moments: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(gradient, moments, params)
        return value, optax.apply_updates(params, updates), moments

    state = jax.tree.map(refs.new_ref, (params, optimizer.init(params)))
    steps = refs.new_ref(0)

    def with_refs(state: Any) -> Any:
        def counted(params: Any) -> Any:
            steps[...] += 1
            return loss(jax.tree.map(lambda r: r[...], params))

        value, gradient = refs.value_and_grad(counted)(state[0])
        old = jax.tree.map(lambda r: r[...], state)
        updates, moments = optimizer.update(gradient, old[1], old[0])
        new = (optax.apply_updates(old[0], updates), moments)
        jax.tree.map(lambda r, x: refs.set(r, ..., x), state, new)
        return value

    step, expected_step = (
        (refs.jit(with_refs), jax.jit(by_hand)) if compiled else (with_refs, by_hand)
    )
    moments = optimizer.init(params)
    for _ in range(3):
        expected, params, moments = expected_step(params, moments)
        np.testing.assert_allclose(step(state), expected, rtol=1e-5)
    assert steps[...] == 3
    for r, x in zip(jax.tree.leaves(state), jax.tree.leaves((params, moments)), strict=True):
        np.testing.assert_allclose(r[...], x, rtol=1e-4, atol=1e-6)


def test_an_nnx_module_whose_variables_hold_refs() -> None:
    """NNX's own way to have refs: `nnx.to_refs` and the variables' values."""
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    expected = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    state = jax.tree.map(refs.new_ref, state)

    @refs.jit
    def step(state: Any, x: Any) -> Any:
        layer = nnx.merge(graph, jax.tree.map(lambda r: r[...], state))
        out = layer(x)
        _, new = nnx.split(layer)
        jax.tree.map(lambda r, v: refs.set(r, ..., v), state, new)
        return out

    for _ in range(2):
        np.testing.assert_allclose(step(state, X), expected(X), rtol=1e-5, atol=1e-6)
    _, expected_state = nnx.split(expected)
    for r, v in zip(jax.tree.leaves(state), jax.tree.leaves(expected_state), strict=True):
        np.testing.assert_allclose(r[...], v, rtol=1e-5)


def generator() -> Any:
    """A generator of JAX's with its counter in a ref of ours."""
    random = pytest.importorskip("jax.experimental.random")
    return random.StatefulPRNG(jax.random.key(7), refs.new_ref(0))


def draw(rng: Any, x: Any) -> Any:
    return (x * rng.normal(size=4) + rng.uniform(size=4)).sum()


def drawn(count: int, x: Any) -> Any:
    """What `draw` is by the generator's definition, with its counter at `count`."""
    first, second = (jax.random.fold_in(jax.random.key(7), count + k) for k in range(2))
    return (x * jax.random.normal(first, 4) + jax.random.uniform(second, 4)).sum()


@pytest.mark.parametrize(
    ("transform", "is_gradient"),
    [
        (lambda: draw, False),
        (lambda: refs.jit(draw), False),
        (lambda: lambda rng, x: refs.grad(lambda x: draw(rng, x))(x), True),
        (lambda: refs.jit(lambda rng, x: refs.grad(lambda x: draw(rng, x))(x)), True),
        (lambda: refs.jit(refs.grad(draw, argnums=1)), True),
        (lambda: refs.grad(refs.jit(draw), argnums=1), True),
        (lambda: refs.grad(refs.checkpoint(draw), argnums=1), True),
    ],
)
def test_a_generator_of_jax_passed_in(transform: Any, is_gradient: bool) -> None:
    rng = generator()
    for count in (0, 2):
        expected = (jax.grad(drawn, argnums=1) if is_gradient else drawn)(count, 2.0)
        np.testing.assert_allclose(transform()(rng, 2.0), expected, rtol=1e-6)
        assert rng._counter[...] == count + 2


def test_a_generator_of_jax_split_over_lanes() -> None:
    random = pytest.importorskip("jax.experimental.random")
    natively, ours = random.stateful_rng(7), generator()
    x = jnp.arange(3.0)
    for mapped in (refs.vmap(draw), refs.jit(refs.vmap(draw))):
        expected = jax.vmap(draw)(natively.split(3), x)
        np.testing.assert_allclose(mapped(ours.split(3), x), expected, rtol=1e-6)
    # A pytree whose class checks its fields, not mapped.
    key = refs.vmap(lambda rng, x: x + rng._base_key.ndim, in_axes=(None, 0))(ours, x)
    np.testing.assert_array_equal(key, x)
