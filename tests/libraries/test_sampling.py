"""Samplers, variational inference and checkers of types, with states, data and counts in refs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs

DATA = jnp.array([0.5, 1.5, 2.0, 1.0])
KEY = jax.random.key(0)
STEPS = 20


def log_density(x: Any) -> Any:
    return -0.5 * (x**2).sum() - 0.5 * ((DATA - x[0]) ** 2).sum()


def in_refs(tree: Any) -> Any:
    return jax.tree.map(refs.new_ref, tree)


def values(tree: Any) -> Any:
    return jax.tree.map(lambda r: r[...], tree)


def write(tree: Any, new: Any) -> None:
    jax.tree.map(lambda r, x: r.set(x), tree, new)


def same(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


# --- blackjax -------------------------------------------------------------------------------------


def algorithms() -> dict[str, Callable[[Any], Any]]:
    blackjax = pytest.importorskip("blackjax")
    mass = jnp.ones(2)
    return {
        "hmc": lambda f: blackjax.hmc(f, 0.1, mass, 3),
        "nuts": lambda f: blackjax.nuts(f, 0.1, mass),
        "mala": lambda f: blackjax.mala(f, 0.1),
        "random walk": lambda f: blackjax.rmh(
            f, lambda key, x: x + 0.3 * jax.random.normal(key, x.shape)
        ),
    }


@pytest.mark.parametrize(
    "name, loop",
    [
        ("hmc", "python"),
        ("mala", "scan at top level"),
        ("random walk", "scan in jit"),
        ("nuts", "scan in jit"),
    ],
)
def test_a_chain_in_refs(name: str, loop: str) -> None:
    kernel = algorithms()[name](log_density)
    start = kernel.init(jnp.zeros(2))
    keys = jax.random.split(KEY, STEPS)
    _, expected = jax.lax.scan(lambda s, key: (kernel.step(key, s)[0],) * 2, start, keys)
    state, trace = in_refs(start), refs.new_ref(jnp.zeros((STEPS, 2)))

    def step(k: Any, key: Any) -> None:
        new, _ = kernel.step(key, values(state))
        write(state, new)
        trace[k] = new.position

    def scanned() -> None:
        refs.scan(lambda k, key: (k + 1, step(k, key)), 0, keys)

    if loop == "python":
        compiled = refs.jit(step)
        for k, key in enumerate(keys):
            compiled(k, key)
    else:
        (scanned if loop == "scan at top level" else refs.jit(scanned))()
    same(trace[...], expected.position)
    same(values(state), jax.tree.map(lambda x: x[-1], expected))


def test_a_density_that_reads_a_ref() -> None:
    """blackjax differentiates it by JAX, which may read refs from outside."""
    blackjax = pytest.importorskip("blackjax")
    data, position = refs.new_ref(DATA), jnp.ones(2)

    def reading(x: Any) -> Any:
        return -0.5 * (x**2).sum() - 0.5 * ((data[...] - x[0]) ** 2).sum()

    found = []
    for f, jit in (reading, refs.jit), (log_density, jax.jit):
        kernel = blackjax.mala(f, 0.1)
        found.append(jit(lambda k=kernel: k.step(KEY, k.init(position))[0])())
    same(*found)


# --- numpyro --------------------------------------------------------------------------------------


def model(data: Any) -> None:
    numpyro = pytest.importorskip("numpyro")
    dist = pytest.importorskip("numpyro.distributions")
    mean = numpyro.sample("mean", dist.Normal(0.0, 2.0))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("data", len(data)):
        numpyro.sample("obs", dist.Normal(mean, scale), obs=data)


def test_variational_inference_step_by_step() -> None:
    infer = pytest.importorskip("numpyro.infer")
    numpyro = pytest.importorskip("numpyro")
    guide = infer.autoguide.AutoNormal(model)
    svi = infer.SVI(model, guide, numpyro.optim.Adam(0.05), infer.Trace_ELBO())
    start = svi.init(KEY, DATA)
    update = jax.jit(svi.update)
    state, losses, step = in_refs(start), refs.new_ref(jnp.zeros(STEPS)), refs.new_ref(0)

    @refs.jit
    def advance() -> None:
        new, loss = svi.update(values(state), DATA)
        write(state, new)
        losses[step[...]] = loss
        step[...] += 1

    expected, expected_losses = start, []
    for _ in range(STEPS):
        expected, loss = update(expected, DATA)
        expected_losses.append(loss)
        advance()
    same(losses[...], jnp.stack(expected_losses))
    same(svi.get_params(values(state)), svi.get_params(expected))


def test_nuts_of_a_model_whose_data_are_in_a_ref() -> None:
    infer = pytest.importorskip("numpyro.infer")
    kernel, plain = infer.NUTS(model), infer.NUTS(model)
    data = refs.new_ref(DATA)
    expected = plain.init(KEY, 0, None, (DATA,), {})
    state = in_refs(kernel.init(KEY, 0, None, (data[...],), {}))

    @refs.jit
    def advance() -> None:
        write(state, kernel.sample(values(state), (data[...],), {}))

    for _ in range(3):
        expected = plain.sample(expected, (DATA,), {})
        advance()
    same(values(state).z, expected.z)


def test_the_gradient_of_a_log_density() -> None:
    log = pytest.importorskip("numpyro.infer.util")
    data = refs.new_ref(DATA)
    params = {"mean": jnp.float32(0.5), "scale": jnp.float32(1.5)}

    def density(params: Any, data: Any) -> Any:
        return log.log_density(model, (data,), {}, params)[0]

    expected = jax.grad(density, (0, 1))(params, DATA)
    got = refs.grad(lambda p, r: density(p, r[...]), (0, 1))(params, data)
    same(got, expected)


# --- chex and jaxtyping ---------------------------------------------------------------------------


def test_chex_counts_traces_and_asserts_on_what_refs_hold() -> None:
    chex = pytest.importorskip("chex")
    r = refs.new_ref(jnp.zeros(3))

    @refs.jit
    @chex.assert_max_traces(n=1)
    def step(r: Any, x: Any) -> None:
        chex.assert_shape(r[...], (3,))
        chex.assert_equal_shape([r[...], x])
        chex.assert_type(x, jnp.float32)
        r[...] += x

    for _ in range(3):
        step(r, jnp.ones(3))
    chex.assert_trees_all_close(values({"r": r}), {"r": jnp.full(3, 3.0)})
    with pytest.raises(AssertionError, match="shape"):
        refs.jit(lambda r: chex.assert_shape(r[...], (4,)))(r)
    with pytest.raises(AssertionError):
        step(r, jnp.ones((3,), jnp.int32))
    same(r[...], np.full(3, 3.0))


def test_a_chex_dataclass_of_refs() -> None:
    chex = pytest.importorskip("chex")

    @chex.dataclass
    class State:
        w: Any
        steps: Any

    @refs.jit
    def step(state: Any, x: Any) -> Any:
        state.steps[...] += 1
        return refs.grad(lambda s: (s.w[...] * x).sum() * s.steps[...])(state).w

    state = State(w=refs.new_ref(jnp.ones(2)), steps=refs.new_ref(jnp.float32(0)))
    for k in (1, 2):
        same(step(state, jnp.array([1.0, 2.0])), k * np.array([1.0, 2.0], np.float32))


def test_types_that_are_checked_when_a_function_runs() -> None:
    jaxtyping = pytest.importorskip("jaxtyping")
    pytest.importorskip("beartype")
    from beartype import beartype

    vector, scalar = jaxtyping.Float[jax.Array, " n"], jaxtyping.Float[jax.Array, ""]
    w = refs.new_ref(jnp.ones(3))

    def product(x, y):
        w[...] += x
        return (x * y).sum()

    product.__annotations__ = {"x": vector, "y": vector, "return": scalar}
    checked = jaxtyping.jaxtyped(typechecker=beartype)(product)
    x = jnp.arange(3.0)
    same(refs.jit(refs.grad(checked))(x, 2 * x), 2 * x)
    same(refs.vmap(checked, in_axes=(0, None))(x[None], x), (x * x).sum()[None])
    with pytest.raises(jaxtyping.TypeCheckError):
        refs.jit(checked)(x, jnp.ones(4))
    same(w[...], 1 + 2 * x)
