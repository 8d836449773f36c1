"""Spectral normalisation: the vectors of a power iteration are state of the layers.

Each layer divides its weights by an estimate of their largest singular value, so the network is a
function with slope of at most 1. The estimate comes from one step of a power iteration in each
forward pass, which starts from the vector that the last pass left. That vector is in a ref: the
forward pass updates it under `refs.grad`, and no signature mentions it.

The network here is a critic that tells two clouds of points apart. What a function of slope 1 can
make of them is at most their Wasserstein distance, and the best critic attains it.

T. Miyato, T. Kataoka, M. Koyama and Y. Yoshida, "Spectral normalization for generative adversarial
networks", arXiv:1802.05957.
"""

import _gallery
import jax
import jax.numpy as jnp
import numpy as np

import refs


class Linear:
    """`x @ (w / sigma) + b`, where `sigma` estimates the largest singular value of `w`."""

    def __init__(self, key, n_in, n_out):
        w_key, u_key = jax.random.split(key)
        self.w = refs.new_ref(jax.random.normal(w_key, (n_in, n_out)), name="w")
        self.b = refs.new_ref(jnp.zeros(n_out), name="b")
        self.u = refs.new_ref(jax.random.normal(u_key, (n_out,)), name="u")

    def __call__(self, x):
        w = jax.lax.stop_gradient(self.w[...])
        v = unit(w @ self.u[...])
        self.u[...] = unit(v @ w)
        sigma = v @ self.w[...] @ self.u[...]  # the vectors are constants to the derivative
        return x @ (self.w[...] / sigma) + self.b[...]


def unit(x):
    return x / jnp.linalg.norm(x)


def main(steps=400, distance=3.0):
    *keys, cloud_key = jax.random.split(jax.random.key(0), 4)
    shapes = [(2, 32), (32, 32), (32, 1)]
    layers = [Linear(key, *shape) for key, shape in zip(keys, shapes, strict=True)]
    left = jax.random.normal(cloud_key, (256, 2))
    right = left + jnp.array([distance, 0.0])

    def critic(x):
        for layer in layers[:-1]:
            x = jnp.abs(layer(x))  # slope 1, as the layers have
        return layers[-1](x)

    def difference(params):
        return (critic(right) - critic(left)).mean()

    @refs.jit
    def train(params):
        value, grads = refs.value_and_grad(difference)(params)
        for p, g in zip(jax.tree.leaves(params), jax.tree.leaves(grads), strict=True):
            p[...] += 0.1 * g
        return value

    params = [(layer.w, layer.b) for layer in layers]
    values = np.array([train(params) for _ in range(steps)])

    for layer in layers:
        w, u = np.asarray(layer.w), np.asarray(layer.u)
        sigma = np.linalg.svd(w, compute_uv=False)[0]
        np.testing.assert_allclose(np.linalg.norm(w @ u), sigma, rtol=1e-2)

    # Equation 12 of the paper, for the last layer: d(c · w/σ)/dw = (c - (c · w/σ) v uᵀ) / σ.
    last, c = layers[-1], np.linspace(-1, 1, 32, dtype=np.float32)
    grad = refs.grad(lambda w: last(c)[0])(last.w)
    w, u = np.asarray(last.w), np.asarray(last.u)
    sigma = np.linalg.norm(w @ u)
    expected = (c[:, None] - (c @ w / sigma) * np.outer(w @ u / sigma, u)) / sigma
    np.testing.assert_allclose(grad, expected, rtol=1e-3, atol=1e-5)

    assert 0.95 * distance < values[-1] < 1.01 * distance
    print(f"Wasserstein distance {distance}; the critic finds {values[-1]:.3f}")
    return values, distance


def draw(axes, result):
    values, distance = result
    axes.plot(values, label="critic")
    axes.axhline(distance, color="#666", linestyle=":", label="Wasserstein distance")
    axes.set(xlabel="step", ylabel="difference of means", ylim=(0, 1.1 * distance))
    axes.legend(loc="lower right")


if __name__ == "__main__":
    _gallery.run(main, draw)
