"""Differentiable plasticity: a network that learns while it runs, and learns how to learn.

The connections have a fixed part and a plastic part, `w + alpha * trace`. The Hebbian trace is
written in the forward pass: it is what the network remembers of an episode. Gradient descent finds
`w`, `alpha` and the rate of the trace, so derivatives must go through these writes. With refs the
trace is a ref that the step updates, and `refs.grad` follows it.

In an episode the network sees a few random patterns, and then one of them with half of its bits
blanked out, which it has to complete.

T. Miconi, J. Clune and K. O. Stanley, "Differentiable plasticity: training plastic neural networks
with backpropagation", arXiv:1804.02464.
"""

import _gallery
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import refs

BITS, PATTERNS = 20, 3


def episode(params, patterns, shown, target):
    """The error of the completed pattern."""
    w, alpha, rate = params["w"][...], params["alpha"][...], params["rate"][...]
    trace = refs.new_ref(jnp.zeros((BITS, BITS)), name="trace")

    def respond(x):
        return jnp.tanh(20 * x + x @ (w + alpha * trace[...]))

    def observe(_, x):
        y = respond(x)
        trace[...] += rate * (jnp.outer(x, y) - trace[...])
        return None, None

    lax.scan(observe, None, patterns)
    return ((respond(shown) - target) ** 2).mean()


def by_hand(params, patterns, shown, target):
    """The same, with the trace threaded through the scan: the control."""
    w, alpha, rate = params["w"], params["alpha"], params["rate"]

    def respond(trace, x):
        return jnp.tanh(20 * x + x @ (w + alpha * trace))

    def observe(trace, x):
        return trace + rate * (jnp.outer(x, respond(trace, x)) - trace), None

    trace, _ = lax.scan(observe, jnp.zeros((BITS, BITS)), patterns)
    return ((respond(trace, shown) - target) ** 2).mean()


def sample(key, n):
    """Episodes: the patterns, one of them with half of the bits set to 0, and the same whole."""
    a, b, c = jax.random.split(key, 3)
    patterns = jax.random.rademacher(a, (n, PATTERNS, BITS), jnp.float32)
    target = patterns[jnp.arange(n), jax.random.randint(b, n, 0, PATTERNS)]
    order = jax.vmap(lambda k: jax.random.permutation(k, BITS))(jax.random.split(c, n))
    return patterns, jnp.where(order < BITS // 2, 0, target), target


def main(steps=400):
    a, b = jax.random.split(jax.random.key(0))
    start = {
        "w": 0.01 * jax.random.normal(a, (BITS, BITS)),
        "alpha": 0.01 * jax.random.normal(b, (BITS, BITS)),
        "rate": jnp.float32(0.1),
    }
    params = refs.tree.new_ref(start)
    squares = refs.tree.new_ref(jax.tree.map(jnp.zeros_like, start))  # of gradients, for RMSprop

    def loss(params, episodes):
        return refs.vmap(episode, in_axes=(None, 0, 0, 0))(params, *episodes).mean()

    @refs.jit
    def train(key):
        value, grads = refs.value_and_grad(loss)(params, sample(key, 32))
        for name, g in grads.items():
            squares[name][...] = 0.99 * squares[name][...] + 0.01 * g**2
            params[name][...] -= 0.003 * g / (jnp.sqrt(squares[name][...]) + 1e-6)
        return value

    episodes = sample(jax.random.key(1), 4)
    grads = refs.jit(refs.grad(loss))(params, episodes)
    control = jax.grad(
        lambda params: jax.vmap(by_hand, in_axes=(None, 0, 0, 0))(params, *episodes).mean()
    )(start)
    for name in start:
        np.testing.assert_allclose(grads[name], control[name], rtol=1e-4, atol=1e-7)

    losses = np.array([train(key) for key in jax.random.split(jax.random.key(2), steps)])
    before, after = losses[0], losses[-20:].mean()
    assert after < 0.25 * before
    print(f"error of a completed pattern: {before:.3f}, after training {after:.3f}")
    print(f"rate of the trace: {start['rate']:.2f}, after training {params['rate']:.2f}")
    return losses


def draw(axes, losses):
    axes.plot(losses)
    axes.set(xlabel="step of 32 episodes", ylabel="error of the pattern", ylim=(0, None))


if __name__ == "__main__":
    _gallery.run(main, draw)
