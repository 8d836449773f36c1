"""Hamiltonian Monte Carlo with many chains: each lane of `refs.vmap` is a chain.

A chain is written as it would be in a textbook: position and momentum are updated in place, half a
step and a step in turn, and a rejected proposal puts the old position back. `refs.vmap` makes many
chains of it. They share a generator, from which each lane has a stream of its own, and a counter of
accepted proposals, which they all add to.

The target is bent like a banana: x is normal, and y is normal around x² - 1. Its moments are known.

R. M. Neal, "MCMC using Hamiltonian dynamics", arXiv:1206.1901.
"""

import _gallery
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import refs

WIDTH = 0.5  # the standard deviation of y around x² - 1


def potential(position):
    """Minus the logarithm of the density."""
    x, y = position
    return (x**2 + ((y - x**2 + 1) / WIDTH) ** 2) / 2


def main(chains=200, samples=1000, leaps=12, step_size=0.15):
    rng = refs.random.stateful_rng(0)
    accepted = refs.new_ref(0, name="accepted")
    force = jax.grad(lambda q: -potential(q))

    def proposal(q, p):
        """Moves along the orbit of the Hamiltonian potential(q) + p²/2: leapfrog."""

        def leap(_, carry):
            p[...] += step_size / 2 * force(q[...])
            q[...] += step_size * p[...]
            p[...] += step_size / 2 * force(q[...])

        lax.fori_loop(0, leaps, leap, None)

    def energy(q, p):
        return potential(q[...]) + (p[...] ** 2).sum() / 2

    def chain(q):
        def sample(_, __):
            old = q[...]
            p = refs.new_ref(rng.normal(size=2), name="p")
            before = energy(q, p)
            proposal(q, p)
            accept = jnp.log(rng.uniform()) < before - energy(q, p)
            q[...] = jnp.where(accept, q[...], old)
            accepted[...] += accept
            return None, q[...]

        return lax.scan(sample, None, length=samples)[1]

    positions = refs.new_ref(jnp.zeros((chains, 2)), name="positions")
    draws = refs.jit(refs.vmap(chain))(positions)
    np.testing.assert_array_equal(draws[:, -1], positions[...])

    print(f"{chains} chains of {samples} samples, {int(accepted) / chains / samples:.0%} accepted")
    x, y = np.moveaxis(draws[:, samples // 10 :], -1, 0)  # without the first tenth
    exact = {
        "x": (x, 0),
        "y": (y, 0),
        "x²": (x**2, 1),
        "y²": (y**2, 2 + WIDTH**2),
        "x²y": (x**2 * y, 2),
    }
    for name, (values, expected) in exact.items():
        means = values.mean(1)  # of the chains, which are independent
        error = means.std() / np.sqrt(chains)
        print(f"  mean of {name:3} {means.mean():6.3f} ± {error:.3f}, exact: {expected}")
        assert abs(means.mean() - expected) < 4 * error
    return x, y


def draw(axes, result):
    x, y = (values[:, ::100] for values in result)
    axes.scatter(x, y, s=2, rasterized=True)
    grid = np.linspace(-3.2, 3.2, 100)
    axes.plot(grid, grid**2 - 1, color="#e69f00", label="y = x² − 1")
    axes.set(xlabel="x", ylabel="y", ylim=(-2.5, 8))
    axes.legend(loc="upper center")


if __name__ == "__main__":
    _gallery.run(main, draw)
