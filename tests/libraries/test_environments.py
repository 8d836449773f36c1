"""Episodes of environments whose state is a tree of refs, as docs/with/solvers.md has them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs

STEPS = 10


def in_refs(start: Any) -> Any:
    return refs.tree.new_ref(jax.tree.map(jnp.asarray, start), name="state")


def test_gymnax() -> None:
    gymnax = pytest.importorskip("gymnax")
    env, settings = gymnax.make("CartPole-v1")
    _, start = env.reset(jax.random.key(0), settings)

    def step(key: Any, state: Any, action: Any) -> tuple[Any, Any]:
        # The number of results depends on the version.
        _, new, reward, *_ = env.step(key, state, action, settings)
        return new, reward

    state, total, rng = in_refs(start), refs.new_ref(0.0), refs.random.stateful_rng(0)

    @refs.jit
    def run() -> None:
        def body(k: Any, _: Any) -> None:
            new, reward = step(rng.key(), refs.tree.get(state), k % 2)
            refs.tree.set(state, new)
            total[...] += reward

        refs.fori_loop(0, STEPS, body, None)

    run()
    expected, rewards, same_rng = start, 0.0, refs.random.stateful_rng(0)
    for k in range(STEPS):
        expected, reward = step(same_rng.key(), expected, k % 2)
        rewards += float(reward)
    assert float(total) == rewards
    jax.tree.map(close, refs.tree.get(state), expected)


# MuJoCo's Python package, and brax itself, use what newer versions of others deprecate.
@pytest.mark.filterwarnings("ignore")
def test_brax() -> None:
    envs = pytest.importorskip("brax.envs")
    env = envs.get_environment("inverted_pendulum", backend="spring")
    start, action = jax.jit(env.reset)(jax.random.key(0)), jnp.full(env.action_size, 0.1)
    state = in_refs(start)

    @refs.jit
    def step() -> None:
        refs.tree.set(state, env.step(refs.tree.get(state), action))

    expected, natively = start, jax.jit(env.step)
    for _ in range(3):
        step()
        expected = natively(expected, action)
    jax.tree.map(close, refs.tree.get(state), expected)


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
