"""Gradients of a large batch from small ones: the same gradient, in a fraction of the memory.

The gradients of the small batches are added up in refs, which a scan over these batches updates in
place. So the memory is that of one small batch and of one gradient. The optimiser's step reads the
refs when all batches have been added.
"""

import _gallery
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import refs

LAYERS, WIDTH = 6, 64


def loss(params, x, y):
    """The mean squared error; `params` are arrays or refs."""
    for w in params[:-1]:
        x = jnp.tanh(x @ w[...])
    return ((x @ params[-1][...] - y) ** 2).mean()


def accumulator(params, parts):
    """A function that writes the gradient of a batch to refs, from `parts` parts of it."""
    total = refs.tree.new_ref([jnp.zeros(w.shape) for w in params])

    @refs.jit
    def accumulate(x, y):
        def add(_, part):
            for t, g in zip(total, refs.grad(loss)(params, *part), strict=True):
                t[...] += g / parts
            return None, None

        for t in total:
            t[...] = jnp.zeros(t.shape)
        split = [a.reshape(parts, -1, *a.shape[1:]) for a in (x, y)]
        lax.scan(add, None, split)

    return total, accumulate


def main(batch=4096, parts=(1, 4, 16, 64)):
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    params = refs.tree.new_ref(
        [jax.random.normal(key, (WIDTH, WIDTH)) / np.sqrt(WIDTH) for key in keys[:LAYERS]]
    )
    x = jax.random.normal(keys[-1], (batch, WIDTH))
    y = jnp.sin(3 * x)
    expected = jax.jit(jax.grad(loss))(refs.tree.get(params), x, y)

    mebibytes = []
    for n in parts:
        total, accumulate = accumulator(params, n)
        accumulate(x, y)
        accumulate(x, y)  # starts again from zero
        for t, g in zip(total, expected, strict=True):
            np.testing.assert_allclose(t[...], g, rtol=1e-3, atol=1e-6)
        memory = accumulate.lower(x, y).compile().memory_analysis()
        mebibytes.append(memory.temp_size_in_bytes / 2**20)
        print(f"{n:3} parts of {batch // n:4} samples: {mebibytes[-1]:6.2f} MiB, the same gradient")
    assert mebibytes == sorted(mebibytes, reverse=True)
    return parts, mebibytes


def draw(axes, result):
    parts, mebibytes = result
    bars = axes.bar([str(n) for n in parts], mebibytes, width=0.5, color="#56b4e9")
    axes.bar_label(bars, fmt="%.2f", padding=2)
    axes.set(xlabel="parts of the batch", ylabel="MiB of temporary memory")


if __name__ == "__main__":
    _gallery.run(main, draw)
