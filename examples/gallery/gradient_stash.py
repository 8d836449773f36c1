"""The gradient at each layer of a deep network, logged by the backward pass.

Does the gradient vanish on its way down, or does it explode? `watch` is the identity, with a
derivative rule whose backward half writes the size of the gradient that passes through it to a ref.
The forward pass writes the size of the activations beside it. Nothing is returned, nothing is
printed from inside, and the layers may be in a scan.
"""

import _gallery
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import refs

LAYERS, WIDTH = 40, 64

activations = refs.new_ref(jnp.zeros(LAYERS), name="activations")
gradients = refs.new_ref(jnp.zeros(LAYERS), name="gradients")


def rms(x):
    return jnp.sqrt((x**2).mean())


@jax.custom_vjp
def watch(x, k):
    """The identity; logs x, and its gradient, as those of layer k."""
    activations[k] = rms(x)
    return x


def watch_forward(x, k):
    return watch(x, k), k


def watch_backward(k, gradient):
    gradients[k] = rms(gradient)
    return gradient, None


watch.defvjp(watch_forward, watch_backward)


def loss(weights, x):
    def layer(x, inputs):
        w, k = inputs
        return jnp.tanh(watch(x, k) @ w), None

    x, _ = lax.scan(layer, x, (weights, jnp.arange(LAYERS)))
    return (x**2).sum()


def control(nothing, weights, x):
    """The gradient with respect to zeros that are added to the inputs of the layers."""

    def layer(x, inputs):
        w, zeros = inputs
        return jnp.tanh((x + zeros) @ w), x

    x, inputs = lax.scan(layer, x, (weights, nothing))
    return (x**2).sum(), inputs


def main(scales=(0.8, 1.0, 2.0)):
    key, x_key = jax.random.split(jax.random.key(0))
    normal = jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) / np.sqrt(WIDTH)
    x = 0.1 * jax.random.normal(x_key, (WIDTH,))
    gradient = refs.jit(refs.grad(loss))

    found = {}
    for scale in scales:
        gradient(scale * normal, x)
        nothing = jnp.zeros((LAYERS, WIDTH))
        expected, inputs = jax.grad(control, has_aux=True)(nothing, scale * normal, x)
        np.testing.assert_allclose(gradients[...], jax.vmap(rms)(expected), rtol=1e-4)
        np.testing.assert_allclose(activations[...], jax.vmap(rms)(inputs), rtol=1e-4)

        found[scale] = np.asarray(gradients) / float(gradients[-1])
        print(f"weights × {scale}: gradient at the first layer {found[scale][0]:.1e} of the last's")
    return found


def draw(axes, found):
    for scale, sizes in found.items():
        axes.semilogy(sizes, label=f"weights × {scale}")
    axes.set(xlabel="layer", ylabel="gradient, relative to the last")
    axes.legend()


if __name__ == "__main__":
    _gallery.run(main, draw)
